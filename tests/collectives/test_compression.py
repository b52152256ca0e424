"""Compression: what the codes lose, what error feedback gives back, and what is left alone."""

import asyncio
import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import Compression, Float16, Reducer, TopK
from aioreplica.errors import MergeMismatchError
from aioreplica.typing import ReduceOp
from tests.replica.gated import me, my_id
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

CODES = {
    "halves": lambda: Float16(),
    "halves with feedback": lambda: Float16(error_feedback=True),
    "top": lambda: TopK(0.3),
    "top without feedback": lambda: TopK(0.3, error_feedback=False),
}


async def reduced(
    compression: Compression | None, rows: list[list[Any]], op: ReduceOp = ReduceOp.SUM
) -> list[Any]:
    options = ar.CommunicationOptions(compression=compression)
    result = Reducer().reduce(op, rows, options)
    return result if isinstance(result, list) else await result


# ---- the codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "error"),
    [(0, ValueError), (-0.5, ValueError), (1.5, ValueError), (float("nan"), ValueError),
     ("0.5", TypeError), (True, TypeError), (None, TypeError)],
    ids=repr,
)  # fmt: skip
def test_a_fraction_is_above_0_and_at_most_1(fraction: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="TopK needs"):
        TopK(fraction)


def test_repr() -> None:
    assert repr(Float16(error_feedback=True)) == "Float16(error_feedback=True)"
    assert repr(TopK(0.25)) == "TopK(0.25, error_feedback=True)"


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.75, 1, 1.0])
@pytest.mark.parametrize("shape", [(1,), (10,), (3, 7), (2, 3, 4)])
def test_top_k_sends_the_largest(fraction: float, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(0).normal(size=shape)
    code = TopK(fraction).encode(value)
    flat = value.reshape(-1)
    count = max(1, round(fraction * flat.size))

    assert len(code.indices) == count
    assert list(code.indices) == sorted(code.indices)
    np.testing.assert_array_equal(code.values, flat[code.indices])
    left = np.delete(np.abs(flat), code.indices)
    assert left.size == 0 or left.max() <= np.abs(code.values).min()
    decoded = TopK(fraction).decode(code, shape, value.dtype)
    assert decoded.shape == shape
    assert np.count_nonzero(decoded) == count


def test_top_k_of_equal_magnitudes_takes_the_first() -> None:
    assert TopK(0.5).encode(np.array([1.0, -1.0, 1.0, -1.0])).indices.tolist() == [0, 1]


def test_top_k_of_everything_loses_nothing() -> None:
    value = np.random.default_rng(0).normal(size=(4, 5))
    top = TopK(1.0)

    np.testing.assert_array_equal(top.decode(top.encode(value), (4, 5), value.dtype), value)


def test_halves_overflow_to_infinity_without_a_warning() -> None:
    assert Float16().encode(np.array([1e6, -1e6, 1.0])).tolist() == [np.inf, -np.inf, 1.0]


# ---- one reduction -----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("op", list(ReduceOp))
async def test_halves_are_rounded_at_both_ends_only(op: ReduceOp, dtype: str) -> None:
    """Summed in single precision: 2048 + 1 + 1 is not lost on the way."""
    parts = [np.array([2048.0, 0.1, -3.0], dtype), *[np.array([1.0, 0.2, 7.0], dtype)] * 2]
    halves = np.stack([part.astype("f2") for part in parts]).astype("f4")
    ways = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}

    [result] = await reduced(Float16(), [[part] for part in parts], op)

    assert result.dtype == dtype
    assert result.shape == (3,)
    assert not result.flags.writeable
    np.testing.assert_array_equal(result, ways[op.name](halves, axis=0).astype("f2").astype(dtype))


