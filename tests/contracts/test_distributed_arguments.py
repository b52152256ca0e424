"""Every kind of distributed value in every collective, in every place where one may be called.

The rule: a collective that computes reads a distributed value in its own replica, at the call, so
replica i brings component i whoever arrives last. merge_call and update pass a variable as it is.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art

SIZES = (1, 2, 4)
LENGTH = 6
KINDS = (
    "PerReplica", "Mirrored", "mirrored variable", "on-read variable", "plain variable",
    "IndexedSlices", "Weighted",
)  # fmt: skip
COLLECTIVES = (
    "all_reduce", "start_all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
)  # fmt: skip
DOORS = ("awaited", "in a group", "blocking", "in an op", "run_steps")


# ---- values ------------------------------------------------------------------------------------


def component(kind: str, replica: int) -> Any:
    """Return what a replica brings; the same on all where the kind cannot differ."""
    same = kind in {"Mirrored", "mirrored variable", "plain variable"}
    array = np.arange(1.0, LENGTH + 1) * (1 if same else replica + 1)
    return ar.Weighted(array, array + 1) if kind == "Weighted" else array


def sparse(replica: int) -> ar.IndexedSlices:
    """Return rows whose dense form is the component."""
    dense = component("IndexedSlices", replica)
    return ar.IndexedSlices(dense[::-1], np.arange(LENGTH)[::-1], (LENGTH,))


def make(kind: str, strategy: ar.Strategy) -> Callable[[int], Any]:
    """Return what gives a replica its argument; made in cross-replica context."""
    size = strategy.num_replicas_in_sync
    components = [component(kind, i) for i in range(size)]
    if kind in {"PerReplica", "Mirrored"}:
        value = getattr(ar, kind)(components)
        return lambda _replica: value
    if kind == "plain variable":
        plain = ar.Variable(components[0])
        return lambda _replica: plain
    if kind.endswith("variable"):
        options: dict[str, Any] = {"aggregation": "sum"}
        if kind == "on-read variable":
            options["synchronization"] = "on_read"
        with strategy.scope():
            v = ar.Variable(np.zeros(LENGTH), **options)
        return lambda _replica: v
    return sparse if kind == "IndexedSlices" else components.__getitem__


async def fill(kind: str, strategy: ar.Strategy, value: Any) -> None:
    """Give a variable its components."""
    if kind == "mirrored variable":
        await value.assign(component(kind, 0))
    elif kind == "on-read variable":

        async def step() -> None:
            await value.assign(component(kind, my_id()))

        await strategy.run(step)


# ---- doors -------------------------------------------------------------------------------------


def me() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def my_id() -> int:
    return me().replica_id_in_sync_group


def call(door: Any, collective: str, value: Any, source: int) -> Any:
    if collective in {"all_reduce", "start_all_reduce", "reduce_scatter"}:
        return getattr(door, collective)("sum", value)
    if collective == "broadcast":
        return door.broadcast(value, source)
    return getattr(door, collective)(value, 0)


def members_of(door: str, size: int) -> tuple[int, ...]:
    return (0, size - 1) if door == "in a group" and size > 2 else tuple(range(size))


async def through(
    door: str, collective: str, strategy: ar.Strategy, order: Sequence[int], get: Any
) -> dict[int, Any]:
    """Let the replicas meet; each arrives when it is its turn. Return what they get."""
    members = members_of(door, strategy.num_replicas_in_sync)
    source = len(members) - 1
    got: dict[int, Any] = {}

    async def step() -> None:
        if my_id() not in members:
            return
        await asyncio.sleep(order.index(my_id()))
        own, value = me(), get(my_id())
        if door == "in an op":
            got[my_id()] = await own.run_on_device(
                lambda: call(own.blocking, collective, value, source)
            )
            return
        where = own.group(members) if door == "in a group" else own
        got[my_id()] = await call(where, collective, value, source)

    def plain(*_context: Any) -> None:
        threading.Event().wait(order.index(my_id()))  # in simulated time
        got[my_id()] = call(me().blocking, collective, get(my_id()), source)

    if door == "run_steps":
        await strategy.run_steps(plain, iter([()]), 1)
    else:
        await strategy.run(plain if door == "blocking" else step)
    return got


# ---- what must come out ------------------------------------------------------------------------


def expected(kind: str, collective: str, members: Sequence[int]) -> list[Any]:
    """Return what the members get, in their order."""
    parts = [component(kind, i) for i in members]
    if kind == "Weighted":
        totals = combined(collective, [part.total for part in parts])
        weights = combined(collective, [part.weight for part in parts])
        return [ar.Weighted(*pair) for pair in zip(totals, weights, strict=True)]
    return combined(collective, parts)


def combined(collective: str, parts: list[Any]) -> list[Any]:
    count = len(parts)
    if collective in {"all_reduce", "start_all_reduce"}:
        return [sum(parts)] * count
    if collective == "reduce_scatter":
        return np.array_split(sum(parts), count)
    if collective == "all_gather":
        return [np.concatenate(parts)] * count
    if collective == "all_to_all":
        cut = [np.array_split(part, count) for part in parts]
        return [np.concatenate(own) for own in zip(*cut, strict=True)]
    return [parts[-1]] * count


def check_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, ar.Weighted):
        assert isinstance(found, ar.Weighted)
        check_equal(found.total, wanted.total)
        check_equal(found.weight, wanted.weight)
        return
    dense = found.to_dense() if isinstance(found, ar.IndexedSlices) else found
    if isinstance(dense, ar.Variable):  # a broadcast hands on what it was given
        dense = np.asarray(dense)
    assert type(dense) is np.ndarray, f"got {type(found).__name__}, not an array"
    np.testing.assert_array_equal(dense, wanted)


def orders(size: int) -> list[list[int]]:
    """Return orders of arrival: ascending, descending, and the last replica in the middle."""
    ids = list(range(size))
    return [ids, ids[::-1], [*ids[1:], 0][::-1]][: max(1, min(size, 3))]


# ---- the cells ---------------------------------------------------------------------------------


# Where one replica and four are tried too; groups are tried with all sizes.
OTHER_SIZES = {
    *((kind, "all_reduce") for kind in KINDS),
    *(("on-read variable", collective) for collective in COLLECTIVES),
}


def cells() -> list[Any]:
    found = []
    for kind, collective, door, size in product(KINDS, COLLECTIVES, DOORS, SIZES):
        if collective == "start_all_reduce" and door in {"blocking", "in an op", "run_steps"}:
            continue  # it has no blocking form
        if size != 2 and (kind, collective) not in OTHER_SIZES and door != "in a group":
            continue
        name = f"{kind}-{collective}-{door}-{size}".replace(" ", "_")
        found.append(pytest.param(kind, collective, door, size, id=name))
    return found


@pytest.mark.parametrize(("kind", "collective", "door", "size"), cells())
def test_a_collective_reads_its_argument_in_its_own_replica(
    kind: str, collective: str, door: str, size: int
) -> None:
    async def main() -> list[dict[int, Any]]:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            get = make(kind, strategy)
            await fill(kind, strategy, get(0))
            return [await through(door, collective, strategy, order, get) for order in orders(size)]

    is_refused = kind == "IndexedSlices" and collective in {
        "reduce_scatter", "all_gather", "all_to_all",
    }  # fmt: skip
    if is_refused:
        with pytest.raises(TypeError, match="IndexedSlices"):
            art.run(main)
        return
    members = members_of(door, size)
    wanted = expected(kind, collective, members)
    for got in art.run(main):
        assert set(got) == set(members)
        for replica, one in zip(members, wanted, strict=True):
            check_equal(got[replica], one)


# ---- at the call -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_started_reduction_has_read_an_on_read_variable(size: int) -> None:
    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            v = make("on-read variable", strategy)(0)
            await fill("on-read variable", strategy, v)

            async def step() -> Any:
                handle = me().start_all_reduce("sum", v)
                await v.assign(np.zeros(LENGTH))
                await me().barrier()
                return await handle

            return strategy.local_results(await strategy.run(step))

    for found in art.run(main):
        check_equal(found, sum(component("on-read variable", i) for i in range(size)))


@pytest.mark.parametrize("size", SIZES)
def test_a_reduction_of_a_tree_reads_every_leaf(size: int) -> None:
    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            v = make("mirrored variable", strategy)(0)
            await fill("mirrored variable", strategy, v)

            async def step() -> Any:
                return await me().all_reduce("sum", {"v": v, "x": [component("", my_id())]})

            return strategy.local_results(await strategy.run(step))

    for found in art.run(main):
        check_equal(found["v"], component("mirrored variable", 0) * size)
        check_equal(found["x"][0], sum(component("", i) for i in range(size)))


# ---- passed as they are ------------------------------------------------------------------------

VARIABLES = tuple(kind for kind in KINDS if kind.endswith("variable"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", VARIABLES)
def test_merge_call_passes_the_variable_itself(kind: str, size: int) -> None:
    async def main() -> None:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            v = make(kind, strategy)(0)
            seen: list[Any] = []

            def merge(_strategy: Any, value: Any) -> None:
                seen.append(value)

            async def step() -> None:
                await me().merge_call(merge, (v,))

            def plain() -> None:
                me().blocking.merge_call(merge, (v,))

            await strategy.run(step)
            await strategy.run(plain)
            assert len(seen) == 2
            assert all(value is v for value in seen)

    art.run(main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", VARIABLES)
def test_an_update_reads_a_variable_among_its_arguments_where_it_runs(kind: str, size: int) -> None:
    """Each component of the updated variable sees that of the argument."""

    async def main() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            with strategy.scope():
                target = ar.Variable(np.zeros(LENGTH))
            v = make(kind, strategy)(0)
            await fill(kind, strategy, v)

            async def add(own: Any, other: Any) -> None:
                await own.assign_add(other.value)

            async def step() -> None:
                await me().update(target, add, (v,))

            await strategy.extended.update(target, add, (v,))
            once = strategy.local_results(target)
            await strategy.run(step)
            return once, strategy.local_results(target)

    once, twice = art.run(main)
    for i in range(size):
        np.testing.assert_array_equal(once[i], component(kind, i))
        np.testing.assert_array_equal(twice[i], 2 * component(kind, i))


# ---- cross-replica context ---------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["reduce", "reduce_to", "gather"])
@pytest.mark.parametrize("kind", ["PerReplica", "on-read variable", "IndexedSlices", "Weighted"])
def test_the_strategy_combines_the_components(kind: str, where: str, size: int) -> None:
    async def main() -> Any:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            get = make(kind, strategy)
            await fill(kind, strategy, get(0))
            value = get(0)
            if kind in {"IndexedSlices", "Weighted"}:
                value = ar.PerReplica([get(i) for i in range(size)])
            if where == "gather":
                return await strategy.gather(value, 0)
            if where == "reduce_to":
                return await strategy.extended.reduce_to("sum", value, "cpu:0")
            return await strategy.reduce("sum", value)

    if kind == "IndexedSlices" and where == "gather":
        with pytest.raises(TypeError, match="IndexedSlices"):
            art.run(main)
        return
    collective = "all_gather" if where == "gather" else "all_reduce"
    check_equal(art.run(main), expected(kind, collective, range(size))[0])
