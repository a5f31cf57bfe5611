"""Files: what is written is read back, what is damaged or foreign is refused with a reason."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import PlanFileError
from memfit.ir.graph import Baseline, StepGraph
from memfit.ir.instructions import Compute, Free
from memfit.ir.jsonfile import as_document, read_json, record_of, write_json
from memfit.ir.plan_file import Decision, PlanFile, Prediction, fingerprint_difference, load_plan, save_plan
from memfit.ir.program import Program, program_of
from memfit.ir.serialization import decode_graph, encode_graph, graph_digest
from tests.ir.random_graphs import orders, sliced_step_graphs, step_graphs

PLAN = PlanFile(
    fingerprint={"torch": "2.15.0", "batch": 64, "shapes": [[64, 3, 224, 224], "float32"], "deterministic": True},
    strategy="dp",
    budget_bytes=2**30,
    predicted=Prediction(peak_bytes=2**30 - 1, step_seconds=0.125, overhead=0.09, bound_overhead=0.069),
    graph_digest="0" * 64,
    program=Program(
        instructions=(
            Compute(12),
            Compute(13, over=4, chunks=2),
            Free(5),
        )
    ),
    decisions=(
        Decision(
            block="2",
            module="layer1.0",
            saves="conv1",
            saved_bytes=98,
            later="recompute relu",
            extra_seconds=6e-3,
            reason="cheapest per byte",
        ),
    ),
)


def through_text(document: object) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@given(step_graphs() | sliced_step_graphs(), st.data())
@settings(max_examples=40)
def test_steps_and_programs_come_back(graph: StepGraph, data: st.DataObject) -> None:
    back = decode_graph(through_text(encode_graph(graph)))
    assert back == graph
    assert graph_digest(back) == graph_digest(graph)
    program = program_of(graph, data.draw(orders(graph)))
    assert record_of(through_text(as_document(program)), Program) == program


@pytest.mark.smoke
def test_plans_come_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, PLAN)
    assert load_plan(path) == PLAN
    assert record_of(through_text(as_document(PLAN)), PlanFile) == PLAN
    assert json.loads(path.read_text())["program"]["instructions"] == [
        ["c", 12, 1, None, False, False],
        ["c", 13, 2, 4, False, False],
        ["f", 5, False],
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_digest_is_of_the_structure() -> None:
    graph = step_graph()
    first, *rest = graph.ops
    measured = replace(first, name=f"{first.name}_7", seconds=9.0, workspace_bytes=9, module="renamed")
    assert graph_digest(replace(graph, ops=(measured, *rest), label="renamed")) == graph_digest(graph)
    changes = [
        replace(graph, ops=(replace(first, name="other"), *rest)),
        replace(graph, ops=(replace(first, target="aten.add.Tensor"), *rest)),
        replace(graph, ops=(replace(first, reads=()), *rest)),
        replace(graph, ops=(replace(first, recomputable=not first.recomputable), *rest)),
        replace(graph, ops=(replace(first, random_state_bytes=5), *rest)),
        replace(graph, storages=(replace(graph.storages[0], nbytes=77), *graph.storages[1:])),
        replace(graph, outputs=()),
    ]
    assert len({graph_digest(changed) for changed in [graph, *changes]}) == len(changes) + 1


RELU = {"name": "relu", "target": "aten.relu.default", "phase": "forward", "reads": [1], "writes": [2]}


def step_graph() -> StepGraph:
    document = {
        "ops": [
            {"name": "mm", "target": "aten.mm.default", "phase": "forward", "reads": [0], "writes": [1]},
            RELU,
            {"name": "loss", "target": "loss", "phase": "loss", "reads": [2], "writes": [3]},
            {
                "name": "relu_back",
                "target": "aten.threshold_backward.default",
                "phase": "backward",
                "reads": [2, 3],
                "writes": [4],
                "in_place_over": [3],
            },
        ],
        "storages": [
            {"name": "w", "nbytes": 8, "kind": "static"},
            {"name": "mm", "nbytes": 8, "kind": "forward"},
            {"name": "relu", "nbytes": 8, "kind": "forward"},
            {"name": "tangent", "nbytes": 8, "kind": "tangent"},
            {"name": "gradient", "nbytes": 8, "kind": "gradient"},
        ],
        "outputs": [2],
    }
    graph = decode_graph(document)
    ops = tuple(op.whole() for op in graph.ops)
    return replace(graph, baseline=Baseline(ops=ops, storages=graph.storages, outputs=graph.outputs))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("ops", 0, "phase"), "loss", "one loss op"),
        (("ops", 2, "phase"), "forward", "one loss op"),
        (("ops", 1, "name"), "mm", "two of its ops have one name"),
        (("ops", 1, "reads"), [5], "not among the 5"),
        (("ops", 1, "reads"), [1, 1], "reads a storage twice"),
        (("ops", 0, "reads"), [2], "before it is written"),
        (("ops", 1, "writes"), [1], "already written"),
        (("ops", 1, "writes"), [0], "static"),
        (("ops", 1, "writes"), [2, 2], "already written"),
        (("ops", 3, "writes"), [], "cannot run in place|never written"),
        (("ops", 3, "in_place_over"), [0], "cannot run in place over storage 0"),
        (("storages", 3, "nbytes"), 9, "cannot run in place over storage 3"),
        (("storages", 0, "kind"), "forward", "before it is written"),
        (("outputs",), [5], "an output is not among"),
        (("storages", 1, "stream"), {"nbytes": 8, "out_seconds": 0.0, "into_seconds": 0.0}, "is tier-resident"),
        (("ops", 1, "estimated_seconds"), 1.0, "only a planner sets"),
        (("ops", 1, "recompute_as"), {**RELU, "recompute_as": RELU}, "is itself recomputed as another one"),
        (("ops", 1, "recompute_as"), {**RELU, "reads": [5]}, "not among the 5"),
        (("baseline", "ops", 1, "reads"), [5], "without memfit, op relu uses a storage that is not among the 5"),
        (("baseline", "ops", 1, "reads"), [1, 1], "without memfit, op relu reads a storage twice"),
        (("baseline", "ops", 1, "name"), "mm", "without memfit, two of its ops have one name"),
        (("baseline", "ops", 1, "in_place_over"), [1], "more than one way without memfit"),
        (
            ("baseline", "ops", 1, "variants"),
            [{"chunks": n, "seconds": 0.0, "workspace_bytes": 0} for n in (1, 2)],
            "more than one way",
        ),
        (("baseline", "storages", 1, "kind"), "static", "without memfit, op mm writes a storage that is static"),
        (("baseline", "storages"), [], "without memfit, op mm uses a storage that is not among the 0"),
        (("baseline", "outputs"), [5], "without memfit, an output is not among the 5"),
    ],
)
def test_a_damaged_step_is_refused(place: tuple[str | int, ...], value: object, message: str) -> None:
    document = encode_graph(step_graph())
    *way, last = place
    target: Any = document
    for key in way:
        target = target[key]
    target[last] = value
    with pytest.raises(PlanFileError, match=message):
        decode_graph(through_text(document))


def places(document: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of everything in a document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [here, *(place for key, item in items for place in places(item, (*here, key)))]


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**31 + 1, 2**60, 2**60 + 1, 2**64, -(2**70)]),
    st.floats(-2.0, 2e9).filter(lambda number: not number.is_integer()),  # 1.0 is the one difference, see jsonfile
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "c", "c!", "forward", "x" * 1001, "a\x1bb", "a\n"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["name", "reason", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def mutants(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three things replaced, removed or added."""
    document = {"document": copy.deepcopy(document)}
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(document)[1:]))
        holder = document
        for key in way:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "remove" if way:
                del holder[last]
            case "add" if isinstance(holder[last], dict):
                holder[last][draw(st.sampled_from(["name", "reason", "x"]))] = draw(VALUES)
            case "add" if isinstance(holder[last], list):
                holder[last].append(draw(VALUES))
            case _:
                holder[last] = draw(VALUES)
    return document["document"]


