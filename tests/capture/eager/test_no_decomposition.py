"""What is put aside while a graph is made is back afterwards, whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch._C import DispatchKey

from memfit.capture.eager.no_decomposition import as_in_eager


def test_kernels_come_back_after_an_error() -> None:
    overload = torch.ops.aten.upsample_bilinear2d.default
    before = dict(overload.py_kernels)
    assert DispatchKey.Autograd in before  # or torch does not take it apart any more
    with pytest.raises(RuntimeError, match="broken"), as_in_eager():
        assert DispatchKey.Autograd not in overload.py_kernels
        raise RuntimeError("broken")
    assert overload.py_kernels == before
