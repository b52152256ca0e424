"""Snapshots are never torn, whoever writes, is cancelled, or reads in another thread."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioreplica as ar


@pytest.fixture(scope="module", autouse=True)
def eager_switches() -> Iterator[None]:
    """Let threads take turns every 10 us instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


KINDS = ("assign", "assign_add", "update", "slow update", "adam")


@dataclass
class Model:
    """Variables with invariants that every consistent snapshot shows.

    b is twice a; p and q, and their slots, are equal; p belongs to one count of iterations; every
    array holds one number many times.
    """

    strategy: ar.Strategy
    size: int
    variables: dict[str, Any] = field(default_factory=dict)
    adam: Any = None
    p_at: dict[int, float] = field(default_factory=dict)
    num_snapshots: int = 0
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.strategy.scope():
            for name in "abcpq":
                self.variables[name] = ar.Variable(np.zeros(self.size), name=name)
            self.adam = ar.optimizers.Adam(0.1)

    async def write(self, kind: str, number: float) -> None:
        a, b, c = (self.variables[name] for name in "abc")
        value = np.full(self.size, number)

        def update(v: Any) -> Awaitable[None]:
            v.assign_add(value)
            return b.assign(2 * v.value)  # type: ignore[no-any-return]

        async def slow_update(v: Any) -> None:
            await v.assign(value)
            await asyncio.sleep(0)
            await b.assign(v.value)
            await asyncio.sleep(0)
            await b.assign_add(v.value)

        if kind == "update":
            await self.strategy.extended.update(a, update)
        elif kind == "slow update":
            await self.strategy.extended.update(a, slow_update)
        elif kind == "adam":
            await self.strategy.run(self._apply, args=(value,))
        else:
            await getattr(c, kind)(value)

    def look(self) -> None:
        """Take a snapshot and check it."""
        snapshot = self.strategy.snapshot()
        values = {v.name: float(array.flat[0]) for v, array in snapshot.items() if array.size}
        uniform = {v.name: bool((array == array.flat[0]).all()) for v, array in snapshot.items()}
        assert all(uniform.values()), f"torn inside an array: {uniform} in {snapshot!r}"
        assert values["b"] == 2 * values["a"], f"torn: {values} in {snapshot!r}"
        assert values["p"] == values["q"], f"torn: {values} in {snapshot!r}"
        slots = {v: self.adam.get_slot(self.variables[v], "m") for v in "pq"}
        if None not in slots.values() and all(slot in snapshot for slot in slots.values()):
            assert float(snapshot[slots["p"]].flat[0]) == float(snapshot[slots["q"]].flat[0])
        count = int(snapshot[self.adam.iterations])
        assert self.p_at.setdefault(count, values["p"]) == values["p"], f"torn: {values} at {count}"
        self.num_snapshots += 1
        self.versions.append(snapshot.version)

    async def _apply(self, gradient: Any) -> None:
        p, q = self.variables["p"], self.variables["q"]
        await self.adam.apply_gradients([(gradient, p), (gradient, q)])


@dataclass(frozen=True)
class Writer:
    """What one task writes, (cycles to wait before, kind, number), and when it is cancelled."""

    writes: list[tuple[int, str, int]]
    cancelled_at: int | None

    async def run(self, model: Model) -> None:
        for num_cycles, kind, number in self.writes:
            for _ in range(num_cycles):
                await asyncio.sleep(0)
            await model.write(kind, float(number))


async def interleave(model: Model, writers: Sequence[Writer]) -> None:
    """Run all writers at once; look, and cancel those whose time has come, after every cycle."""
    tasks = [asyncio.create_task(writer.run(model)) for writer in writers]
    cycle = 0
    while not all(task.done() for task in tasks):
        for writer, task in zip(writers, tasks, strict=True):
            if writer.cancelled_at == cycle:
                task.cancel()
        await asyncio.sleep(0)
        model.look()
        cycle += 1
    for writer, result in zip(
        writers, await asyncio.gather(*tasks, return_exceptions=True), strict=True
    ):
        is_cancelled = isinstance(result, asyncio.CancelledError)
        assert result is None or (is_cancelled and writer.cancelled_at is not None), result
    model.look()
    assert model.versions == sorted(model.versions)


async def check_interleaving(num_replicas: int, writers: Sequence[Writer], on_host: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if on_host:  # as if the arrays were large
            patch.setattr("aioreplica.values._variable.INLINE_WRITE_BYTES", 0)
            patch.setattr("aioreplica.optimizers._step.INLINE_STEP_BYTES", 0)
        devices = [f"cpu:{i}" for i in range(num_replicas)]
        async with ar.MirroredStrategy(devices) as strategy:
            await interleave(Model(strategy, 3), writers)


WRITES = st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.integers(-9, 9))
WRITERS = st.builds(
    Writer, st.lists(WRITES, min_size=1, max_size=5), st.none() | st.integers(0, 25)
)


@pytest.mark.xslow
@settings(max_examples=150)
@given(st.sampled_from([1, 2, 4]), st.lists(WRITERS, min_size=1, max_size=4), st.booleans())
def test_no_interleaving_of_writers_and_cancellations_tears(
    num_replicas: int, writers: list[Writer], on_host: bool
) -> None:
    asyncio.run(check_interleaving(num_replicas, writers, on_host))


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True], ids=["inline", "on the host"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_cancelled_at_any_await_is_whole_or_absent(kind: str, on_host: bool) -> None:
    for cancelled_at in range(16):
        writers = [
            Writer([(0, kind, 1), (1, kind, 2)], cancelled_at),
            Writer([(1, kind, 3), (0, "update", 4)], None),
        ]
        asyncio.run(check_interleaving(2, writers, on_host))


async def read_during_steps(
    model: Model, read: Callable[[], None], *, num_reads: int, num_steps: int
) -> int:
    """Read in a thread while steps run, at least so many of each; return how many steps."""
    reads: list[int] = []
    errors: list[BaseException] = []
    has_stopped = threading.Event()
    may_start = threading.Barrier(2)

    def reader() -> None:
        try:
            may_start.wait(60)
            while not has_stopped.is_set():
                read()
                reads.append(len(reads))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    step = 0
    try:
        may_start.wait(60)
        while not errors and (step < num_steps or len(reads) < num_reads):
            await model.write(KINDS[step % len(KINDS)], float(step % 7))
            step += 1
    finally:
        has_stopped.set()
        thread.join()
    if errors:
        raise errors[0]
    return step


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, pytest.param(1000, marks=pytest.mark.xslow)])
async def test_a_thousand_snapshots_during_a_thousand_steps_are_never_torn(
    gang: ar.Strategy, size: int
) -> None:
    model = Model(gang, size)

    num_steps = await read_during_steps(model, model.look, num_reads=1000, num_steps=1000)

    assert num_steps >= 1000
    assert model.num_snapshots >= 1000
    assert model.versions == sorted(model.versions)
    assert len(set(model.versions)) > 1  # some were taken while it wrote


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_thread_that_holds_values_never_sees_them_change(pair: ar.Strategy) -> None:
    model = Model(pair, 1000)
    held: list[tuple[Any, Any]] = []

    def read() -> None:
        for name in "abc":
            array = model.variables[name].value
            assert (array == array[0]).all()
            held.append((array, array.copy()))
        for array, copy in held:
            assert array.tobytes() == copy.tobytes()
        del held[:-30]

    await read_during_steps(model, read, num_reads=1000, num_steps=1000)