@pytest.mark.asyncio
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
async def test_top_k_sums_the_elements_that_were_sent(op: ReduceOp, dtype: str) -> None:
    parts = [np.random.default_rng(i).normal(size=(4, 5)).astype(dtype) for i in range(3)]
    sent = [np.where(np.abs(p) >= np.sort(np.abs(p), axis=None)[-6], p, 0) for p in parts]

    [result] = await reduced(TopK(0.3), [[part] for part in parts], op)

    expected = (sent[0] + sent[1]) + sent[2]
    if op is ReduceOp.MEAN:
        expected = expected / np.dtype(dtype).type(3)
    assert result.dtype == dtype
    assert not result.flags.writeable
    np.testing.assert_array_equal(result, expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
async def test_top_k_cannot_be_compared(op: ReduceOp) -> None:
    top = TopK(0.5)

    with pytest.raises(ValueError, match=op.name) as caught:
        await reduced(top, [[np.ones(3)], [np.ones(3)]], op)

    assert "TopK(0.5" in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("code", CODES)
async def test_other_arrays_than_floats_are_not_compressed(code: str) -> None:
    def row(i: int) -> list[Any]:
        return [
            np.array([2**40 + i, 1]), i, 0.1 * i, 2**70, True, np.float32(0.1), np.zeros(0),
            np.array([0.1], "f2"), np.array([0.1 + 1j * i]), np.array([True]),
            ar.IndexedSlices([[0.1]], [i], (3, 1)),
        ]  # fmt: skip

    rows = [row(i) for i in range(3)]

    plain = await reduced(None, rows)
    results = await reduced(CODES[code](), rows)

    for result, expected in zip(results, plain, strict=True):
        assert type(result) is type(expected)
        if isinstance(result, ar.IndexedSlices):
            np.testing.assert_array_equal(result.to_dense(), expected.to_dense())
        else:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("code", CODES)
async def test_trees_and_layouts(code: str) -> None:
    """Each leaf is coded on its own, whatever lies beside it and in whatever order."""
    rng = np.random.default_rng(1)
    rows = [
        [rng.normal(size=(6, 4)), 3, rng.normal(size=(4, 6)).T, rng.normal(size=20)[::2],
         rng.normal(size=()), np.ones(2, "i4")]
        for _ in range(3)
    ]  # fmt: skip
    copies = [[np.copy(leaf) for leaf in row] for row in rows]

    together = await reduced(CODES[code](), rows)

    for index, result in enumerate(together):
        [alone] = await reduced(CODES[code](), [[row[index]] for row in rows])
        np.testing.assert_array_equal(result, alone)
        assert np.shape(result) == np.shape(rows[0][index])
    for row, copy in zip(rows, copies, strict=True):
        for leaf, own in zip(row, copy, strict=True):
            np.testing.assert_array_equal(leaf, own)


@pytest.mark.asyncio
@pytest.mark.parametrize("code", CODES)
async def test_large_arrays(code: str) -> None:
    parts = [np.random.default_rng(i).normal(size=400_000) for i in range(2)]

    [result] = await reduced(CODES[code](), [[part] for part in parts])

    coded = CODES[code]()
    sent = [coded.decode(coded.encode(part), part.shape, part.dtype) for part in parts]
    np.testing.assert_allclose(result, sent[0] + sent[1], rtol=1e-3, atol=1e-6)


# ---- error feedback ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [lambda: TopK(0.2), lambda: Float16(error_feedback=True)])
async def test_nothing_is_lost_in_the_long_run(make: Any) -> None:
    """The sum over steps is the exact one, but for what is remembered at the end."""
    code = make()
    rng = np.random.default_rng(2)
    num_steps, total, exact = 60, np.zeros(20), np.zeros(20)
    for _ in range(num_steps):
        parts = [rng.normal(size=20) + 0.3 for _ in range(3)]
        [result] = await reduced(code, [[part] for part in parts])
        total += result
        exact += sum(parts)
    for _ in range(12):  # nothing new: what was kept back is sent
        [result] = await reduced(code, [[np.zeros(20)]] * 3)
        total += result

    scale = np.abs(exact).max()
    assert np.abs(total - exact).max() < 2e-3 * scale


@pytest.mark.asyncio
async def test_top_k_with_feedback_is_exact_once_everything_is_sent() -> None:
    top = TopK(0.25)
    value = np.array([8.0, 4.0, 2.0, 1.0])

    sums = [(await reduced(top, [[value if k == 0 else np.zeros(4)]] * 2))[0] for k in range(4)]

    assert [one.tolist() for one in sums] == [
        [16, 0, 0, 0], [0, 8, 0, 0], [0, 0, 4, 0], [0, 0, 0, 2],
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_without_feedback_the_rest_is_lost() -> None:
    top = TopK(0.25, error_feedback=False)
    first = await reduced(top, [[np.array([8.0, 4.0])]])
    second = await reduced(top, [[np.zeros(2)]])

    assert first[0].tolist() == [8.0, 0.0]
    assert second[0].tolist() == [0.0, 0.0]


@pytest.mark.asyncio
async def test_replicas_and_leaves_remember_their_own() -> None:
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0]), np.array([0.5, 9.0])],
                        [np.array([2.0, 7.0]), np.array([3.0, 8.0])]])  # fmt: skip
    zeros = [[np.zeros(2), np.zeros(2)]] * 2

    results = await reduced(top, zeros)

    assert [result.tolist() for result in results] == [[2.0, 1.0], [3.5, 0.0]]


