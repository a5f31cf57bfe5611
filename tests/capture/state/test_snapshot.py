"""Everything reachable is as before after planning, or after anything else."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved, snapshot

COUNT = 0
SEEN: list[torch.Tensor] = []


class Busy(nn.Module):
    """Changes everything that a forward pass can change."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.generator = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(0)
        self.python = random.Random(0)
        self.register_buffer("sized_later", torch.zeros(0))
        self.number = 0
        self.history: list[Any] = [torch.zeros(3)]
        self.nested = {"a": [1, 2], "b": {"c": deque([1])}, "s": {1}}
        self.array = np.zeros(3)
        self.layer.register_forward_hook(counting)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).passes += 1
        self.number += 1
        self.history[0].add_(1)
        self.history.append(x)
        self.nested["a"].append(3)
        self.nested["b"]["c"].append(2)
        self.nested["s"].add(2)
        self.nested["new"] = 1
        self.array += 1
        self.rng.random()
        self.python.random()
        random.random()
        np.random.rand()
        torch.rand(1, generator=self.generator)
        self.sized_later.resize_(4).fill_(2.0)
        self.frozen.data.mul_(2.0)
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        self.later = x
        return self.norm(self.layer(x)) + torch.randn(4)


def counting(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    global COUNT
    COUNT += 1
    SEEN.append(output)


def told(module: Busy) -> list[Any]:
    tensors = [*module.state_dict().values(), *(p.grad for p in module.parameters()), module.history[0]]
    versions = [t._version for t in module.state_dict(keep_vars=True).values()]
    states = [module.generator.get_state(), torch.get_rng_state(), module.array]
    plain = [module.number, len(module.history), module.nested, hasattr(module, "later"), Busy.passes, COUNT, len(SEEN)]
    plain += [module.rng.bit_generator.state, module.python.getstate(), random.getstate(), versions]
    return copy.deepcopy([*tensors, *states, str(np.random.get_state()), *plain])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b))
    return bool(a == b)


@pytest.mark.parametrize("how", ["to its end", "failing", "interrupted"])
def test_everything_reachable_is_restored(how: str) -> None:
    module = Busy().train()
    before = told(module)
    error = {"failing": ValueError, "interrupted": KeyboardInterrupt}.get(how)
    try:
        with preserved(module):
            module(torch.randn(5, 4)).sum().backward()
            assert not all(same(a, b) for a, b in zip(before, told(module), strict=True))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    after = told(module)
    assert [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if not same(a, b)] == []


def test_planning_a_module_that_changes_everything_leaves_it_alone() -> None:
    module, x = Busy().train(), torch.randn(5, 4)
    before = told(module)
    try:
        memfit.fit(module, (x,), budget="1GiB", loss_fn=lambda output: output.square().sum(), search_seconds=0.1)
    except memfit.CaptureError:  # it may be refused; it may not be changed
        pass
    after = told(module)
    assert [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if not same(a, b)] == []


def test_a_snapshot_is_restored_any_number_of_times() -> None:
    module = Busy().train()
    before = told(module)
    state = snapshot(module)
    for _ in range(2):
        module(torch.randn(5, 4)).sum().backward()
        state.restore()
        assert all(same(a, b) for a, b in zip(before, told(module), strict=True))


def test_a_global_with_the_name_of_an_attribute_is_not_reachable() -> None:
    """What is not reachable may be changed by others meanwhile, for example by another thread."""

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.SEEN = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.SEEN(x)

    before = len(SEEN)
    with preserved(Seeing()):
        SEEN.append(torch.zeros(()))
    assert len(SEEN) == before + 1


