"""Each private interface of Dynamo and AOTAutograd does what memfit relies on, on the oldest torch and the newest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import fx, nn

from memfit.capture.dynamo import compiled_call
from memfit.torch_compat import compiler, distributed
from tests.torch_compat.checks import Checks

CHECKS = Checks()
uses = CHECKS.uses


def compiled(function: Callable[..., Any], *, fullgraph: bool = True) -> tuple[Callable[..., Any], list[fx.Graph]]:
    """A function under Dynamo, and the graphs that Dynamo makes of it."""
    graphs = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    return torch.compile(function, backend=backend, fullgraph=fullgraph), graphs


@uses("aot", "aot_autograd", "graph_compile")
def aot_autograd_splits_a_step_into_two_graphs() -> None:
    seen = []

    def keep(name: str) -> Callable[..., Any]:
        return lambda gm, _: seen.append(name) or compiler.aot.make_boxed_func(gm.forward)  # type: ignore[func-returns-value]

    backend = compiler.aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    weight = torch.ones(2, requires_grad=True)
    torch.compile(lambda w: w.sin().sum(), backend=backend)(weight).backward()
    assert seen == ["forward", "backward"] and torch.equal(weight.grad, torch.ones(2).cos())
    assert callable(compiler.aot.run_functionalized_fw_and_collect_metadata)
    assert compiler.graph_compile.aot_joint_log.name and compiler.graph_compile.aot_graphs_log.name


@uses("TorchDynamoException", "Unsupported", "BackendCompilerFailed")
def failures_have_classes() -> None:
    def broken(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        raise ValueError("no")

    with pytest.raises(compiler.BackendCompilerFailed):
        torch.compile(torch.sin, backend=broken)(torch.ones(2))
    with pytest.raises(compiler.Unsupported) as caught:
        compiled(lambda value: torch._dynamo.graph_break() or value)[0](torch.ones(2))
    assert isinstance(caught.value, compiler.TorchDynamoException)


@uses("symbol_config", "decorators")
def marked_sizes_become_symbols_of_their_own() -> None:
    marked = torch.ones(5, 5, 3)
    compiler.decorators.maybe_mark_dynamic(marked, [0, 1])
    marks = vars(marked).keys()
    assert "_dynamo_weak_dynamic_indices" in marks and marks <= set(compiled_call._MARKS)
    with compiler.symbol_config.patch(use_duck_shape=False):
        call, graphs = compiled(lambda value: value * 2)
        call(marked)
    shapes = [node.meta["example_value"] for node in graphs[0].find_nodes(op="placeholder")]
    rows, columns, width = next(value for value in shapes if isinstance(value, torch.Tensor)).shape
    assert isinstance(rows, torch.SymInt) and isinstance(columns, torch.SymInt) and width == 3
    assert rows.node.expr != columns.node.expr and rows.node.has_hint() and rows.node.hint == 5


@uses("dynamo_config", "inductor_config")
def options_are_patched() -> None:
    names = ("recompile_limit", "accumulated_recompile_limit", "capture_scalar_outputs", "trace_numpy")
    for name in (*names, "use_numpy_random_stream", "skip_nnmodule_hook_guards"):
        before = getattr(compiler.dynamo_config, name)
        with compiler.dynamo_config.patch({name: not before}):
            assert getattr(compiler.dynamo_config, name) == (not before)
        assert getattr(compiler.dynamo_config, name) == before
    with compiler.inductor_config.patch(fallback_random=True):
        assert compiler.inductor_config.fallback_random


@uses("UserDefinedListVariable")
def a_list_of_a_users_class_has_the_variables_of_its_elements() -> None:
    class Axes(list[int]):
        pass

    axes, seen = Axes([0, 1]), []

    def proxies(variable: Any) -> Any:
        elements = vars(variable).get("_base_vt", vars(variable).get("_list_vt"))
        seen.append(elements.as_proxy())
        return seen[-1]

    assert "as_proxy" not in vars(compiler.UserDefinedListVariable)
    compiler.UserDefinedListVariable.as_proxy = proxies
    try:
        call, graphs = compiled(lambda value: value.sum(axes))
        assert call(torch.ones(2, 3, 4)).tolist() == [6.0] * 4
    finally:
        del compiler.UserDefinedListVariable.as_proxy
    assert len(graphs) == 1 and seen == [[0, 1]]


@uses("disable", "skip", "decorators")
def code_is_left_out_of_graphs() -> None:
    @compiler.skip
    def opaque(value: torch.Tensor) -> torch.Tensor:
        return value.sin()

    for inner in (compiler.disable(torch.sin), opaque):
        call, graphs = compiled(lambda value, inner=inner: inner(value + 1) * 2, fullgraph=False)
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0).sin() * 2)
        assert graphs
    assert callable(compiler.decorators.mark_static_address)


@uses("wrap_inline", "reset_code", "forget_compiled_code")
def compiled_code_is_forgotten() -> None:
    call, graphs = compiled(compiler.wrap_inline(nn.Linear(2, 2)))
    call(torch.ones(1, 2))
    assert len(graphs) == 1
    compiler.forget_compiled_code()

    def own(value: torch.Tensor) -> torch.Tensor:
        return value.sin()

    call, graphs = compiled(own)
    call(torch.ones(2))
    call(torch.ones(2))
    assert len(graphs) == 1
    compiler.reset_code(own.__code__)
    call(torch.ones(2))
    assert len(graphs) == 2


@uses("counters")
def frames_are_counted() -> None:
    before = compiler.counters["frames"]["total"], compiler.counters["aot_autograd"]["total"]

    def own(value: torch.Tensor) -> torch.Tensor:
        return value.sin()

    torch.compile(
        own, backend=compiler.aot_autograd(fw_compiler=lambda gm, _: compiler.aot.make_boxed_func(gm.forward))
    )(torch.ones(2))
    assert compiler.counters["frames"]["total"] > before[0]
    assert compiler.counters["aot_autograd"]["total"] > before[1]


@uses("dynamo_guards", "install_guard")
def guards_are_installed_and_timed() -> None:
    assert callable(compiler.dynamo_guards.profile_guard_manager)
    assert next(iter(inspect.signature(compiler.install_guard).parameters)) == "guards"


@uses("trace_rules", "tracing_state_functions", "TorchInGraphFunctionVariable")
def rules_say_how_functions_are_traced() -> None:
    rules = compiler.trace_rules.get_torch_obj_rule_map()
    assert rules[torch.sin] is compiler.TorchInGraphFunctionVariable
    assert torch.compiler.is_compiling in compiler.tracing_state_functions()


@uses(
    *("ConstantVariable", "ListVariable", "SymNodeVariable", "TensorVariable", "TupleVariable"),
    *("UnspecializedNNModuleVariable", "UserFunctionVariable", "symbolic_convert"),
)
def values_under_trace_have_classes() -> None:
    assert compiler.ConstantVariable.create(False).as_python_constant() is False
    pair = compiler.TupleVariable([compiler.ConstantVariable.create(1)])
    assert pair.items[0].value == compiler.ListVariable(list(pair.items)).items[0].value == 1
    for owner in (compiler.UnspecializedNNModuleVariable, compiler.UserFunctionVariable):
        assert list(inspect.signature(owner.call_function).parameters)[:3] == ["self", "tx", "args"]
    assert hasattr(compiler.TensorVariable, "as_proxy") and hasattr(compiler.SymNodeVariable, "as_proxy")
    for name in ("InstructionTranslator", "InliningInstructionTranslator"):
        assert hasattr(getattr(compiler.symbolic_convert, name), "POP_JUMP_IF_FALSE")


@uses("numpy_method_wrapper", "numpy_operator_wrapper", "numpy_to_tensor_wrapper")
def code_of_numpy_becomes_calls_of_these_classes() -> None:
    call, graphs = compiled(lambda value: torch.from_numpy((numpy.sin(value.numpy()) + 1).reshape(-1)))
    assert torch.allclose(call(torch.ones(2)), torch.ones(2).sin() + 1)
    wrappers = compiler.numpy_method_wrapper, compiler.numpy_operator_wrapper, compiler.numpy_to_tensor_wrapper
    assert sum(isinstance(node.target, wrappers) for node in graphs[0].nodes) >= 2


@pytest.mark.smoke
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_compiler(check: Callable[[], None]) -> None:
    check()


@pytest.mark.smoke
def test_stages_and_stores_of_torch_distributed() -> None:
    store = distributed.HashStore()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert {"forward_one_chunk", "backward_one_chunk"} <= set(dir(distributed.PipelineStageBase))
    assert {"HashStore", "PipelineStageBase"} == set(distributed.__all__)


@pytest.mark.smoke
def test_each_name_is_checked() -> None:
    assert CHECKS.checked() == set(compiler.__all__)
