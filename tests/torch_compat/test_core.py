"""Each private interface of torch does what memfit relies on, on the oldest torch and the newest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from memfit.torch_compat import core
from tests.torch_compat.checks import Checks

aten = torch.ops.aten
CHECKS = Checks()
uses = CHECKS.uses


@uses("FakeTensor", "FakeTensorMode", "detect_fake_mode", "unset_fake_temporarily")
def fake_tensors_have_no_memory_and_name_their_mode() -> None:
    with core.FakeTensorMode() as mode:
        fake = torch.empty(2**40)
        with core.unset_fake_temporarily():
            assert type(torch.ones(2)) is torch.Tensor
    assert isinstance(fake, core.FakeTensor) and core.detect_fake_mode([fake]) is mode
    assert core.detect_fake_mode([torch.ones(2)]) is None


@uses("VALUE_ERRORS")
def values_of_fake_tensors_are_asked_in_vain() -> None:
    with core.FakeTensorMode():
        fake = torch.ones(3)
        for asks in (lambda: fake.sum().item(), lambda: fake.nonzero()):
            with pytest.raises(core.VALUE_ERRORS):
                asks()


@uses("subclasses")
def the_class_of_fake_tensors_has_a_second_name() -> None:
    assert vars(core.subclasses)["FakeTensor"] is core.FakeTensor and "__getattr__" not in vars(core.subclasses)


@uses("fake_impls")
def an_op_can_get_a_rule_for_fake_tensors_and_lose_it() -> None:
    op = aten._grouped_mm.default
    if op in core.fake_impls.op_implementations_dict:
        pytest.skip("torch has a rule for it")
    core.fake_impls.register_op_impl(op)(lambda *_: None)
    assert op in core.fake_impls.op_implementations_dict
    core.fake_impls._deregister_op_impl(op)
    assert op not in core.fake_impls.op_implementations_dict


@uses("pytree")
def containers_are_flattened_and_put_together() -> None:
    nested = {"a": [1, 2], "b": (3,)}
    leaves, spec = core.pytree.tree_flatten(nested)
    assert leaves == core.pytree.tree_leaves(nested) == [1, 2, 3] and isinstance(spec, core.pytree.TreeSpec)
    assert core.pytree.tree_unflatten(leaves, spec) == nested
    assert core.pytree.tree_map(str, nested) == {"a": ["1", "2"], "b": ("3",)}
    assert core.pytree.tree_map_only(int, float, nested) == nested


@uses("OpOverload", "OpOverloadPacket", "HigherOrderOperator")
def ops_have_classes() -> None:
    assert isinstance(aten.add.Tensor, core.OpOverload) and isinstance(aten.add, core.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, core.HigherOrderOperator)


@uses("DispatchKey")
def kernels_of_python_are_found_by_dispatch_key() -> None:
    with_kernels = [packet.default for packet in (aten.dropout, aten.native_layer_norm, aten.silu_backward)]
    assert any(isinstance(key, core.DispatchKey) for op in with_kernels for key in op.py_kernels)
    assert all(isinstance(op._dispatch_cache, dict) for op in with_kernels)
    for name in ("Autograd", "AutogradFunctionality", "ADInplaceOrView", "CPU", "Meta"):
        assert hasattr(core.DispatchKey, name)


@uses("AutoDispatchBelowAutograd", "ExcludeDispatchKeyGuard", "in_backward_pass")
def autograd_can_be_passed_by_and_taken_in_again() -> None:
    weight = torch.ones(2, requires_grad=True)
    keys = core.DispatchKey.AutogradFunctionality, core.DispatchKey.ADInplaceOrView
    with core.AutoDispatchBelowAutograd():
        assert not (weight * 2).requires_grad
        with core.ExcludeDispatchKeyGuard(keys[0], False), core.ExcludeDispatchKeyGuard(keys[1], False):
            assert (weight * 2).requires_grad
    assert not core.in_backward_pass()


@uses("TorchDispatchMode", "disable_current_modes", "no_dispatch")
def modes_see_ops_unless_they_are_disabled() -> None:
    seen = []

    class Mode(core.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).sin()
        before = len(seen)
        with core.disable_current_modes():
            torch.ones(2).sin()
        with core.no_dispatch():
            torch.ones(2).sin()
    assert before == len(seen) == 2 or before == len(seen) == 3


@uses("enable_python_dispatcher", "no_python_dispatcher")
def the_python_dispatcher_runs_kernels_of_python() -> None:
    calls = []
    op, key = aten.trunc.default, core.DispatchKey.CPU
    op.py_kernels[key] = lambda data: calls.append(data) or data.clone()  # type: ignore[func-returns-value]
    op._dispatch_cache.clear()
    try:
        data = torch.ones(2)
        torch.trunc(data)
        with core.enable_python_dispatcher():
            torch.trunc(data)
            with core.no_python_dispatcher():
                torch.trunc(data)
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()
    assert len(calls) == 1


@uses("make_contiguous_strides_for", "suggest_memory_format")
def strides_follow_shapes_and_layouts() -> None:
    assert core.make_contiguous_strides_for((2, 3, 4)) == (12, 4, 1)
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert core.suggest_memory_format(image) is torch.channels_last


@uses("run_and_save_rng_state", "run_with_rng_state")
def random_numbers_are_drawn_again_from_a_saved_state() -> None:
    half = torch.full((64,), 0.5)
    state, first = core.run_and_save_rng_state(aten.bernoulli.default, half)
    assert not torch.equal(torch.bernoulli(half), first)
    assert torch.equal(core.run_with_rng_state(state, aten.bernoulli.default, half), first)


@uses("make_fx", "make_graph_module", "use_lazy_graph_module", "BoxedCodeGen")
def graphs_are_traced_and_called_with_a_list() -> None:
    gm = core.make_fx(lambda a, b: a.sin() + b)(torch.ones(2), torch.ones(2))
    with core.use_lazy_graph_module(False):
        plain = core.make_graph_module(gm, gm.graph)
    assert type(plain) is not type(gm) or isinstance(plain, fx.GraphModule)
    gm.graph.set_codegen(core.BoxedCodeGen())
    gm.recompile()
    operands = [torch.ones(2), torch.ones(2)]
    gm(operands)
    assert not operands  # the graph may free its operands while it runs


@uses("impure_functions")
def graphs_keep_impure_functions() -> None:
    def told(value: torch.Tensor) -> None: ...

    fx.node.has_side_effect(told)
    assert told in core.impure_functions()
    core.impure_functions().discard(told)
    assert told not in core.impure_functions()


@uses("Guard", "TracingContext", "tracing")
def a_tracing_context_is_current_while_it_is_active() -> None:
    assert core.TracingContext.try_get() is None
    with core.tracing(core.TracingContext(None)) as context:
        assert core.TracingContext.try_get() is context
    assert core.Guard.__name__ == "Guard"


@uses(
    *("GradAOTOutput", "InputMutationAOTOutput", "PlainAOTInput", "PlainAOTOutput"),
    *("SavedForBackwardsAOTOutput", "TangentAOTInput"),
)
def operands_of_joint_graphs_are_described() -> None:
    plain = core.PlainAOTInput(idx=3)
    assert core.GradAOTOutput(grad_of=plain).grad_of is plain
    assert core.InputMutationAOTOutput(mutated_input=plain).mutated_input is plain
    assert core.TangentAOTInput(output=core.PlainAOTOutput(idx=1)).output.idx == 1
    assert core.SavedForBackwardsAOTOutput(idx=2).idx == 2


@uses("functorch_config")
def options_of_functorch_are_patched() -> None:
    before = core.functorch_config.backward_pass_autocast
    with core.functorch_config.patch(backward_pass_autocast="off"):
        assert core.functorch_config.backward_pass_autocast == "off"
    assert core.functorch_config.backward_pass_autocast == before


@uses("in_func_transform", "is_functorch_wrapped_tensor", "is_functional_tensor")
def transforms_are_seen() -> None:
    seen = []

    def called(value: torch.Tensor) -> torch.Tensor:
        seen.append((core.in_func_transform(), core.is_functorch_wrapped_tensor(value)))
        return value.sum()

    torch.func.grad(called)(torch.ones(2))
    called(torch.ones(2))
    assert seen == [(True, True), (False, False)] and not core.is_functional_tensor(torch.ones(2))


@uses("op_calls_traced")
def tracers_are_named() -> None:
    seen = []

    def called(value: torch.Tensor) -> torch.Tensor:
        seen.append(core.op_calls_traced())
        return value.sin()

    called(torch.ones(2))
    torch.jit.trace(called, torch.ones(2), check_trace=False)
    with core.FakeTensorMode():
        called(torch.ones(2))
    core.make_fx(called)(torch.ones(2))
    with FlopCounterMode(display=False):
        called(torch.ones(2))
    assert seen == [None, "torch.jit.trace", *["a tracer with fake tensors"] * 2, "a dispatch mode"]


@uses("user_modes_set_aside")
def modes_of_users_are_not_given_calls_and_come_back() -> None:
    counted = FlopCounterMode(display=False)
    with counted:
        with core.user_modes_set_aside():
            torch.ones(2, 2).mm(torch.ones(2, 2))
        assert counted.get_total_flops() == 0
        torch.ones(2, 2).mm(torch.ones(2, 2))
    assert counted.get_total_flops() == 16


@uses("current_autograd_node", "backward_keeps_graph", "autograd_node_number", "in_backward_pass")
def a_backward_pass_knows_its_node_and_whether_it_keeps_its_graph() -> None:
    seen = []
    weight = torch.ones(2, requires_grad=True)
    result = (weight * 2).sum()
    number = core.autograd_node_number()
    assert result.grad_fn is not None and result.grad_fn._sequence_nr() == number
    result.grad_fn.next_functions[0][0].register_prehook(  # type: ignore[union-attr]
        lambda _: seen.append((core.current_autograd_node(), core.backward_keeps_graph(), core.in_backward_pass()))
    )
    result.backward(retain_graph=True)
    result.backward()
    assert [rest for _, *rest in seen] == [[True, True], [False, True]]
    assert seen[0][0] is seen[1][0] is not None and core.current_autograd_node() is None


@uses("saved_tensor_hooks_aside")
def hooks_on_saved_tensors_are_set_aside_and_come_back() -> None:
    packed = []
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        with core.saved_tensor_hooks_aside():
            weight.sin()
        assert not packed
        weight.sin()
    assert packed == [1]


@uses("set_version")
def the_count_of_writes_is_set_back() -> None:
    tensor = torch.ones(2)
    tensor.add_(1)
    assert tensor._version == 1
    core.set_version(tensor, 0)
    assert tensor._version == 0


@uses("storage_references")
def references_to_a_storage_are_counted_if_at_all() -> None:
    tensor = torch.ones(2)
    storage = tensor.untyped_storage()
    before = core.storage_references(storage)
    view = tensor[:1]
    after = core.storage_references(storage)
    assert (before is None and after is None) or (before is not None and after == before + 1)
    del view


@uses("profiler_is_on", "EventType")
def profilers_are_seen_and_name_their_events() -> None:
    assert not core.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert core.profiler_is_on()
    assert core.EventType.Allocation != core.EventType.TorchOp


@uses("autocast_is_on", "autocast_devices")
def autocast_is_seen() -> None:
    assert not core.autocast_is_on() and "cpu" in core.autocast_devices()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert core.autocast_is_on()


@uses("count_of_dispatch_modes", "dispatch_modes")
def dispatch_modes_are_counted() -> None:
    assert core.count_of_dispatch_modes() == 0 and not core.dispatch_modes()
    with core.FakeTensorMode() as mode:
        assert core.count_of_dispatch_modes() == 1 and core.dispatch_modes() == [mode] and mode.is_infra_mode()
    with FlopCounterMode(display=False):
        assert [mode.is_infra_mode() for mode in core.dispatch_modes()] == [False]


@uses("conv_backend")
def the_kernel_of_a_convolution_is_named() -> None:
    data, weight = torch.ones(1, 2, 8, 8), torch.ones(2, 2, 3, 3)
    name = core.conv_backend(data, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, None)
    assert name.isidentifier()


@uses("cudnn_takes_batch_norm", "cudnn_batch_norm_reserve_bytes")
def cudnn_takes_no_batch_norm_of_the_cpu() -> None:
    data, one = torch.ones(2, 3, 4, 4), torch.ones(3)
    assert not core.cudnn_takes_batch_norm(data, one, one, one, one, True, 1e-5)
    if torch.cuda.is_available():
        assert core.cudnn_batch_norm_reserve_bytes(data.cuda(), True) >= 0
    else:
        assert callable(core.cudnn_batch_norm_reserve_bytes)


@uses("clear_cublas_workspaces", "gpu_idle")
def gpus_are_kept_busy_and_give_back_their_workspaces() -> None:
    if torch.cuda.is_available():
        core.gpu_idle(1000)
        core.clear_cublas_workspaces()
    else:
        assert hasattr(torch.cuda, "_sleep") and callable(core.clear_cublas_workspaces)


@pytest.mark.smoke
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_core(check: Callable[[], None]) -> None:
    check()


def test_each_name_is_checked() -> None:
    assert CHECKS.checked() == set(core.__all__)