@pytest.mark.asyncio
async def test_reset_forgets() -> None:
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0])]])

    top.reset()

    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 0.0]


@pytest.mark.asyncio
async def test_another_shape_is_refused_and_forgets_nothing() -> None:
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0])]])

    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)") as caught:
        await reduced(top, [[np.ones(3)]])

    assert "one object per reduction" in str(caught.value)
    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 1.0]


@pytest.mark.asyncio
async def test_a_failed_reduction_remembers_nothing() -> None:
    """The second leaf fails after the first one was encoded."""
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0]), np.array([6.0, 2.0])]])

    with pytest.raises(ValueError, match="one object per reduction"):
        await reduced(top, [[np.array([9.0, 8.0]), np.ones(3)]])

    results = await reduced(top, [[np.zeros(2), np.zeros(2)]])
    assert [result.tolist() for result in results] == [[0.0, 1.0], [0.0, 2.0]]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_here", [False, True], ids=["awaited", "on a device thread"])
async def test_a_failed_reduction_restores_the_residual(is_here: bool) -> None:
    """What was kept back before is sent later, by the next reduction that succeeds."""
    top = TopK(0.5)
    options = ar.CommunicationOptions(compression=top)
    reducer = Reducer()
    await reduced(top, [[np.array([5.0, 1.0])]])

    async def reduce() -> Any:
        if is_here:
            return reducer.reduce_here(ReduceOp.MAX, [[np.zeros(2)]], options)
        return await reducer.reduce(ReduceOp.MAX, [[np.zeros(2)]], options)  # type: ignore[misc]

    with pytest.raises(ValueError, match="all_reduce with"):  # largest magnitudes have no maximum
        await reduce()

    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 1.0]


@pytest.mark.asyncio
async def test_a_cancelled_reduction_restores_the_residual() -> None:
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0])]])
    options = ar.CommunicationOptions(compression=top)
    pending = Reducer().reduce(ReduceOp.SUM, [[np.array([9.0, 8.0])]], options)

    async def wait() -> Any:
        return await pending  # type: ignore[misc]  # compressed, it is awaited

    task = asyncio.get_running_loop().create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 1.0]


@pytest.mark.asyncio
async def test_a_reduction_that_never_begins_keeps_the_residual() -> None:
    """A run that is aborted as its last replica arrives closes what it has not awaited."""
    top = TopK(0.5)
    await reduced(top, [[np.array([5.0, 1.0])]])
    options = ar.CommunicationOptions(compression=top)
    pending: Any = Reducer().reduce(ReduceOp.SUM, [[np.array([9.0, 8.0])]], options)

    pending.close()

    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 1.0]


def test_members_have_residuals_of_their_own_on_device_threads() -> None:
    options = ar.CommunicationOptions(compression=TopK(0.5))
    reducer, value = Reducer(), np.array([3.0, 2.0])

    def send(member: int, sent: Any) -> Any:
        [result] = reducer.reduce_here(ReduceOp.SUM, [[sent]], options, [member])
        return result.tolist()

    assert send(1, value) == [3.0, 0.0]
    assert send(0, value) == [3.0, 0.0]
    assert send(1, np.zeros(2)) == [0.0, 2.0]
    assert send(0, np.zeros(2)) == [0.0, 2.0]


@pytest.mark.asyncio
async def test_a_cancelled_reduction_remembers_nothing() -> None:
    top = TopK(0.5)
    options = ar.CommunicationOptions(compression=top)
    pending = Reducer().reduce(ReduceOp.SUM, [[np.array([5.0, 1.0])]], options)

    async def wait() -> Any:
        return await pending

    task = asyncio.get_running_loop().create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    [result] = await reduced(top, [[np.zeros(2)]])
    assert result.tolist() == [0.0, 0.0]


# ---- in a run ----------------------------------------------------------------------------------


