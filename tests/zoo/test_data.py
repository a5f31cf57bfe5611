import sys

import pytest
import torch

from memfit.errors import SpecError
from memfit.zoo import photo_crops, standard_library_text, text_windows
from memfit.zoo.data import _photographs


def test_crops_are_normalised_labelled_and_seeded():
    pytest.importorskip("sklearn")
    batches = photo_crops(batch=64, size=48, seed=3)
    crops, labels = next(batches)
    assert crops.shape == (64, 3, 48, 48) and crops.dtype is torch.float32
    assert labels.shape == (64,) and set(labels.tolist()) == {0, 1}
    assert abs(float(crops.mean())) < 0.5 and 0.5 < float(crops.std()) < 1.5
    again = photo_crops(batch=64, size=48, seed=3)
    assert torch.equal(crops, next(again)[0])
    assert not torch.equal(next(batches)[0], crops)
    assert not torch.equal(next(photo_crops(batch=64, size=48, seed=4))[0], crops)


def test_a_crop_is_from_the_photograph_its_label_names():
    pytest.importorskip("sklearn")
    crops, labels = next(photo_crops(batch=2, size=427))
    photos = _photographs()
    for crop, label in zip(crops, labels.tolist(), strict=True):
        assert any(torch.equal(crop, photos[label, :, :, x : x + 427]) for x in range(640 - 427 + 1))


def test_windows_are_followed_by_their_next_bytes():
    text = bytes(standard_library_text().tolist())
    assert len(text) > 100_000
    x, y = next(text_windows(batch=5, length=30, seed=1))
    assert x.shape == y.shape == (5, 30) and x.dtype is torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for row, following in zip(x, y, strict=True):
        assert bytes([*row.tolist(), int(following[-1])]) in text
    assert torch.equal(x, next(text_windows(batch=5, length=30, seed=1))[0])


@pytest.mark.parametrize("size", [0, 428])
def test_a_crop_larger_than_the_photographs_is_refused(size):
    pytest.importorskip("sklearn")
    with pytest.raises(SpecError, match=f"427×640 .*size: {size}"):
        photo_crops(batch=1, size=size)


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(SpecError, match="length: 1000000000"):
        text_windows(batch=1, length=10**9)


def test_missing_scikit_learn_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    _photographs.cache_clear()
    with pytest.raises(SpecError, match=r"pip install 'memfit\[demo\]'"):
        photo_crops(batch=1, size=8)
