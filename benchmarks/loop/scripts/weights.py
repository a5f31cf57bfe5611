"""A hash of all parameters and buffers, by which two runs of a script are compared."""

import hashlib


def told(*models):
    """Prints the hash."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    data = b"".join(t.detach().double().cpu().numpy().tobytes() for t in tensors)
    print("weights", hashlib.sha256(data).hexdigest()[:16])
