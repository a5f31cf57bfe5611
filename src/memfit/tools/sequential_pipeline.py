"""Models as lists of layers, the only form that torchgpipe and cuts by number of layers accept.

Parameters are shared with the model, which stays unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.gpt import GPT

__all__ = ["GPTEmbedding", "as_sequential", "equal_ends"]


def equal_ends(layers: nn.Sequential, num_stages: int) -> list[int]:
    """The ends of stages with the same number of blocks.

    Blocks are the layers of the most frequent kind; layers before the blocks are in the first stage, layers after them
    in the last.
    """
    kinds = [type(layer) for layer in layers]
    blocks = [place for place, kind in enumerate(kinds) if kind is max(kinds, key=kinds.count)]
    cuts = [blocks[round(len(blocks) * stage / num_stages)] for stage in range(1, num_stages)]
    return [*cuts, len(layers)]


class GPTEmbedding(nn.Module):
    """Layers of a GPT before its blocks: embeddings of tokens and positions, and dropout."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """From token ids [N, T] to [N, T, width]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.dropout(x)
        return out


def as_sequential(model: nn.Module) -> nn.Sequential:
    """The layers of this package's GPT or of a torchvision ResNet, one after the other.

    Raises:
        SpecError: if the model is of another class.
    """
    if isinstance(model, GPT):
        return nn.Sequential(GPTEmbedding(model), *model.blocks, model.norm, model.head)
    if type(model).__name__ == "ResNet" and hasattr(model, "layer4"):
        parts: Any = model
        stem = nn.Sequential(parts.conv1, parts.bn1, parts.relu, parts.maxpool)  # its ReLU writes over its operand
        blocks = [block for layer in (parts.layer1, parts.layer2, parts.layer3, parts.layer4) for block in layer]
        return nn.Sequential(stem, *blocks, parts.avgpool, nn.Flatten(1), parts.fc)
    raise SpecError(
        f"torchgpipe and cuts by layers take a list of layers, and {type(model).__name__} is none; compare "
        "zoo:seed-gpt2, zoo:gpt or torchvision:resnet101"
    )
