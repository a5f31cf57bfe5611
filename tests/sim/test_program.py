"""Programs: freed as early as possible, right by the specification, judged as a slow reference judges them."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import ProgramError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.instructions import Compute, Free, Instruction
from memfit.ir.program import Program, as_they_run, baseline_order, in_their_subgraphs, program_of, whole_program
from memfit.sim.simulator import live_storages_at, simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import orders, step_graphs
from tests.planner.chains import chain as long_chain
from tests.residents import residents


@st.composite
def steps_and_orders(draw: st.DrawFn) -> tuple[StepGraph, list[int]]:
    graph = draw(step_graphs())
    return graph, draw(orders(graph))


def reference(graph: StepGraph, order: list[int], *, in_place: bool) -> tuple[list[int], int]:
    """Bytes in use while each op runs, and at the end: the sum over all copies of all storages, op by op.

    It shares nothing with `simulate`: a copy is an interval, found by looking through the whole order.
    """
    held = graph.held_to_the_end()
    end = len(order)
    ops = [graph.ops[i].later if i in order[:p] else graph.ops[i] for p, i in enumerate(order)]
    births = {
        s: [p for p, op in enumerate(ops) if s in op.writes]
        for s, storage in enumerate(graph.storages)
        if storage.kind is not StorageKind.STATIC
    }
    copies: list[tuple[int, int, int]] = []  # storage, first and last position at which it is there
    for s, positions in births.items():
        if s in held:
            copies.append((s, positions[0], end))
            copies += [(s, p, p) for p in positions[1:]]
            continue
        for birth, next_birth in zip(positions, [*positions[1:], end], strict=True):
            reads = [p for p in range(birth, next_birth) if s in ops[p].reads]
            copies.append((s, birth, max(reads, default=birth)))

    def bytes_at(position: int) -> int:
        op = ops[position]
        total = graph.static_bytes + op.workspace_bytes
        total += sum(graph.storages[s].nbytes for s, birth, death in copies if birth <= position <= death)
        if in_place and not held.issuperset(op.in_place_over):
            dies = any(s in op.in_place_over and s not in held and death == position for s, _, death in copies)
            result = op.writes[0]
            used = result in held or any(s == result and b == position < d for s, b, d in copies)
            if dies and used:
                total -= graph.storages[result].nbytes
        for i in set(order):
            runs = [p for p, j in enumerate(order) if j == i]
            if len(runs) > 1 and runs[0] <= position <= runs[-1]:
                total += graph.ops[i].random_state_bytes
            if position in runs[1:]:
                total += graph.ops[i].random_state_bytes  # of the generator, put aside
        return total

    at_the_end = graph.static_bytes + sum(graph.storages[s].nbytes for s, _, death in copies if death == end)
    return [bytes_at(p) for p in range(end)], at_the_end


@given(steps_and_orders(), st.booleans())
@settings(max_examples=40)
def test_programs_are_right(case: tuple[StepGraph, list[int]], in_place: bool) -> None:
    graph, order = case
    program = program_of(graph, order, in_place=in_place)
    check(graph, program)
    assert program.order() == order
    assert sorted([*baseline_order(graph), *program.recomputed()]) == sorted(order)


@given(steps_and_orders(), st.booleans())
@settings(max_examples=40)
def test_the_simulator_agrees_with_the_reference(case: tuple[StepGraph, list[int]], in_place: bool) -> None:
    graph, order = case
    program = program_of(graph, order, in_place=in_place)
    timeline = simulate(graph, program)
    in_use, at_the_end = reference(graph, order, in_place=in_place)
    computes = [p for p, i in enumerate(program.instructions) if isinstance(i, Compute)]
    assert [timeline.bytes_at[p] for p in computes] == in_use
    assert timeline.peak_bytes == max(*in_use, at_the_end + graph.after_step_bytes)
    if timeline.peak_position < len(program.instructions):
        assert timeline.bytes_at[timeline.peak_position] == timeline.peak_bytes
    extra = sum(graph.ops[i].later.seconds for i in program.recomputed())
    assert timeline.recompute_seconds == extra
    assert timeline.step_seconds == graph.seconds + extra


@given(steps_and_orders(), st.booleans())
@settings(max_examples=40)
def test_nothing_outlives_its_last_reader(case: tuple[StepGraph, list[int]], in_place: bool) -> None:
    graph, order = case
    program = program_of(graph, order, in_place=in_place)
    held = graph.held_to_the_end()
    ops = as_they_run(graph, order)
    alive: set[int] = set()
    done = 0
    for instruction, following in zip(program.instructions, [*program.instructions[1:], None], strict=True):
        if isinstance(instruction, Free):
            alive.remove(instruction.storage)
        else:
            alive.update(ops[done].writes)
            if instruction.over is not None:
                alive.remove(instruction.over)
            done += 1
        if following is None or isinstance(following, Compute):
            for s in alive - held:
                touching = next(op for op in ops[done:] if s in op.reads or s in op.writes)
                assert s in touching.reads


@given(steps_and_orders())
@settings(max_examples=40)
def test_running_in_place_never_costs_memory(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    in_place, apart = (simulate(graph, program_of(graph, order, in_place=p)) for p in (True, False))
    assert in_place.peak_bytes <= apart.peak_bytes
    assert simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes <= (
        simulate(graph, whole_program(graph)).peak_bytes
    )


@given(steps_and_orders())
@settings(max_examples=40)
def test_live_storages_explain_the_bytes(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    plain = replace(graph, ops=tuple(replace(op, random_state_bytes=0, workspace_bytes=0) for op in graph.ops))
    program = program_of(plain, order)
    timeline = simulate(plain, program)
    held = plain.held_to_the_end()
    ran: set[int] = set()
    for position, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Compute):
            continue
        op = plain.ops[instruction.op].later if instruction.op in ran else plain.ops[instruction.op]
        live = live_storages_at(plain, program, position)
        again = sum(plain.storages[s].nbytes for s in op.writes if s in held and instruction.op in ran)
        listed = sum(plain.storages[s].nbytes for s in live) + again
        assert timeline.bytes_at[position] == plain.static_bytes + listed
        sizes = [plain.storages[s].nbytes for s in live]
        assert sizes == sorted(sizes, reverse=True)
        ran.add(instruction.op)


def chain(*, recomputable: bool = True, random_state_bytes: int = 0) -> StepGraph:
    """Two forward ops, the loss, two backward ops: x -0-> a -1-> y, with the gradient of a parameter w."""
    kinds = StorageKind
    names = [("w", 8, kinds.STATIC), ("a", 16, kinds.FORWARD), ("y", 4, kinds.FORWARD), ("dy", 4, kinds.TANGENT)]
    names += [("da", 16, kinds.BACKWARD), ("dw", 8, kinds.GRADIENT)]
    w, a, y, dy, da, dw = range(6)

    def op(name: str, phase: Phase, reads: list[int], writes: list[int], **facts: object) -> Op:
        return Op(name=name, target="t", phase=phase, reads=tuple(reads), writes=tuple(writes), seconds=1.0, **facts)

    facts = {"recomputable": recomputable, "random_state_bytes": random_state_bytes}
    return StepGraph(
        storages=tuple(Storage(name=name, nbytes=nbytes, kind=kind) for name, nbytes, kind in names),
        ops=(
            op("first", Phase.FORWARD, [w], [a], **facts),
            op("second", Phase.FORWARD, [a], [y]),
            op("loss", Phase.LOSS, [y], [dy]),
            op("second_back", Phase.BACKWARD, [dy, a], [da], in_place_over=(a,)),
            op("first_back", Phase.BACKWARD, [da], [dw]),
        ),
        outputs=(y,),
        residents=residents(100),
    )


@pytest.mark.smoke
def test_a_chain_by_hand() -> None:
    timeline = simulate(chain(), program_of(chain(), [0, 1, 2, 3, 4]))
    #                            first  second   loss     back*    free dy  back            free da
    assert timeline.bytes_at == (116, 116 + 4, 120 + 4, 120 + 4, 120, 120 + 8, 112)
    assert (timeline.peak_bytes, timeline.peak_position, timeline.forward_end_bytes) == (128, 5, 120)
    assert (timeline.step_seconds, timeline.recompute_seconds, timeline.overhead) == (5.0, 0.0, 0.0)

    plain = simulate(chain(), whole_program(chain()))
    assert plain.peak_bytes == 100 + 16 + 4 + 4 + 16

    again = simulate(chain(random_state_bytes=1), program_of(chain(random_state_bytes=1), [0, 1, 0, 2, 3, 4]))
    assert again.forward_end_bytes == 120, "the generator state is gone once the last run has used it"
    assert again.overhead == pytest.approx(0.2)


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_a_dropped_free(case: tuple[StepGraph, list[int]], data: st.DataObject) -> None:
    graph, order = case
    program = program_of(graph, order)
    frees = [p for p, i in enumerate(program.instructions) if isinstance(i, Free)]
    assume(frees)
    with pytest.raises(ProgramError, match=r"never freed|still alive"):
        check(graph, without(program, data.draw(st.sampled_from(frees))))


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_a_free_too_many(case: tuple[StepGraph, list[int]], data: st.DataObject) -> None:
    graph, order = case
    program = program_of(graph, order)
    storage = data.draw(st.integers(0, len(graph.storages)))
    place = data.draw(st.integers(0, len(program.instructions)))
    with pytest.raises(ProgramError):
        check(graph, having(program, place, Free(storage)))


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_a_dropped_op(case: tuple[StepGraph, list[int]], data: st.DataObject) -> None:
    graph, order = case
    program = program_of(graph, order)
    held = graph.held_to_the_end()
    computes = [p for p, i in enumerate(program.instructions) if isinstance(i, Compute)]
    needed = [
        p
        for p, op in zip(computes, as_they_run(graph, order), strict=True)
        if order.count(program.instructions[p].op) == 1
        or program.instructions[p].over is not None
        or (not held.issuperset(op.writes) and not takes_its_place(graph, program, p))
    ]
    assume(needed)
    with pytest.raises(ProgramError):
        check(graph, without(program, data.draw(st.sampled_from(needed))))


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_what_is_computed_twice(
    case: tuple[StepGraph, list[int]], data: st.DataObject
) -> None:
    graph, order = case
    once = [p for p, i in enumerate(order) if graph.ops[i].phase is not Phase.FORWARD or not graph.ops[i].recomputable]
    place = data.draw(st.sampled_from(once))
    later = data.draw(st.integers(place + 1, len(order)))
    with pytest.raises(ProgramError, match=r"recomputed|twice|not alive|past|reached"):
        check(graph, program_of(graph, [*order[:later], order[place], *order[later:]]))


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_a_wrong_order(case: tuple[StepGraph, list[int]], data: st.DataObject) -> None:
    graph, _ = case
    producer = graph.producers()
    edges = [(producer[s], reader) for reader, op in enumerate(graph.ops) for s in op.reads if producer[s] >= 0]
    first, second = data.draw(st.sampled_from(edges))
    order = baseline_order(graph)
    order.remove(second)
    order.insert(first, second)
    with pytest.raises(ProgramError, match=r"not alive|before the loss|after the loss"):
        check(graph, program_of(graph, order))


@given(steps_and_orders(), st.data())
@settings(max_examples=40)
def test_the_specification_refuses_a_wrong_in_place_mark(
    case: tuple[StepGraph, list[int]], data: st.DataObject
) -> None:
    graph, order = case
    program = program_of(graph, order)
    place = data.draw(st.sampled_from([p for p, i in enumerate(program.instructions) if isinstance(i, Compute)]))
    instruction = program.instructions[place]
    reads = graph.ops[instruction.op].reads
    wrong = data.draw(st.sampled_from([None, *reads])) if instruction.over is None else None
    if wrong is instruction.over:
        wrong = len(graph.storages)
    with pytest.raises(ProgramError):
        check(graph, having(without(program, place), place, replace(instruction, over=wrong)))


def takes_its_place(graph: StepGraph, program: Program, place: int) -> bool:
    """Whether an op is run anew before anything reads or frees what its first run made: then that run is the first."""
    dropped = program.instructions[place]
    if dropped.op in (i.op for i in program.instructions[:place] if isinstance(i, Compute)):
        return False
    made = set(graph.ops[dropped.op].writes)
    for following in program.instructions[place + 1 :]:
        if isinstance(following, Free):
            if following.storage in made:
                return False
        elif following.op == dropped.op:
            return True
        elif made.intersection(graph.ops[following.op].reads):
            return False
    return False


def test_the_specification_says_what_is_wrong() -> None:
    right = program_of(chain(), baseline_order(chain()))
    check(chain(), right)
    cases = [
        (program_of(chain(recomputable=False), [0, 1, 2, 0, 3, 4]), "instruction 4: first is recomputed"),
        (program_of(chain(), [0, 1, 2, 3, 3, 4]), "backward op second_back runs twice"),
        (program_of(chain(), [0, 1, 3, 2, 4]), "second_back reads dy, which is not alive"),
        (program_of(chain(), [0, 2, 1, 3, 4]), "loss reads y, which is not alive"),
        (program_of(chain(), [0, 1, 2, 3]), "1 ops never run, the first is first_back"),
        (program_of(chain(), [0, 1, 2, 3, 4, 4]), "first_back reads da, which is not alive|runs twice"),
        (having(right, 5, Free(2)), "frees y, which belongs to the caller"),
        (having(right, 7, Free(5)), "frees dw, which belongs to the caller"),
        (having(right, 5, Free(1)), "frees a, which is not alive"),
        (having(right, 0, Free(6)), "frees storage 6, but the step has 6 storages"),
        (having(right, 0, Compute(5)), "runs op 5, but the step has 5 ops"),
        (having(right, 0, Compute(-1)), "runs op -1"),
    ]
    for program, message in cases:
        graph = chain(recomputable="first is recomputed" not in message)
        with pytest.raises(ProgramError, match=message):
            check(graph, program)


def altered(index: int, **facts: object) -> StepGraph:
    """The chain with other facts about one of its ops."""
    graph = chain()
    return replace(graph, ops=tuple(replace(op, **facts) if i == index else op for i, op in enumerate(graph.ops)))


def test_the_specification_knows_phases_subgraphs_and_sizes() -> None:
    with pytest.raises(ProgramError, match=r"second runs for the first time after the loss"):
        graph = altered(2, reads=())
        check(graph, program_of(graph, [0, 2, 1, 3, 4]))
    with pytest.raises(ProgramError, match=r"backward op second_back runs before the loss"):
        graph = altered(3, reads=(1,))
        check(graph, program_of(graph, [0, 1, 3, 2, 4]))
    with pytest.raises(
        ProgramError, match=r"second of subgraph 1 is recomputed after the backward pass reached subgraph 0"
    ):
        graph = altered(1, subgraph=1)
        check(graph, program_of(graph, [0, 1, 2, 3, 4, 1]))
    with pytest.raises(ProgramError, match=r"second overwrites a storage of another size"):
        graph = altered(1, in_place_over=(1,))
        check(
            graph,
            Program(instructions=tuple(Compute(i, over=1 if i == 1 else None) for i in range(5))),
        )


def without(program: Program, place: int) -> Program:
    return Program(instructions=(*program.instructions[:place], *program.instructions[place + 1 :]))


def having(program: Program, place: int, instruction: Instruction) -> Program:
    return Program(instructions=(*program.instructions[:place], instruction, *program.instructions[place:]))


def test_what_runs_again_before_its_subgraph_is_reached_waits_for_it() -> None:
    graph = long_chain(4)
    graph = replace(
        graph, ops=tuple(replace(op, subgraph=int(op.name in ("f2", "f3", "b2", "b3"))) for op in graph.ops)
    )
    loss, plain = graph.loss_index, baseline_order(graph)
    early = [*plain[: loss + 1], 1, *plain[loss + 1 :]]
    with pytest.raises(ProgramError, match="of subgraph 0 ran again before the backward pass of subgraph 1 ended"):
        check(graph, program_of(graph, early))
    moved = in_their_subgraphs(graph, early)
    check(graph, program_of(graph, moved))
    assert moved == [*plain[: loss + 3], 1, *plain[loss + 3 :]]
    assert in_their_subgraphs(graph, moved) == moved