class Doubling(Compression):
    """A user's own: sends twice the value in single precision, and counts."""

    def __init__(self) -> None:
        super().__init__(error_feedback=True)
        self.num_encoded = 0

    def encode(self, value: Any) -> Any:
        self.num_encoded += 1
        return (2 * value).astype("f4")

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return (code / 2).astype(dtype).reshape(shape)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize("where", ["call", "strategy"])
async def test_a_compression_of_one_s_own(name: str, where: str) -> None:
    own = Doubling()
    options = ar.CommunicationOptions(compression=own)
    devices = ["cpu:0", "cpu:1", "cpu:2"]

    async def step() -> Any:
        value = {"w": np.full((2, 2), 0.1 * my_id()), "n": my_id()}
        result = await getattr(me(), name)("sum", value, options if where == "call" else None)
        return [result["w"], result["n"]]

    async with ar.MirroredStrategy(
        devices, options=options if where == "strategy" else None
    ) as strategy:
        results = strategy.local_results(await strategy.run(step))

    assert own.num_encoded == 3
    for array, number in results:
        assert number == 3
        np.testing.assert_allclose(array, 0.3, rtol=1e-6)
        assert array.dtype == np.float64
        assert array is results[0][0]


@pytest.mark.asyncio
async def test_a_call_s_options_without_compression_turn_it_off() -> None:
    own = Doubling()
    options = ar.CommunicationOptions(compression=own)

    async def step() -> Any:
        await me().all_reduce("sum", np.ones(3), ar.CommunicationOptions())
        return await me().start_all_reduce("sum", np.ones(3), ar.CommunicationOptions())

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as strategy:
        await strategy.run(step)
    assert own.num_encoded == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_what_is_mirrored_is_not_encoded(num_replicas: int) -> None:
    """There is one value, and nothing to combine."""
    options = ar.CommunicationOptions(compression=TopK(0.5, error_feedback=False))
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    async with ar.MirroredStrategy(devices, options=options) as strategy:
        with strategy.scope():
            v = ar.Variable([4.0, 2.0])
        parts = ar.PerReplica([np.array([1.0, 3.0])] * num_replicas)
        mean = await strategy.reduce("mean", {"v": v, "x": parts})
        largest = await strategy.reduce("max", v)

    assert mean["v"].tolist() == [4.0, 2.0]
    assert mean["x"].tolist() == [0.0, 3.0]
    assert largest.tolist() == [4.0, 2.0]


@pytest.mark.asyncio
async def test_optimizers_of_a_step_remember_what_each_variable_lost() -> None:
    """Their gradients are the first leaf of a reduction each."""
    options = ar.CommunicationOptions(compression=TopK(0.5))
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as strategy:
        with strategy.scope():
            v, w = ar.Variable([0.0, 0.0], name="v"), ar.Variable([0.0, 0.0], name="w")
            first, second = ar.optimizers.SGD(1.0), ar.optimizers.SGD(1.0)

        async def step(large: float, small: float) -> None:
            await first.apply_gradients([(np.array([large, small]), v)])
            await second.apply_gradients([(np.zeros(2), w)])

        await strategy.run(step, args=(-4.0, -1.0))
        await strategy.run(step, args=(0.0, 0.0))

    assert w.value.tolist() == [0.0, 0.0]  # what v has lost is not its own
    assert v.value.tolist() == [8.0, 2.0]


@pytest.mark.asyncio
async def test_replicas_need_one_object(gang: ar.MirroredStrategy) -> None:
    """Two that look alike would remember different things."""

    async def step() -> None:
        options = ar.CommunicationOptions(compression=Float16())
        await me().all_reduce("sum", np.ones(3), options)

    with pytest.raises(MergeMismatchError, match="options"):
        await gang.run(step)


@pytest.mark.asyncio
async def test_feedback_is_kept_per_replica_id_in_groups(gang: ar.MirroredStrategy) -> None:
    """Each replica alone is the first of its group; what one kept back is still its own."""
    options = ar.CommunicationOptions(compression=TopK(0.5))

    async def step() -> Any:
        alone = me().group([my_id()])
        for value in ([5.0, 1.0 + my_id()], [0.0, 0.0]):
            await me().barrier()
            result = await alone.all_reduce("sum", np.array(value), options)
        return result

    results = gang.local_results(await gang.run(step))

    assert [result.tolist() for result in results] == [[0.0, 1.0 + i] for i in range(len(results))]


