"""CommunicationOptions: checked when made, equal on all replicas, per call over per strategy."""

import asyncio
import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.collectives import Float16
from aioreplica.errors import MergeMismatchError, StallError
from tests.replica.gated import me, my_id
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

Options = ar.CommunicationOptions
TINY_S = 0.01


# ---- what can be chosen ------------------------------------------------------------------------


def test_the_usual_ones() -> None:
    options = Options()

    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert (options.implementation, options.compression) == ("auto", None)
    assert options == Options(0, None, "auto")
    assert hash(options) == hash(Options())


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "-1"),
        ({"bytes_per_pack": 1.0}, TypeError, "1.0"),
        ({"bytes_per_pack": True}, TypeError, "True"),
        ({"bytes_per_pack": None}, TypeError, "None"),
        ({"bytes_per_pack": "1"}, TypeError, "'1'"),
        ({"timeout_seconds": 0}, ValueError, "0"),
        ({"timeout_seconds": -1.5}, ValueError, "-1.5"),
        ({"timeout_seconds": float("inf")}, ValueError, "inf"),
        ({"timeout_seconds": float("nan")}, ValueError, "nan"),
        ({"timeout_seconds": "1"}, TypeError, "'1'"),
        ({"timeout_seconds": True}, TypeError, "True"),
        ({"implementation": "nccl"}, ValueError, "'nccl'"),
        ({"implementation": None}, ValueError, "None"),
        ({"compression": "float16"}, TypeError, "'float16'"),
        ({"compression": Float16}, TypeError, "Float16"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    [name] = fields
    with pytest.raises(error, match=name) as caught:
        Options(**fields)
    assert text in str(caught.value)


@pytest.mark.parametrize("fields", [{"bytes_per_pack": 2**40}, {"timeout_seconds": 5}], ids=str)
def test_valid_options_are_accepted(fields: dict[str, Any]) -> None:
    [(name, value)] = fields.items()

    assert getattr(Options(**fields), name) == value


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ({"timeout_seconds": 30}, {"timeout_seconds": 30.0}),
        ({"timeout_seconds": np.float32(0.5)}, {"timeout_seconds": 0.5}),
        ({"bytes_per_pack": np.int64(64)}, {"bytes_per_pack": 64}),
    ],
    ids=str,
)
def test_equal_options_look_alike_as_workers_compare_their_text(
    written: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert repr(Options(**written)) == repr(Options(**fields))


def test_they_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().bytes_per_pack = 1


def test_repr_shows_the_options_that_were_set() -> None:
    assert repr(Options()) == "CommunicationOptions()"
    options = Options(64, 1.5, compression=Float16())
    assert repr(options) == (
        "CommunicationOptions(bytes_per_pack=64, timeout_seconds=1.5, "
        "compression=Float16(error_feedback=False))"
    )


def test_copies_and_pickles_are_equal() -> None:
    options = Options(bytes_per_pack=64, timeout_seconds=1.5)

    for other in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert other == options
        assert hash(other) == hash(options)


@pytest.mark.asyncio
async def test_a_copied_strategy_has_them() -> None:
    options = Options(bytes_per_pack=64, timeout_seconds=TINY_S)
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as strategy:
        for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
            with pytest.raises(StallError):
                await other.run(late)
            await other.aclose()


def test_strategies_take_nothing_else() -> None:
    with pytest.raises(TypeError, match="CommunicationOptions"):
        ar.MirroredStrategy(["cpu:0"], options={"bytes_per_pack": 1})


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", [{"bytes_per_pack": 1}, 5, "auto", Options], ids=str)
async def test_calls_take_nothing_else(strategy: ar.Strategy, wrong: Any) -> None:
    async def step() -> None:
        for call in (me().all_reduce, me().start_all_reduce):
            with pytest.raises(TypeError, match="CommunicationOptions") as caught:
                call("sum", 1, wrong)
            assert call.__name__ in str(caught.value)
        with pytest.raises(TypeError, match="all_gather"):
            me().all_gather(np.ones(2), 0, wrong)

    await strategy.run(step)


# ---- equal on all replicas ---------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize(
    "odd",
    [None, Options(), Options(bytes_per_pack=2), Options(timeout_seconds=5.0),
     Options(1, compression=Float16())],
    ids=str,
)  # fmt: skip
async def test_different_options_are_a_mismatch(
    gang: ar.MirroredStrategy, name: str, odd: Any
) -> None:
    async def step() -> None:
        await getattr(me(), name)("sum", 1, odd if my_id() == 1 else Options(bytes_per_pack=1))

    with pytest.raises(MergeMismatchError, match="options") as caught:
        await gang.run(step)
    assert "Replicas 0 and 1" in caught.value.reason
    assert "bytes_per_pack=1" in caught.value.reason
    assert repr(odd) in caught.value.reason


