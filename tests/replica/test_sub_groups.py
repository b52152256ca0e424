"""ctx.group: the same collectives among some of the replicas, beside each other and nested."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.conftest import mirrored
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import Sequencer, idle

pytestmark = pytest.mark.usefixtures("no_task_left")

LARGE = 1200 * 1024  # float64 elements: reduced off the event loop


@pytest_asyncio.fixture
async def quad() -> AsyncIterator[ar.MirroredStrategy]:
    chosen = mirrored(4)
    yield chosen
    await chosen.aclose()


def here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


async def mismatch(strategy: ar.Strategy, step: Callable[[], Any]) -> MergeMismatchError:
    with pytest.raises(MergeMismatchError) as caught:
        async with asyncio.timeout(10):
            await strategy.run(step)
    return caught.value


async def in_group(
    strategy: ar.Strategy, members: tuple[int, ...], call: Callable[[Any], Any]
) -> dict[int, Any]:
    """What each member gets of a call."""
    got: dict[int, Any] = {}

    async def step() -> None:
        if my_id() in members:
            got[my_id()] = await call(me().group(members))

    await strategy.run(step)
    return got


# ---- every method ------------------------------------------------------------------------------

MEMBERS = [
    members for count in range(1, 5) for members in combinations(range(4), count)
]  # fmt: skip
members_of_four = pytest.mark.parametrize("members", MEMBERS, ids=str)


@pytest.mark.asyncio
@members_of_four
async def test_reductions(quad: ar.MirroredStrategy, members: tuple[int, ...]) -> None:
    count = len(members)
    for op, expected in (
        ("sum", sum(members)),
        ("mean", sum(members) / count),
        ("min", members[0]),
        ("max", members[-1]),
    ):
        got = await in_group(
            quad, members, lambda g, op=op: g.all_reduce(op, {"a": np.array([float(my_id())])})
        )
        assert {i: part["a"].tolist() for i, part in got.items()} == {
            i: [float(expected)] for i in members
        }
        assert len({id(part["a"]) for part in got.values()}) == 1


@pytest.mark.asyncio
@members_of_four
async def test_exchanges(quad: ar.MirroredStrategy, members: tuple[int, ...]) -> None:
    count = len(members)

    async def call(group: Any) -> Any:
        position = members.index(my_id())
        gathered = await group.all_gather(np.full(position, my_id()), 0)
        scattered = await group.reduce_scatter("sum", np.arange(5.0))
        swapped = await group.all_to_all(np.arange(count) + 10 * my_id())
        return gathered.tolist(), scattered.tolist(), swapped.tolist()

    got = await in_group(quad, members, call)

    for position, i in enumerate(members):
        gathered, scattered, swapped = got[i]
        assert gathered == [m for p, m in enumerate(members) for _ in range(p)]
        assert scattered == np.array_split(count * np.arange(5.0), count)[position].tolist()
        assert swapped == [position + 10 * m for m in members]


@pytest.mark.asyncio
@members_of_four
async def test_broadcast_counts_positions(
    quad: ar.MirroredStrategy, members: tuple[int, ...]
) -> None:
    for source, giver in enumerate(members):
        got = await in_group(quad, members, lambda g, s=source: g.broadcast(my_id(), s))
        assert got == dict.fromkeys(members, giver)

    async def beyond(group: Any) -> None:
        with pytest.raises(ValueError, match=f"source={len(members)}"):
            await group.broadcast(1, len(members))

    await in_group(quad, members, beyond)


@pytest.mark.asyncio
@members_of_four
async def test_decisions(quad: ar.MirroredStrategy, members: tuple[int, ...]) -> None:
    last = members[-1]

    async def call(group: Any) -> Any:
        await group.barrier()
        some = await group.any(my_id() == last)
        every = await group.all(my_id() == last)
        return some, every, await group.agree("same")

    got = await in_group(quad, members, call)

    assert got == dict.fromkeys(members, (True, len(members) == 1, "same"))


@pytest.mark.asyncio
@pytest.mark.parametrize("is_started", [False, True])
async def test_a_group_of_one_lets_others_run(
    triple: ar.MirroredStrategy, is_started: bool
) -> None:
    """A loop of its collectives would hold up the event loop, and with it every timeout."""

    async def step() -> list[int]:
        alone, seen = me().group([my_id()]), list[int]()
        asyncio.get_running_loop().call_soon(seen.append, my_id())
        await (alone.start_all_reduce("sum", 1) if is_started else alone.all_reduce("sum", 1))
        return [*seen]

    assert triple.local_results(await triple.run(step)) == ([0], [1], [2])


@pytest.mark.asyncio
@members_of_four
async def test_merge_call(quad: ar.MirroredStrategy, members: tuple[int, ...]) -> None:
    seen: list[Any] = []

    async def merge(strategy: ar.Strategy, value: Any) -> Any:
        assert strategy.num_replicas_in_sync == len(members)
        assert strategy.local_results(value) == value.values
        assert await strategy.reduce("sum", value) == sum(members)
        seen.append(value.values)
        await asyncio.sleep(0)
        return ar.PerReplica([10 * v for v in value.values])

    got = await in_group(quad, members, lambda g: g.merge_call(merge, (my_id(),)))

    assert got == {i: 10 * i for i in members}
    assert seen == [members]


@pytest.mark.asyncio
@members_of_four
async def test_started(quad: ar.MirroredStrategy, members: tuple[int, ...]) -> None:
    async def call(group: Any) -> Any:
        handles = [group.start_all_reduce("sum", 10**k * my_id()) for k in range(3)]
        large = group.start_all_reduce("sum", np.ones(LARGE))
        results = [await handle for handle in reversed(handles)]
        return [*results, float((await large)[-1])]

    got = await in_group(quad, members, call)

    total, count = sum(members), len(members)
    assert got == {i: [100 * total, 10 * total, total, float(count)] for i in members}


@pytest.mark.asyncio
@members_of_four
async def test_a_group_knows_its_members_and_their_number(
    quad: ar.MirroredStrategy, members: tuple[int, ...]
) -> None:
    async def call(group: Any) -> Any:
        assert group.members == members
        assert group.num_replicas_in_sync == len(members)
        assert str(members) in repr(group)
        return group.replica_id_in_sync_group

    assert await in_group(quad, members, call) == {m: p for p, m in enumerate(members)}


# ---- one group, however it is named ------------------------------------------------------------


@pytest.mark.asyncio
async def test_ids_in_any_order_and_of_any_iterable(triple: ar.MirroredStrategy) -> None:
    ways: list[Any] = [*permutations(range(3)), {0, 1, 2}, range(3), np.array([2, 0, 1])]
    ways.append(iter)
    for first in ways:

        async def step(first: Any = first) -> Any:
            ids = iter([2, 1, 0]) if first is iter else first
            group = me().group(ids if my_id() == 0 else [0, 1, 2])
            assert group.members == (0, 1, 2)
            return await group.all_reduce("sum", my_id())

        assert triple.local_results(await triple.run(step)) == (3, 3, 3)


@pytest.mark.asyncio
async def test_two_objects_are_one_group(quad: ar.MirroredStrategy) -> None:
    """Calls are numbered by group, not by the object that made them."""

    async def step() -> Any:
        if my_id() > 1:
            return None
        one, two = me().group([0, 1]), me().group([1, 0])
        first, second = (one, two) if my_id() else (two, two)
        return [await first.all_reduce("sum", 1), await second.all_reduce("sum", 10)]

    results = quad.local_results(await quad.run(step))

    assert results[:2] == ([2, 20], [2, 20])


@pytest.mark.asyncio
async def test_everybody_as_a_group_is_everybody(gang: ar.MirroredStrategy) -> None:
    """Some say `ctx`, some `ctx.group(range(n))`; they meet, in one sequence."""

    async def step() -> Any:
        count = me().num_replicas_in_sync
        where = me().group(range(count)) if my_id() else me()
        results = [await where.all_reduce("sum", 1)]
        other = me() if my_id() else me().group(range(count))
        results.append(await other.all_reduce("sum", 10))
        handles = [where.start_all_reduce("sum", 1), other.start_all_reduce("sum", 10)]
        return results + [await handle for handle in handles]

    count = gang.num_replicas_in_sync
    for results in gang.local_results(await gang.run(step)):
        assert results == [count, 10 * count] * 2
    assert [r.sequence for r in gang.recorder.records()] == [1, 2, 3, 4]


@pytest.mark.asyncio
async def test_a_group_of_one(strategy: ar.Strategy) -> None:
    async def step() -> Any:
        alone = me().group([my_id()])
        assert alone.num_replicas_in_sync == 1
        assert await alone.any(False) is False
        assert await alone.start_all_reduce("sum", 7) == 7
        return await alone.all_reduce("sum", 5)

    assert set(strategy.local_results(await strategy.run(step))) == {5}


# ---- side by side and nested -------------------------------------------------------------------


@pytest.mark.asyncio
async def test_disjoint_groups_in_all_interleavings(quad: ar.MirroredStrategy) -> None:
    """Two groups make two calls each, in every order of the four replicas, each turn twice."""
    for order in permutations(range(4)):
        sequencer = Sequencer([(i, turn) for turn in range(2) for i in order])

        async def step(sequencer: Sequencer = sequencer) -> Any:
            group = me().group([0, 1] if my_id() < 2 else [2, 3])
            results = []
            for turn in range(2):
                await sequencer.turn((my_id(), turn))
                results.append(await group.all_reduce("sum", 10**turn * my_id()))
            return results

        results = quad.local_results(await quad.run(step))
        assert results == ([1, 10], [1, 10], [5, 50], [5, 50])


@pytest.mark.asyncio
async def test_one_group_goes_on_while_the_other_waits(quad: ar.MirroredStrategy) -> None:
    others_done = asyncio.Event()

    async def step() -> Any:
        if my_id() >= 2:
            group = me().group([2, 3])
            results = [await group.all_reduce("sum", k) for k in range(20)]
            others_done.set()
            return results
        if my_id() == 1:
            await others_done.wait()
        return await me().group([0, 1]).all_reduce("sum", 1)

    results = quad.local_results(await quad.run(step))

    assert results == (2, 2, [2 * k for k in range(20)], [2 * k for k in range(20)])


@pytest.mark.asyncio
async def test_groups_and_everybody_in_turn(quad: ar.MirroredStrategy) -> None:
    """As in a two-dimensional mesh: rows, columns, all."""

    async def step() -> Any:
        row = me().group([0, 1] if my_id() < 2 else [2, 3])
        column = me().group([my_id() % 2, my_id() % 2 + 2])
        results = []
        for _ in range(3):
            results.append(await row.all_reduce("sum", my_id()))
            results.append(await me().all_reduce("sum", my_id()))
            results.append(await column.all_reduce("sum", my_id()))
        return results

    results = quad.local_results(await quad.run(step))

    for i in range(4):
        assert results[i] == [1 if i < 2 else 5, 6, 2 if i % 2 == 0 else 4] * 3
    texts = {(r.members, r.sequence) for r in quad.recorder.records()}
    assert texts == {
        (m, n) for m in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)) for n in (1, 2, 3)
    }


@pytest.mark.asyncio
async def test_merged_arguments_name_the_members_devices(quad: ar.MirroredStrategy) -> None:
    texts: list[str] = []

    def merge(_strategy: ar.Strategy, value: Any) -> None:
        texts.append(repr(value))

    await in_group(quad, (1, 3), lambda g: g.merge_call(merge, (my_id(),)))

    assert texts == ["PerReplica({cpu:1: 1, cpu:3: 3})"]


@pytest.mark.asyncio
async def test_a_merge_in_one_group_while_another_meets(quad: ar.MirroredStrategy) -> None:
    gate = asyncio.Event()

    async def merge(_strategy: ar.Strategy) -> str:
        await gate.wait()
        return "merged"

    async def step() -> Any:
        if my_id() < 2:
            return await me().group([0, 1]).merge_call(merge)
        result = await me().group([2, 3]).all_reduce("sum", 1)
        gate.set()
        return result

    assert quad.local_results(await quad.run(step)) == ("merged", "merged", 2, 2)


@pytest.mark.asyncio
async def test_handles_of_crossing_groups(triple: ar.MirroredStrategy) -> None:
    """Started, so in any order: nobody waits until all are in flight."""
    ring = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}
    for awaited in permutations(range(3)):

        async def step(awaited: tuple[int, ...] = awaited) -> Any:
            handles = [me().group(m).start_all_reduce("sum", my_id()) for m in ring[my_id()]]
            handles.append(me().start_all_reduce("sum", my_id()))
            got = {k: await handles[k] for k in awaited}
            return [got[k] for k in range(3)]

        results = triple.local_results(await triple.run(step))
        assert results == ([1, 2, 3], [3, 1, 3], [2, 3, 3])


# ---- bad input ---------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "without the caller": ([0], ValueError, "leaves out"),
    "a repeat": ([0, 1, 1], ValueError, "repeated"),
    "too large": ([0, 1, 3], ValueError, "no replica 3"),
    "negative": ([0, 1, -1], ValueError, "no replica -1"),
    "empty": ([], ValueError, "none"),
    "floats": ([0.0, 1.0], TypeError, "replica ids"),
    "none": (None, TypeError, "replica ids"),
    "an int": (1, TypeError, "replica ids"),
    "a string": ("012", TypeError, "'012'"),
    "strings": (["0", "1"], TypeError, "replica ids"),
    "nested": ([[0, 1]], TypeError, "replica ids"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_bad_groups_are_refused_before_anything(
    triple: ar.MirroredStrategy, name: str
) -> None:
    members, error, text = BAD[name]

    async def step() -> Any:
        if my_id() == 1:
            with pytest.raises(error, match=text) as caught:
                me().group(members)
            assert "group" in str(caught.value)
        return await me().group([0, 1, 2]).all_reduce("sum", 1)

    assert triple.local_results(await triple.run(step)) == (3, 3, 3)


@pytest.mark.asyncio
async def test_a_group_belongs_to_its_replica_and_run(pair: ar.MirroredStrategy) -> None:
    groups: dict[int, Any] = {}
    contexts: dict[int, Any] = {}

    async def step() -> None:
        contexts[my_id()] = me()
        groups[my_id()] = me().group([my_id()])
        await me().barrier()
        other = 1 - my_id()
        with pytest.raises(ContextError, match="all_reduce"):
            await groups[other].all_reduce("sum", 1)
        with pytest.raises(ContextError, match="start_all_reduce"):
            groups[other].start_all_reduce("sum", 1)
        with pytest.raises(ContextError, match="group"):
            contexts[other].group([other])

    await pair.run(step)

    with pytest.raises(ContextError, match="barrier"):
        await groups[0].barrier()
    with pytest.raises(ContextError, match="group"):
        contexts[0].group([0])


@pytest.mark.asyncio
async def test_a_group_outside_every_scope() -> None:
    group = me().group([0])

    assert await group.all_reduce("sum", 5) == 5
    assert await group.start_all_reduce("sum", 5) == 5


# ---- circles -----------------------------------------------------------------------------------


def ring_of(count: int) -> dict[int, tuple[int, ...]]:
    return {i: tuple(sorted((i, (i + 1) % count))) for i in range(count)}


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("started", [False, True], ids=["all_reduce", "start_all_reduce"])
async def test_a_ring_of_groups_is_found_at_once(count: int, started: bool) -> None:
    async with mirrored(count) as strategy:
        for order in permutations(range(count)):
            sequencer = Sequencer(order)

            async def step(sequencer: Sequencer = sequencer) -> None:
                await sequencer.turn(my_id())
                group = me().group(ring_of(count)[my_id()])
                if started:
                    await group.start_all_reduce("sum", 1)
                else:
                    await group.all_reduce("sum", 1)

            error = await mismatch(strategy, step)

            assert error.reason.startswith("Replica 0 is in ")
            assert [row.state for row in error.rows] == ["waiting"] * count
            for row in error.rows:
                assert f"in group {ring_of(count)[row.replica_id]}" in row.collective
                assert row.site.startswith(f"{__file__}:")


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("group_calls", ["all_reduce", "barrier", "merge_call", "broadcast"])
async def test_a_group_against_everybody(
    triple: ar.MirroredStrategy, order: tuple[int, int], group_calls: str
) -> None:
    sequencer = Sequencer(order)
    arguments = {
        "all_reduce": ("sum", 1), "barrier": (), "merge_call": (print,), "broadcast": (1,)
    }  # fmt: skip

    async def step() -> None:
        if my_id() == 2:
            await asyncio.Event().wait()
        await sequencer.turn(my_id())
        where = me().group([0, 1]) if my_id() == 0 else me()
        await getattr(where, group_calls)(*arguments[group_calls])

    error = await mismatch(triple, step)

    assert f"{group_calls} #1" in error.reason
    assert "in group (0, 1)" in error.reason
    assert [row.state for row in error.rows] == ["waiting", "waiting", "running"]
    assert "in group (0, 1)" in error.rows[0].collective
    assert "in group" not in error.rows[1].collective


@pytest.mark.asyncio
async def test_a_circle_is_found_while_others_work(quad: ar.MirroredStrategy) -> None:
    """Replica 3 has nothing to do with it and need not come for the verdict."""

    async def step() -> None:
        if my_id() == 3:
            await asyncio.Event().wait()
        await me().group([[0, 1], [1, 2], [0, 2]][my_id()]).barrier()

    error = await mismatch(quad, step)

    assert [row.state for row in error.rows] == ["waiting"] * 3 + ["running"]


@pytest.mark.asyncio
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
async def test_groups_that_overlap_in_different_ways(
    triple: ar.MirroredStrategy, order: tuple[int, ...]
) -> None:
    """One replica names another group than the others do."""
    sequencer = Sequencer(order)
    groups = {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]}

    async def step() -> None:
        await sequencer.turn(my_id())
        await me().group(groups[my_id()]).all_reduce("sum", 1)

    error = await mismatch(triple, step)

    assert error.rows[0].collective == "all_reduce #1 (SUM)"
    assert error.rows[1].collective == "all_reduce #1 (SUM) in group (0, 1)"


@pytest.mark.asyncio
async def test_the_strategy_goes_on_after_a_circle(triple: ar.MirroredStrategy) -> None:
    async def bad() -> None:
        await me().group(ring_of(3)[my_id()]).barrier()

    async def good() -> int:
        return await me().group([0, 1, 2]).all_reduce("sum", 1)

    for _ in range(2):
        await mismatch(triple, bad)
        assert triple.local_results(await triple.run(good)) == (3, 3, 3)


# ---- differences in a group --------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Callable[[Any, bool], Any], str]] = {
    "op": (lambda g, odd: g.all_reduce("min" if odd else "max", 1), "MAX and MIN"),
    "shape": (lambda g, odd: g.all_reduce("sum", np.ones(2 + odd)), "shapes"),
    "dtype": (lambda g, odd: g.all_reduce("sum", np.ones(2, "f4" if odd else "f8")), "dtypes"),
    "structure": (lambda g, odd: g.all_reduce("sum", [1] * (1 + odd)), "structures"),
    "axis": (lambda g, odd: g.all_gather(np.ones((2, 2)), int(odd)), "axes 0 and 1"),
    "scattered axis": (
        lambda g, odd: g.reduce_scatter("sum", np.ones((2, 2)), int(odd)), "axes 0 and 1",
    ),
    "source": (lambda g, odd: g.broadcast(1, int(odd)), "sources 0 and 1"),
    "function": (lambda g, odd: g.merge_call(print if odd else repr), "merge_call"),
    "values": (lambda g, odd: g.agree(int(odd)), "agree"),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", DIFFERENT)
async def test_differences_name_the_group(quad: ar.MirroredStrategy, kind: str) -> None:
    call, text = DIFFERENT[kind]

    async def step() -> None:
        if my_id() in {1, 3}:
            await call(me().group([1, 3]), my_id() == 3)
        else:
            await me().group([0, 2]).barrier()
            await asyncio.Event().wait()

    error = await mismatch(quad, step)

    assert text in error.reason
    assert error.reason.startswith("Replicas 1 and 3 disagree in ")
    assert "in group (1, 3)" in error.reason
    assert "in group (1, 3)" in error.rows[1].collective
    assert "in group (1, 3)" in error.rows[3].collective
    assert "in group (0, 2)" in error.rows[0].collective or error.rows[0].collective == "before any"


@pytest.mark.asyncio
async def test_different_collectives_in_a_group(triple: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await me().group([0, 2]).barrier()
        elif my_id() == 2:
            await me().group([0, 2]).all_reduce("sum", 1)

    error = await mismatch(triple, step)

    assert error.reason == (
        "Replica 0 is in barrier #1 in group (0, 2) but replica 2 is in all_reduce #1 (SUM) in "
        "group (0, 2)"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [(0, 2), (2, 0)], ids=["waits first", "returns first"])
@pytest.mark.parametrize("started", [False, True], ids=["all_reduce", "start_all_reduce"])
async def test_a_member_that_returns(
    triple: ar.MirroredStrategy, order: tuple[int, int], started: bool
) -> None:
    sequencer = Sequencer(order)
    name = "start_all_reduce" if started else "all_reduce"

    async def step() -> None:
        if my_id() == 1:
            await asyncio.Event().wait()
        await sequencer.turn(my_id())
        if my_id() == 0:
            await getattr(me().group([0, 2]), name)("sum", 1)

    error = await mismatch(triple, step)

    assert error.reason == (
        f"Replica 2 returned while replica 0 waits in {name} #1 (SUM) in group (0, 2)"
    )
    is_running = started and order == (2, 0)  # it has started the call and not awaited it so far
    state = "running" if is_running else "waiting"
    assert [row.state for row in error.rows] == [state, "running", "returned"]


@pytest.mark.asyncio
async def test_replicas_outside_the_group_may_return(triple: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        if my_id() == 1:
            return "early"
        await idle()
        return await me().group([0, 2]).all_reduce("sum", 1)

    assert triple.local_results(await triple.run(step)) == (2, "early", 2)


@pytest.mark.asyncio
async def test_a_member_that_fails(triple: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 2:
            await idle()
            raise KeyError("mine")
        await me().group([[0, 2], [1]][my_id()]).barrier()
        if my_id() == 1:
            await asyncio.Event().wait()

    with pytest.raises(KeyError, match="mine") as caught:
        await triple.run(step)
    assert "replica 2" in str(caught.value.__notes__)


@pytest.mark.asyncio
async def test_a_member_that_gives_up(triple: ar.MirroredStrategy) -> None:
    gave_up: list[int] = []

    async def step() -> None:
        if my_id() == 0:
            try:
                async with asyncio.timeout(0):
                    await me().group([0, 2]).barrier()
            except TimeoutError:
                gave_up.append(0)
                return  # or it would have a second to say why
        await asyncio.Event().wait()

    error = await mismatch(triple, step)

    assert error.reason.startswith("Replica 0 withdrew from barrier #1 in group (0, 2)")
    assert error.rows[0].state == "withdrew"


@pytest.mark.asyncio
async def test_a_group_call_that_is_never_awaited(triple: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            me().group([0, 2]).barrier()

    with pytest.raises(ContextError, match="never awaited") as caught:
        await triple.run(step)
    assert "barrier #1 in group (0, 2)" in str(caught.value)


@pytest.mark.asyncio
async def test_a_group_and_everybody_at_once_in_one_replica(triple: ar.MirroredStrategy) -> None:
    """One collective at a time, whatever its group."""

    async def step() -> None:
        await asyncio.gather(me().group([my_id()]).barrier(), me().barrier())
        await asyncio.gather(me().group([0, 1, 2]).barrier(), me().barrier())

    with pytest.raises(ContextError, match="one after the other"):
        await triple.run(step)


@pytest.mark.asyncio
async def test_outer_cancellation_of_waiting_groups(quad: ar.MirroredStrategy) -> None:
    waiting = asyncio.Event()

    async def step() -> None:
        group = me().group([0, 1] if my_id() < 2 else [2, 3])
        handle = group.start_all_reduce("sum", np.ones(LARGE))
        if my_id() == 0:
            waiting.set()
            await asyncio.Event().wait()
        await handle
        await me().group([0, 1, 2, 3]).barrier()

    task = spawn(quad.run(step))
    await waiting.wait()
    await idle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_a_handle_in_a_group_that_is_never_awaited(triple: ar.MirroredStrategy) -> None:
    lines: list[str] = []

    async def step() -> None:
        if my_id() != 1:
            lines.append(here(1))
            me().group([0, 2]).start_all_reduce("sum", 1)

    with pytest.warns(RuntimeWarning, match=r"in group \(0, 2\)") as caught:
        await triple.run(step)
    [warning] = caught
    assert lines[0] in str(warning.message)
    assert "replicas 0, 2" in str(warning.message)


@pytest.mark.asyncio
async def test_records_name_the_members(quad: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() in {1, 3}:
            await me().group([1, 3]).all_reduce("sum", np.ones(4))

    await quad.run(step)

    [record] = quad.recorder.records()
    assert record.members == (1, 3)
    assert record.num_replicas == 2
    assert record.num_bytes == (32,)
    assert len(quad.recorder.collectives(3)) == 1
    assert quad.recorder.collectives(0) == ()
