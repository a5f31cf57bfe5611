"""The models, each with about the smallest batch at which a budget is about activations.

Activations are at least 85 % of the baseline step's peak, and the widest op at most 22 %, so that a budget of 25 % is
possible; `python -m benchmarks.overhead.cases` finds the smallest ones from estimates alone. Text models are
narrow and have a small vocabulary, because the time of a step at a given share of activations grows with the cube
of the width.

Known limits: ResNet-18, VGG-16 and Inception v3 have an op that is wider than 22 % at any batch that runs in seconds.
"""

from __future__ import annotations

import sys

from benchmarks.subject import Case, case_of
from memfit.tools.estimate import estimate
from memfit.zoo import build

__all__ = ["CASES", "EXTRA_BUDGETS", "HEADLINE", "smallest_batch"]

_TEXT = (256,)
_NARROW = "vocab_size=1024"

CASES: dict[str, Case] = {
    "resnet50": Case(spec="torchvision:resnet50", batch=24),
    "resnet152": Case(spec="torchvision:resnet152", batch=16),
    "mobilenet_v2": Case(spec="torchvision:mobilenet_v2", batch=16),
    "densenet121": Case(spec="torchvision:densenet121", batch=8),
    "inception_v4": Case(spec="timm:inception_v4", batch=16),
    "unet": Case(spec="zoo:unet?width=32", batch=6),
    "gpt2": Case(spec=f"hf:gpt2?n_embd=384&n_head=6&{_NARROW}", batch=8, shape=_TEXT),
    "vit_small": Case(spec="timm:vit_small_patch16_224", batch=16),
    "resnet18": Case(spec="torchvision:resnet18", batch=24),
    "resnet101": Case(spec="torchvision:resnet101", batch=20),
    "resnet200": Case(spec="zoo:resnet-deep", batch=12),
    "inception_v3": Case(spec="torchvision:inception_v3", batch=16),
    "swin_t": Case(spec="torchvision:swin_t", batch=16),
    "convnext_tiny": Case(spec="torchvision:convnext_tiny", batch=16),
    "gpt": Case(spec="zoo:gpt?layers=12", batch=8, shape=_TEXT),
    "llama": Case(spec="zoo:llama?layers=12", batch=8, shape=_TEXT),
    "llama_32": Case(
        spec="zoo:llama?layers=32&width=256&heads=8&kv_heads=8&hidden=688&positions=1024", batch=2, shape=(1024,)
    ),
    "bert": Case(
        spec=f"hf:bert?hidden_size=384&num_attention_heads=6&intermediate_size=1536&{_NARROW}", batch=8, shape=_TEXT
    ),
    "t5": Case(spec=f"hf:t5?d_model=256&d_ff=1024&num_heads=4&{_NARROW}", batch=8, shape=_TEXT),
    "lstm": Case(spec="zoo:lstm-classifier?unrolled=true", batch=32, shape=(64,)),
    "vgg16": Case(spec="torchvision:vgg16", batch=64),
}

HEADLINE = tuple(CASES)[:8]
"""The models whose overhead issue 2 puts a number on."""

EXTRA_BUDGETS = {"vgg16": ("62",)}

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)


def smallest_batch(case: Case, *, activations: float = 0.85, widest: float = 0.22) -> int:
    """The smallest batch size whose activations and widest op have these shares of the baseline peak; 0 if none has."""
    low, high = 0, len(_SIZES)
    while low < high:
        middle = (low + high) // 2
        # On the CPU and not without memory: some models of transformers look at values.
        example = build(case.spec, batch=_SIZES[middle], shape=case.shape)
        found = estimate(example.model, example.args, example.kwargs, loss_fn=example.loss_fn)
        enough = found.activations >= activations * found.peak and found.least <= widest * found.peak
        low, high = (low, middle) if enough else (middle + 1, high)
    return _SIZES[low] if low < len(_SIZES) else 0


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        case = CASES.get(name) or case_of(name)
        print(f"{name}: {case.batch} in the table, smallest {smallest_batch(case) or 'none'}", flush=True)
