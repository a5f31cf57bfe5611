"""Errors of graphs that cannot be planned as they are."""

from __future__ import annotations

from memfit.errors import CaptureError

__all__ = ["UnplannableGraphError", "checkpoint_error"]


class UnplannableGraphError(CaptureError):
    """A graph that cannot be planned as it is, but may run as plain code between planned subgraphs."""


def checkpoint_error(place: str) -> CaptureError:
    """The error for a model that checkpoints itself at a place."""
    return CaptureError(
        f"the model already checkpoints itself, so memfit cannot plan it (at {place}); turn it off there (models of "
        "transformers: model.gradient_checkpointing_disable(), of timm: model.set_grad_checkpointing(False)), or pass "
        'checkpointing="replace" to memfit, which runs these regions as if they were not checkpointed, with the same '
        "bits"
    )