@pytest.mark.parametrize("record", [PLAN, step_graph(), PLAN.program], ids=lambda record: type(record).__name__)
def test_the_validation_is_that_of_json_schema(record: msgspec.Struct) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document, schema = as_document(record), msgspec.json.schema(type(record))
    jsonschema.Draft202012Validator.check_schema(schema)
    published = jsonschema.Draft202012Validator(schema)
    assert published.is_valid(through_text(document))

    @given(mutants(through_text(document)))
    def agree(mutant: Any) -> None:
        try:
            record_of(mutant, type(record))
            ours = None
        except PlanFileError as error:
            ours = str(error)
        # A schema cannot state that the baseline step has as many ops and storages as the step.
        lengths_differ = isinstance(record, StepGraph) and "of the step without memfit" in (ours or "")
        assert lengths_differ or (ours is None) == published.is_valid(mutant), ours
        if isinstance(record, StepGraph):
            with contextlib.suppress(PlanFileError):  # the rules that a schema cannot state; no other error comes out
                decode_graph(mutant)
                assert ours is None

    agree()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 4}, r"a plan file of version 4, and this memfit reads version 7: make it anew"),
        ({"budget_bytes": True}, r"Expected `int`, got `bool` - at `\$\.budget_bytes`; .* make it anew"),
        ({"budget_bytes": 1.5}, r"Expected `int`, got `float` - at `\$\.budget_bytes`"),
        ({"budget_bytes": 0}, r"Expected `int` >= 1 - at `\$\.budget_bytes`"),
        (
            {"program": {"instructions": [["c", 1], ["x", 1]]}},
            r"Invalid value 'x' - at `\$\.program\.instructions\[1\]",
        ),
        ({"program": {"instructions": [["c"]]}}, r"Expected `array` of at least length 2, got 1 - at `\$\.program"),
        ({"program": {"instructions": [["c", -1]]}}, r"Expected `int` >= 0 - at `\$\.program\.instructions\[0\]\[1\]`"),
        ({"predicted": {}}, r"Object missing required field `peak_bytes` - at `\$\.predicted`"),
        ({"strategy": "\x1b[2J"}, r"Expected `str` without control characters - at `\$\.strategy`"),
        ({"strategy": "x" * 1001}, r"Expected `str` of length <= 1000 - at `\$\.strategy`"),
        ({"extra\n": 1}, r"Object contains unknown field `extra\\n`"),
        ({"fingerprint": {"\x1b": 1}}, r"Expected `str` without control characters - at `key` in `\$\.fingerprint`"),
        (
            {"fingerprint": {"a b": None}},
            r"Expected `bool \| int \| str \| array`, got `null` - at `\$\.fingerprint\[\.\.\.\]`",
        ),
    ],
)
def test_a_refusal_says_what_and_where(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**as_document(PLAN), **change}))
    with pytest.raises(PlanFileError, match=rf"plan\.json.*{message}"):
        load_plan(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"budget_bytes": NaN}',
        b'{"budget_bytes": -Infinity}',
        b'{"budget_bytes": ' + b"9" * 5000 + b"}",
        pickle.dumps({"program": []}),
        b"null",
        b"[]",
        b"{}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match=r"plan\.json"):
        load_plan(path)


