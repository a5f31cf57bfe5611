"""Whether two tensors hold the same bits, however they lie."""

from __future__ import annotations

import pytest
import torch

from memfit.bits import same_bits
from memfit.compiler.recorded_ops import fingerprint

ONE = torch.ones(3)


@pytest.mark.parametrize("lying", [ONE[:1].as_strided((1,), (0,)), ONE[::2][:1], ONE[0].expand(1, 1)])
def test_a_single_element_has_bits_whatever_its_stride(lying: torch.Tensor) -> None:
    plain = torch.ones(lying.shape)
    assert same_bits(lying, plain) and fingerprint(lying) == fingerprint(plain)
    assert not same_bits(lying, plain + 1) and fingerprint(lying) != fingerprint(plain + 1)


def test_zeros_of_two_signs_differ_and_nans_do_not() -> None:
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert same_bits(torch.full((2,), torch.nan), torch.full((2,), torch.nan))
