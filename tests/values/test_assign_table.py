"""Every row of the table of assignments, against the real thing; and the table in the docs."""

import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.values import assign_table
from tests.values.assign_table import DEFAULT, REPLICATED, Case, Failure

PAGE = Path(__file__).parents[2] / "docs" / "assignment.md"
START = [10.0, 20.0]
VALUES = [np.array([1.0, 2.0]) * factor for factor in (1, 3, 8, 16)]  # all results are exact
ALL = list(assign_table.cases())

STRATEGIES = {
    "one device": lambda: ar.OneDeviceStrategy("cpu:0"),
    "mirrored 1": lambda: ar.MirroredStrategy(["cpu:0"]),
    "mirrored 2": lambda: ar.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored 4": lambda: ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
}


def named(case: Case) -> str:
    return "-".join(case.key_within_strategy)


def chosen(strategy: str, *contexts: str, verbs: tuple[str, ...]) -> list[Case]:
    """Give the cases with these contexts and verbs; an error at creation needs one alone."""
    rows = [case for case in ALL if case.row.strategy == strategy and case.context in contexts]
    return [case for case in rows if case.verb in (("assign",) if case.row.at_creation else verbs)]


def on_strategies(*contexts: str) -> Any:
    """Every verb with two replicas, one verb with the other numbers."""
    cells = [
        pytest.param(kind, case, id=f"{kind}-{named(case)}")
        for kind in STRATEGIES
        for case in chosen(
            REPLICATED,
            *contexts,
            verbs=assign_table.VERBS if kind == "mirrored 2" else ("assign_add",),
        )
    ]
    return pytest.mark.parametrize(("kind", "case"), cells)


def under_the_default(*contexts: str) -> Any:
    cases = chosen(DEFAULT, *contexts, verbs=assign_table.VERBS)
    return pytest.mark.parametrize("case", cases, ids=named)


def values_for(strategy: ar.Strategy) -> list[np.ndarray]:
    return VALUES[: strategy.num_replicas_in_sync]


def new(strategy: ar.Strategy, case: Case) -> Any:
    with strategy.scope():
        return ar.Variable(
            START, name="w", synchronization=case.synchronization, aggregation=case.aggregation
        )


def components(variable: Any) -> list[Any]:
    return [part.tolist() for part in variable.components]


# --- the ways to write ------------------------------------------------------------------------


async def in_replica(strategy: ar.Strategy, variable: Any, verb: str) -> None:
    async def step() -> None:
        mine = VALUES[ar.get_replica_context().replica_id_in_sync_group]
        await getattr(variable, verb)(mine)

    await strategy.run(step)


async def in_scope(strategy: ar.Strategy, variable: Any, verb: str) -> None:
    with strategy.scope():
        await getattr(variable, verb)(VALUES[0])


async def in_merge(strategy: ar.Strategy, variable: Any, verb: str) -> None:
    async def step() -> None:
        await ar.get_replica_context().merge_call(lambda _s: getattr(variable, verb)(VALUES[0]))

    await strategy.run(step)


async def outside(_strategy: ar.Strategy, variable: Any, verb: str) -> None:
    await getattr(variable, verb)(VALUES[0])


async def in_update(strategy: ar.Strategy, variable: Any, verb: str) -> None:
    async def update(v: Any) -> None:
        before = np.array(v.value)
        await getattr(v, verb)(VALUES[ar.get_update_replica_id() or 0])
        assert v.value.tolist() != before.tolist()  # it reads what it wrote

    await strategy.extended.update(variable, update)


Way = Callable[[ar.Strategy, Any, str], Awaitable[None]]
CROSS_REPLICA: list[Way] = [in_scope, in_merge, outside]
OTHER: dict[str, Way] = {"replica": in_replica, "update": in_update}