@pytest.mark.asyncio
async def test_equal_options_need_not_be_one_object(gang: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().all_reduce("sum", 1, Options(bytes_per_pack=64, timeout_seconds=50))

    count = gang.num_replicas_in_sync
    assert gang.local_results(await gang.run(step)) == (count,) * count


@pytest.mark.asyncio
async def test_tables_show_a_call_s_options(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await me().all_reduce("sum", 1, Options(bytes_per_pack=64))

    with pytest.raises(MergeMismatchError, match="returned") as caught:
        await pair.run(step)
    assert caught.value.rows[0].collective == (
        "all_reduce #1 (SUM, CommunicationOptions(bytes_per_pack=64))"
    )


# ---- timeouts ----------------------------------------------------------------------------------


async def late(options: Options | None = None, name: str = "all_reduce") -> None:
    """Replica 1 never comes."""
    if my_id() == 1:
        await asyncio.Event().wait()
    await getattr(me(), name)("sum", 1, options)


def of_two(ctx: ar.ReplicaContext) -> Any:
    """Replicas 0 and 1 in one group, each other one alone."""
    own = ctx.replica_id_in_sync_group
    return ctx.group([0, 1] if own < 2 else [own])


def strategy_with(timeout_s: float | None, count: int = 2) -> ar.MirroredStrategy:
    return ar.MirroredStrategy(
        [f"cpu:{i}" for i in range(count)], options=Options(timeout_seconds=timeout_s)
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize("where", ["call", "strategy"])
async def test_a_timeout_shows_the_table(name: str, where: str) -> None:
    async with strategy_with(TINY_S if where == "strategy" else None, 3) as strategy:
        options = Options(timeout_seconds=TINY_S) if where == "call" else None
        with pytest.raises(StallError) as caught:
            await strategy.run(late, args=(options, name))

    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.timeout_s == TINY_S
    assert error.step == 0
    assert [row.state for row in error.rows] == ["waiting", "running", "waiting"]
    assert f"{name} #1 (SUM" in error.rows[0].collective
    assert error.rows[0].site.startswith(f"{__file__}:")
    assert len(error.stacks) == 3
    assert "in late" in error.stacks[1]
    text = str(error)
    assert f"{name} #1" in text
    assert error.rows[0].site in text
    assert "timeout_seconds" in text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.barrier(),
        lambda c: c.all_gather(np.ones(1), 0),
        lambda c: c.broadcast(1),
        lambda c: c.all_to_all(np.ones(2)),
        lambda c: c.reduce_scatter("sum", np.ones(2)),
        lambda c: c.any(True),
        lambda c: c.agree(1),
        lambda c: c.merge_call(print),
        lambda c: of_two(c).barrier(),
        lambda c: of_two(c).start_all_reduce("sum", 1),
    ],
    ids=["barrier", "all_gather", "broadcast", "all_to_all", "reduce_scatter", "any", "agree",
         "merge_call", "a group", "a handle of a group"],
)  # fmt: skip
async def test_the_strategy_s_timeout_holds_for_everything(call: Any) -> None:
    async def step() -> None:
        if my_id() == 1:
            await asyncio.Event().wait()
        await call(me())

    async with strategy_with(TINY_S, 3) as strategy:
        with pytest.raises(StallError) as caught:
            await strategy.run(step)
    assert "#1" in caught.value.rows[0].collective


def run_with(timeout_s: float, step: Callable[[], Any]) -> tuple[Any, ...]:
    """Run a step on two replicas, in simulated time; return what each gives."""

    async def main() -> tuple[Any, ...]:
        async with strategy_with(timeout_s) as strategy:
            return strategy.local_results(await strategy.run(step))

    results: tuple[Any, ...] = art.run(main)
    return results


def test_a_call_s_options_replace_the_strategy_s_as_a_whole() -> None:
    """A call's without a timeout has none, though the strategy's is tiny."""

    async def step() -> Any:
        if my_id() == 1:
            await asyncio.sleep(5 * TINY_S)
        return await me().all_reduce("sum", 1, Options(bytes_per_pack=1))

    assert run_with(TINY_S, step) == (2, 2)


def test_a_longer_timeout_of_the_call_wins() -> None:
    async def step() -> Any:
        if my_id() == 1:
            await asyncio.sleep(5 * TINY_S)
        return await me().all_reduce("sum", 1, Options(timeout_seconds=60))

    assert run_with(TINY_S, step) == (2, 2)


def test_only_waiting_for_others_counts() -> None:
    """A merge may take longer: everybody is there."""

    async def merge(_strategy: ar.Strategy) -> str:
        await asyncio.sleep(5 * TINY_S)
        return "merged"

    async def step() -> Any:
        return await me().merge_call(merge)

    assert run_with(TINY_S, step) == ("merged", "merged")


@pytest.mark.asyncio
async def test_no_timer_is_left(gang: ar.MirroredStrategy) -> None:
    """Neither after a merge, nor a failure, a mismatch or a cancellation."""
    options = Options(timeout_seconds=1000)
    fates = ["merge", "fail", "return", "cancel", "started"]

    async def step(fate: str) -> None:
        if my_id() == 1 and fate == "fail":
            await idle()
            raise KeyError("mine")
        if my_id() == 1 and fate == "return":
            return
        if my_id() == 1 and fate == "cancel":
            await idle()
            task.cancel()
            await asyncio.Event().wait()
        if fate == "started":
            await me().start_all_reduce("sum", 1, options)
        await me().all_reduce("sum", 1, options)

    loop = asyncio.get_running_loop()
    for fate in fates:
        task = loop.create_task(gang.run(step, args=(fate,)))
        await asyncio.gather(task, return_exceptions=True)
        await gang.aclose()  # an open one has a timer for all its runs
        live = [t for t in getattr(loop, "_scheduled", []) if not t.cancelled()]
        assert live == [], fate


@pytest.mark.asyncio
async def test_the_strategy_goes_on_after_a_stall() -> None:
    async def good() -> int:
        return await me().all_reduce("sum", 1)

    async with strategy_with(TINY_S) as strategy:
        for _ in range(2):
            with pytest.raises(StallError):
                await strategy.run(late)
            assert strategy.local_results(await strategy.run(good)) == (2, 2)


@pytest.mark.asyncio
async def test_with_one_replica_nothing_times_out() -> None:
    async with strategy_with(1e-9, 1) as strategy:

        async def step() -> Any:
            handle = me().start_all_reduce("sum", np.ones(3))
            await me().barrier()
            return float((await handle)[0])

        assert strategy.local_results(await strategy.run(step)) == (1.0,)


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_no_option_but_compression_changes_a_bit() -> None:
    rng = np.random.default_rng(5)
    parts = [[rng.normal(size=n) for n in (3, 300, 5, 7000)] for _ in range(3)]
    seen: set[bytes] = set()
    for options in (None, Options(1), Options(4096), Options(2**40), Options(timeout_seconds=60)):
        for own in (None, options):
            async with ar.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], options=own) as strategy:

                async def step(options: Any = None if own else options) -> Any:
                    return [await me().all_reduce("mean", parts[my_id()], options)]

                [[first], *_] = strategy.local_results(await strategy.run(step))
                seen.add(b"".join(array.tobytes() for array in first))
    assert len(seen) == 1


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        ar.MirroredStrategy(["cpu:0"], None, Options())