def test_what_is_reachable_from_a_loss_is_restored() -> None:
    centre, calls = torch.zeros(3), []

    class Loss:
        momentum = 0.9

        def __call__(self, output: torch.Tensor) -> torch.Tensor:
            centre.lerp_(output.detach().mean(0), 1 - self.momentum)
            calls.append(float(centre.sum()))
            return (output - centre).square().mean()

    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    memfit.fit(module, (x,), budget="1GiB", loss_fn=Loss(), search_seconds=0.1)
    assert centre.count_nonzero() == 0 and not calls


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["append", "pop", "write", "bind", "grad", "unbind"]), min_size=1, max_size=8))
def test_any_changes_in_any_order(changes: list[str]) -> None:
    module = nn.Module()
    module.held = [torch.arange(3.0), {"t": torch.ones(2, requires_grad=True)}]
    module.weight = nn.Parameter(torch.ones(2))
    first, inner = module.held
    with preserved(module):
        for change in changes:
            if change == "append":
                module.held.append(torch.zeros(1))
            elif change == "pop" and module.held:
                module.held.pop()
            elif change == "write":
                first.mul_(2)
            elif change == "bind":
                inner["t"] = torch.zeros(3)
            elif change == "grad":
                module.weight.square().sum().backward()
            elif change == "unbind":
                vars(module).pop("held", None)
                module.held = []
    assert len(module.held) == 2 and module.held[0] is first and module.held[1] is inner
    assert torch.equal(first, torch.arange(3.0)) and torch.equal(inner["t"].detach(), torch.ones(2))
    assert module.weight.grad is None


def test_inputs_of_a_graph_become_leaves_of_the_same_memory() -> None:
    made = torch.ones(3, requires_grad=True) * 2
    leaf, plain = torch.ones(3, requires_grad=True), torch.ones(3)
    cut = detached((made, {"x": leaf}, made), {"y": plain, "n": 3})
    first, second = cut.args[0], cut.args[1]["x"]
    assert first is cut.args[2] and first is not made and first.data_ptr() == made.data_ptr()
    assert not first.is_leaf and second.is_leaf and second is not leaf
    assert cut.kwargs["y"] is plain and cut.kwargs["n"] == 3
    (first.sum() + second.sum()).backward()
    assert leaf.grad is None and [t.grad is not None for t in cut.leaves] == [True, True]


def test_planning_stays_out_of_the_callers_graph() -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    hidden, target = torch.tanh(encoder(x)), torch.sigmoid(encoder(x))[:, :4]

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output - target[: len(output)]).square().mean()

    memfit.fit(decoder, (hidden,), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    assert encoder.weight.grad is None
    loss(decoder(hidden)).backward()  # neither graph was gone through
    plain = copy.deepcopy((encoder, memfit.release(copy.deepcopy(decoder))))
    for module in plain:
        module.zero_grad()
    target = torch.sigmoid(plain[0](x))[:, :4]
    loss(plain[1](torch.tanh(plain[0](x)))).backward()
    assert torch.equal(encoder.weight.grad, plain[0].weight.grad)


class Making(OrderedDict[str, Any]):
    """Makes an object of what it holds each time it is read, as tables of activations in transformers do."""

    def __getitem__(self, key: str) -> Any:
        raise TypeError(f"{key} cannot be made without arguments")

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("cannot be changed so")


class Reluctant(list[Any]):
    """A list that is not looked through."""

    def __iter__(self) -> Any:
        raise TypeError("cannot be looked through")


class Shy(set[Any]):
    """A set that is not looked through."""

    def __iter__(self) -> Any:
        raise TypeError("cannot be looked through")


def test_containers_are_read_by_the_methods_of_their_base_class() -> None:
    kept, added = torch.zeros(2), object()
    making, reluctant, shy = Making(b=kept, a=nn.ReLU), Reluctant([kept, 1]), Shy([kept])
    making.move_to_end("b")
    with preserved((making, reluctant, shy)):
        OrderedDict.__setitem__(making, "c", added)
        making.move_to_end("a")
        reluctant.append(added)
        shy.add(added)
        kept.add_(1)
    assert list(making) == ["a", "b"] and dict.__getitem__(making, "b") is kept
    assert len(reluctant) == 2 and len(shy) == 1 and added not in shy
    assert torch.equal(kept, torch.zeros(2))