async def check(strategy: ar.Strategy, case: Case, write: Way) -> None:
    row = case.row
    if row.at_creation:
        assert isinstance(row.written, Failure)
        with pytest.raises(row.written.error, match=row.written.pattern):
            new(strategy, case)
        assert len(strategy._runtime.variable_table) == 0
        return
    variable = new(strategy, case)

    if isinstance(row.written, Failure):
        pattern = row.written.pattern.format(verb=case.verb)
        with pytest.raises(row.written.error, match=pattern):
            await write(strategy, variable, case.verb)
        expected, num_writes = [START] * strategy.num_replicas_in_sync, 0
    else:
        assert row.writes is not None
        await write(strategy, variable, case.verb)
        expected = case.expected_components(START, values_for(strategy))
        num_writes = row.writes.of(strategy.num_replicas_in_sync)

    assert components(variable) == expected
    assert variable.version == num_writes
    await check_reading(strategy, case, variable, expected)


async def check_reading(
    strategy: ar.Strategy, case: Case, variable: Any, expected: list[Any]
) -> None:
    async def step() -> list[float]:
        return variable.value.tolist()

    inside = await strategy.run(step)
    assert list(strategy.local_results(inside)) == expected

    reading = case.row.outside
    assert reading is not None
    if isinstance(reading, Failure):
        with pytest.raises(reading.error, match=reading.pattern):
            _ = variable.value
    else:
        assert variable.value.tolist() == np.asarray(reading.of(expected)).tolist()
        assert not variable.value.flags.writeable


# --- the rows ---------------------------------------------------------------------------------


def test_every_combination_is_in_exactly_one_row() -> None:
    combinations = itertools.product(
        assign_table.STRATEGIES,
        assign_table.SYNCHRONIZATIONS,
        assign_table.AGGREGATIONS,
        assign_table.CONTEXTS,
        assign_table.VERBS,
    )

    assert Counter(case.key for case in ALL) == Counter(combinations)


def test_the_columns_are_all_that_there_are() -> None:
    assert [m.value for m in ar.VariableAggregation] == list(assign_table.AGGREGATIONS)
    assert {m.value for m in ar.VariableSynchronization} == set(assign_table.SYNCHRONIZATIONS)


@pytest.mark.asyncio
@on_strategies("replica", "update")
async def test_written_in_a_replica_or_an_update(kind: str, case: Case) -> None:
    async with STRATEGIES[kind]() as strategy:
        await check(strategy, case, OTHER[case.context])


@pytest.mark.asyncio
@on_strategies("cross-replica")
async def test_written_in_cross_replica_context(kind: str, case: Case) -> None:
    for write in CROSS_REPLICA:
        async with STRATEGIES[kind]() as strategy:
            await check(strategy, case, write)


@pytest.mark.asyncio
@under_the_default("replica", "update")
async def test_written_under_the_default_strategy(case: Case) -> None:
    await check(ar.get_strategy(), case, OTHER[case.context])


@pytest.mark.asyncio
@under_the_default("cross-replica")
async def test_written_outside_the_replica_of_the_default_strategy(case: Case) -> None:
    for write in CROSS_REPLICA:
        await check(ar.get_strategy(), case, write)


# --- the page ---------------------------------------------------------------------------------


def test_the_page_holds_this_table() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == assign_table.with_table(page), (
        "The table in docs/assignment.md is out of date. Run "
        "`python -m tests.values.assign_table docs/assignment.md`."
    )


def test_every_line_of_the_rendering_has_a_cell_per_column() -> None:
    lines = assign_table.rendered().splitlines()

    assert len(lines) == len(assign_table.TABLE) + 2
    assert {len(re.findall(r"\|", line)) for line in lines} == {len(assign_table.HEADER) + 1}
    assert len(set(lines)) == len(lines)


def test_a_stale_page_is_brought_up_to_date() -> None:
    stale = f"before\n{assign_table.BEGIN}\nold\n{assign_table.END}\nafter\n"

    fresh = assign_table.with_table(stale)

    assert fresh.startswith(f"before\n{assign_table.BEGIN}\n| strategy |")
    assert fresh.endswith(f" |\n{assign_table.END}\nafter\n")
    assert "old" not in fresh
    assert assign_table.with_table(fresh) == fresh
