from pathlib import Path

import pytest
import torch

from memfit.errors import SpecError
from memfit.zoo import Example, build

FACTORIES = """
import torch
from torch import nn
from beside import features

from memfit.zoo import Example

def module():
    return nn.Linear(features, 3)

def with_args(batch, dtype, width=5):
    x = torch.randn(batch, features, dtype=dtype)
    return nn.Sequential(nn.Linear(features, width), nn.Linear(width, 3)).to(dtype), (x,)

class Scaled(nn.Linear):
    def forward(self, x, *, scale):
        return super().forward(x) * scale

def with_kwargs():
    return Scaled(features, 3), (torch.ones(2, features),), {"scale": torch.ones(3)}

def whole(*, batch, seed):
    x = torch.ones(batch, features)
    return Example(model=nn.Linear(features, 1), args=(x,), loss_fn=torch.sum, label=f"mine {seed}")

def nothing():
    return None

def wrong_order():
    return (torch.ones(2),), nn.Linear(2, 2)

def broken():
    raise ValueError("the user's own")

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("features = 4\n")
    path = tmp_path / "my train.py"
    path.write_text(FACTORIES)
    return path


def test_a_module_gets_inputs_of_the_shape_asked_for(file):
    example = build(f"{file}:module", batch=2, shape=(4,))
    assert example.model(*example.args).shape == (2, 3)
    assert example.label == f"{file}:module · 2×4 float32"
    assert build(f"{file}:module", batch=2).args == ()


def test_a_factory_gets_what_it_has_parameters_for(file):
    example = build(f"{file}:with_args?width=7", batch=6, dtype=torch.float64)
    assert example.args[0].shape == (6, 4) and example.args[0].dtype is torch.float64
    assert example.model[0].out_features == 7
    again = build(f"{file}:with_args?width=7", batch=6, dtype=torch.float64)
    assert torch.equal(example.args[0], again.args[0])


def test_a_factory_may_give_keyword_arguments(file):
    example = build(f"{file}:with_kwargs", batch=2)
    assert example.model(*example.args, **example.kwargs).shape == (2, 3)


def test_a_factory_may_give_a_whole_example(file, run_step):
    example = build(f"{file}:whole", batch=2, seed=5)
    assert isinstance(example, Example) and example.label == "mine 5"
    run_step(example)


def test_everything_is_moved_to_the_device(file):
    example = build(f"{file}:with_kwargs", batch=2, device="meta")
    tensors = [*example.model.parameters(), *example.args, *example.kwargs.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modul", "unknown function of my train.py: 'modul'; did you mean module"),
        ("number", "unknown function of my train.py"),
        ("with_args?widt=7", "unknown option of .* 'widt'; did you mean width"),
        ("nothing", "returned NoneType; return a module"),
        ("wrong_order", r"returned \(tuple, Linear\); return a module"),
    ],
)
def test_what_cannot_be_built_says_why(file, name, message):
    with pytest.raises(SpecError, match=message):
        build(f"{file}:{name}", batch=2)


def test_a_missing_file_or_function_name_says_so(file, tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        build(f"{tmp_path}/other.py:module", batch=2)
    with pytest.raises(SpecError, match="which function"):
        build(str(file), batch=2)


def test_what_the_users_code_raises_passes_through(file):
    with pytest.raises(ValueError, match="the user's own") as caught:
        build(f"{file}:broken", batch=2)
    assert not isinstance(caught.value, SpecError)