def test_infinite_numbers_are_not_json(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema_version": Infinity}')
    with pytest.raises(PlanFileError, match=r"plan\.json is not JSON"):
        load_plan(tmp_path / "plan.json")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plan(tmp_path / "plan.json", PLAN)
    monkeypatch.setattr("memfit.ir.jsonfile._LARGEST_FILE_BYTES", 100)
    with pytest.raises(PlanFileError, match="larger than the 100 bytes"):
        load_plan(tmp_path / "plan.json")


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "plan.json")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o644)
    for wrong in (math.nan, math.inf):
        with pytest.raises(PlanFileError):
            save_plan(path, replace(PLAN, predicted=replace(PLAN.predicted, bound_overhead=wrong)))
    with pytest.raises(PlanFileError, match=r"at `\$\.strategy`"):
        save_plan(path, replace(PLAN, strategy="\x00"))
    assert path.read_text() == "old"
    write_json(path, PLAN.program)
    assert read_json(path, Program) == PLAN.program
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_values_that_json_cannot_represent_are_refused(tmp_path: Path) -> None:
    for strategy in ("\ud800", type("Text", (str,), {})("dp"), 1.0):
        with pytest.raises(PlanFileError):
            save_plan(tmp_path / "plan.json", replace(PLAN, strategy=strategy))
    with pytest.raises(PlanFileError, match=r"nothing is written to .*plan\.json"):
        save_plan(tmp_path / "plan.json", replace(PLAN, strategy="a\x1bb"))
    long = {"y" * 100_000: 1}
    (tmp_path / "plan.json").write_text(json.dumps({**as_document(PLAN), **long}))
    with pytest.raises(PlanFileError) as refused:
        load_plan(tmp_path / "plan.json")
    assert len(str(refused.value)) < 1000


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.ir.jsonfile._LARGEST_FILE_BYTES", 100)
    with pytest.raises(PlanFileError, match="has at most 100"):
        save_plan(tmp_path / "plan.json", PLAN)
    assert not list(tmp_path.iterdir())


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "plan.json").symlink_to(tmp_path / "other")
    save_plan(tmp_path / "plan.json", PLAN)
    assert (tmp_path / "other").read_text() == "other"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_plan(tmp_path / "plan.json", PLAN)
    assert not list(tmp_path.iterdir())


def test_fingerprints_are_compared_fact_by_fact() -> None:
    expected = {"torch": "2.15.0", "device": "cuda", "batch": 64, "shapes": [[64, 3]]}
    assert fingerprint_difference(expected, dict(expected)) == []
    found = {"torch": "2.11.0", "batch": "64", "shapes": [[64, 3]], "deterministic": True}
    assert fingerprint_difference(expected, found) == [
        'batch: planned for 64, found "64"',
        "deterministic: planned for nothing, found true",
        'device: planned for "cuda", found nothing',
        'torch: planned for "2.15.0", found "2.11.0"',
    ]