@pytest.mark.asyncio
async def test_top_k_with_max_is_an_error_of_the_run(strategy: ar.Strategy) -> None:
    options = ar.CommunicationOptions(compression=TopK(0.5))

    async def step() -> None:
        await me().all_reduce("max", np.ones(2), options)

    with pytest.raises(ValueError, match="MAX"):
        await strategy.run(step)


@pytest.mark.asyncio
async def test_a_mismatch_remembers_nothing(pair: ar.MirroredStrategy) -> None:
    top = TopK(0.5)
    options = ar.CommunicationOptions(compression=top)

    async def bad() -> None:
        await me().all_reduce("sum", np.array([5.0, 1.0, 2.0][: 2 + my_id()]), options)

    async def good() -> Any:
        return await me().all_reduce("sum", np.zeros(2), options)

    with pytest.raises(MergeMismatchError):
        await pair.run(bad)
    for result in pair.local_results(await pair.run(good)):
        assert result.tolist() == [0.0, 0.0]


class Gated(Compression):
    """Waits in the thread that encodes until it is let go."""

    def __init__(self, gate: Any, started: Any) -> None:
        super().__init__(error_feedback=True)
        self.gate, self.started = gate, started

    def encode(self, value: Any) -> Any:
        self.started()
        assert self.gate.wait(10)
        return value * 0

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return code.astype(dtype)


@pytest.mark.asyncio
async def test_a_run_cancelled_while_it_encodes_remembers_nothing(
    pair: ar.MirroredStrategy,
) -> None:

    loop, started, gate = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    code = Gated(gate, lambda: loop.call_soon_threadsafe(started.set))
    options = ar.CommunicationOptions(compression=code)

    async def step() -> Any:
        return await me().all_reduce("sum", np.ones(2), options)

    task = loop.create_task(pair.run(step))
    await started.wait()
    task.cancel()
    await idle()
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert [code.take_lost((i, 0), (2,)) for i in range(2)] == [None, None]


# ---- numbers that are none, and overlap --------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("code", CODES)
async def test_nan_is_not_hidden(code: str) -> None:
    """Whoever checks the result for NaN must find one that any replica brought."""
    parts = [np.array([1.0, 5.0, np.nan, 2.0]), np.ones(4)]

    [result] = await reduced(CODES[code](), [[part] for part in parts])

    assert np.isnan(result[2])


@pytest.mark.asyncio
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e300])
async def test_one_bad_step_does_not_spoil_the_next_ones(code: str, bad: float) -> None:
    """A step that is refused for its gradients must not stay in what is remembered."""
    compression = CODES[code]()
    await reduced(compression, [[np.array([bad, 1.0, 2.0])]])

    for _ in range(5):
        [result] = await reduced(compression, [[np.zeros(3)]])

    assert np.isfinite(result).all()


@pytest.mark.asyncio
async def test_two_reductions_in_flight_send_a_residual_once(pair: ar.MirroredStrategy) -> None:
    options = ar.CommunicationOptions(compression=TopK(0.5))

    async def step() -> Any:
        await me().all_reduce("sum", np.array([8.0, 4.0]), options)
        handles = [me().start_all_reduce("sum", np.zeros(2), options) for _ in range(2)]
        return sum([await handle for handle in handles])

    for total in pair.local_results(await pair.run(step)):
        assert total.tolist() == [0.0, 8.0]


# ---- whose it is -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_residuals_are_freed_with_the_compression(pair: ar.MirroredStrategy) -> None:
    """It holds arrays as large as the gradients; nothing of the process keeps them."""
    top = TopK(0.5)
    alive = weakref.ref(top)

    async def step(compression: TopK) -> None:
        options = ar.CommunicationOptions(compression=compression)
        await me().all_reduce("sum", np.ones(3), options)

    await pair.run(step, args=(top,))
    del top
    gc.collect()

    assert alive() is None


@dataclass
class Scaled(Compression):
    """A user's own as a dataclass, which has no hash."""

    factor: float

    def __post_init__(self) -> None:
        super().__init__(error_feedback=False)

    def encode(self, value: Any) -> Any:
        return value * self.factor

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return code / self.factor


@pytest.mark.asyncio
async def test_a_compression_needs_no_hash(strategy: ar.Strategy) -> None:
    options = ar.CommunicationOptions(compression=Scaled(2.0))

    async def step() -> Any:
        return await me().all_reduce("sum", np.ones(2), options)

    count = strategy.num_replicas_in_sync
    for result in strategy.local_results(await strategy.run(step)):
        assert result.tolist() == [count, count]
