"""Skew, the straggler report, waits in words, totals, usage."""

import asyncio

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.telemetry import (
    CollectiveTotals,
    MergeRecord,
    ReplicaWait,
    Totals,
    skew_of,
    straggler_text,
    usage,
)

pytestmark = pytest.mark.asyncio


def merge(sequence: int, arrived: tuple[float, ...], members: tuple[int, ...] = ()) -> MergeRecord:
    members = members or tuple(range(len(arrived)))
    return MergeRecord(
        1.0, 0, sequence, "barrier", "a.py", sequence, len(members), "", (0,), members, arrived, ()
    )


async def test_skew_is_summed_per_replica() -> None:
    records = [
        merge(1, (0.0, 0.5, 0.25)),
        merge(2, (1.0, 1.25, 2.0)),
        merge(3, (0.0, 0.125), members=(0, 2)),
        merge(4, (0.0,), members=(1,)),  # met itself: no skew
    ]

    skew = skew_of(records, 3)

    assert [each.num_merges for each in skew] == [3, 2, 3]
    assert [each.num_last for each in skew] == [0, 1, 2]
    assert [each.late_s for each in skew] == [0.0, 0.75, 1.375]
    assert [each.waited_s for each in skew] == [0.5 + 1.0 + 0.125, 0.75, 0.25]
    assert [each.site for each in skew] == [
        "barrier at a.py:1", "barrier at a.py:1", "barrier at a.py:2",
    ]  # fmt: skip


async def test_the_straggler_is_named_with_its_place() -> None:
    text = straggler_text(skew_of([merge(7, (0.0, 0.004))], 2), ("cpu:0", "cpu:1"))

    first, *table = text.splitlines()
    assert first == (
        "Replica 1 (cpu:1) was late by 4 ms per merge, and last in 1 of 1; most of it in barrier "
        "at a.py:7."
    )
    assert table == [
        "  replica  device  last  late (ms)  waited (ms)",
        "  0        cpu:0      0      0.000        4.000",
        "  1        cpu:1      1      4.000        0.000",
    ]
    assert straggler_text(skew_of([], 2), ("a", "b")) == (
        "No merge of several replicas is recorded."
    )


async def test_a_straggler_of_few_merges_is_measured_by_its_own() -> None:
    often = [merge(number, (0.0, 0.0)) for number in range(30)]
    late = [merge(100 + number, (0.0, 0.01), members=(0, 2)) for number in range(3)]

    first, *_ = straggler_text(skew_of([*often, *late], 3), ("a", "b", "c")).splitlines()

    assert first.startswith("Replica 2 (c) was late by 10 ms per merge, and last in 3 of 3;")
    nobody = straggler_text(skew_of([merge(1, (0.0, 0.0), members=(1, 2))], 3), ("a", "b", "c"))
    assert nobody.startswith("Replica 1 (b) was late by 0 ms per merge")


async def test_a_wait_is_a_sentence() -> None:
    assert (
        ReplicaWait(3, 0, "cpu:0", "barrier #2", (1, 2), "a.py:7").describe()
        == "Replica 0 waits for replicas 1, 2 in barrier #2 at a.py:7."
    )


async def test_totals_count_merges_runs_faults_and_scalars(pair: ar.MirroredStrategy) -> None:
    totals = Totals()
    pair.observers.add(totals.observer)

    def fail(_strategy: ar.Strategy) -> None:
        raise KeyError("mine")

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        ctx.record("loss", 0.5)
        ctx.record("note", "no number")
        await ctx.all_gather(np.arange(3 if ctx.replica_id_in_sync_group else 1), 0)
        await ctx.barrier()
        await ctx.merge_call(fail)

    with pytest.raises(KeyError):
        await pair.run(step)

    found = totals.collectives()
    assert list(found) == ["all_gather", "barrier", "merge_call"]
    assert found["all_gather"].num_bytes == 4 * 8
    assert found["barrier"].num_bytes == 0
    assert (found["merge_call"].num_merges, found["merge_call"].num_failed) == (1, 1)
    assert found["barrier"].waited_s >= 0
    assert CollectiveTotals().num_merges == 0
    assert totals.faults() == {"KeyError": 1}
    assert totals.scalars() == {"loss": 0.5}
    num_runs, seconds = totals.runs()
    assert num_runs == 1
    assert seconds > 0


async def test_usage_counts_strategies_and_input_calls() -> None:
    before = usage()

    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    strategy.distribute_values_from_function(lambda _context: 1)
    with pytest.raises(TypeError):
        strategy.distribute_dataset(7)
    await asyncio.sleep(0)

    after = usage()
    assert after.strategies["MirroredStrategy"] == before.strategies.get("MirroredStrategy", 0) + 1
    assert after.replicas["MirroredStrategy"] >= 3
    for method in ("distribute_values_from_function", "distribute_dataset"):
        assert after.input_calls[method] == before.input_calls.get(method, 0) + 1
    assert list(after.strategies) == sorted(after.strategies)
