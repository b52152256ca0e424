"""A strategy's life: new, open on one event loop, closed; open again on another loop.

Invariants:
    * An open strategy is bound to one event loop and holds its lanes.
    * What waits on an event loop that is closed waits no more: it is ended when the strategy binds
      to another one, or is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ..context import PLACE
from ..devices import (
    CompletionQueue,
    LaneStatistics,
    lane_table,
    running_loop,
    wait_shielded,
)
from ..errors import ContextError, LoopMismatchError
from ..replica import QuietWatch, ReplicaGroup
from ..telemetry import ReplicaSkew
from ..values import StepGate, VariableStore

if TYPE_CHECKING:
    from ..input import OpenLoops


@final
@dataclass(frozen=True, slots=True)
class StrategyStatistics:
    """Counters and state of a strategy.

    Attributes:
        state: "new", "open" or "closed".
        num_steps: Runs started so far.
        num_active: Runs in progress.
        lanes: What the device threads are doing, by device name; only devices that had an op.
        skew: How late each replica came to the newest merges, by replica id.
        loop_lag_s: How long the event loop took to answer a device thread the last time, in
            seconds; None if none has asked.
        max_loop_lag_s: The longest it took since the strategy was opened on this loop, or another
            strategy was.
        num_compiled: Programs compiled so far, for `run_steps(compile=...)`.
    """

    state: str
    num_steps: int
    num_active: int
    lanes: dict[str, LaneStatistics]
    skew: tuple[ReplicaSkew, ...]
    loop_lag_s: float | None
    max_loop_lag_s: float
    num_compiled: int = 0


@final
class Lifecycle:
    """Binds a strategy to its loop and lanes, and knows its runs in progress.

    Args:
        label: Names the strategy in errors.
        lane_names: Lanes it uses; none for the default strategy.
        is_bound: Whether it belongs to one loop; the default strategy does not.
        store: Where waits for its variables are.

    Attributes:
        gate: What runs wait for while they are held back.
        open_loops: The loops over its datasets; None before the first.
        numbers: Counts the steps; the gate itself, which checkpoints look at, except in default
            strategies that are not the one of the process.
    """

    __slots__ = (
        "_active",
        "_closing_in",
        "_generation",
        "_holds_lanes",
        "_idle",
        "_is_bound",
        "_label",
        "_lane_names",
        "_loop",
        "_num_closing",
        "_port",
        "_state",
        "_store",
        "_watch",
        "gate",
        "numbers",
        "open_loops",
    )

    def __init__(
        self,
        label: str,
        lane_names: tuple[str, ...],
        *,
        is_bound: bool,
        store: VariableStore,
    ) -> None:
        self._label = label
        self._store = store
        self.gate: StepGate = store.gate
        self.numbers = store.gate if is_bound else StepGate()
        self.open_loops: OpenLoops | None = None
        self._num_closing = 0  # calls of `Runtime.aclose`, in this process
        self._closing_in = 0
        self._lane_names = lane_names
        self._is_bound = is_bound
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: CompletionQueue | None = None
        self._generation = 0
        self._active: set[ReplicaGroup] = self.gate.running
        self._idle: list[asyncio.Future[None]] = []
        self._holds_lanes = False
        self._watch: QuietWatch | None = None

    @property
    def state(self) -> str:
        """State of the strategy: new, open or closed; a fork closes it in the child."""
        if self._state == "open" and self._generation != lane_table().generation:
            self._holds_lanes = False
            self._active.clear()
            self._close()
        return self._state

    def active_groups(self) -> list[ReplicaGroup]:
        """Return the runs in progress, in the order of their steps."""
        return sorted(self._active, key=lambda group: group.step)

    def statistics(
        self, skew: tuple[ReplicaSkew, ...], num_compiled: int = 0
    ) -> StrategyStatistics:
        """Return the current counts, together with the skew."""
        lanes = lane_table().statistics()
        own = {name: lanes[name] for name in self._lane_names if name in lanes}
        port = self._port
        lag_s, max_lag_s = (None, 0.0) if port is None else (port.lag_s, port.max_lag_s)
        return StrategyStatistics(
            self.state, self.numbers.next_step, len(self._active), own, skew, lag_s, max_lag_s,
            num_compiled,
        )  # fmt: skip

    def open(self) -> tuple[asyncio.AbstractEventLoop, CompletionQueue]:
        """Return the running loop and its port, binding to it if the one before is closed.

        Raises:
            ContextError: If the strategy is closed, or the event loop is not asyncio's.
            LoopMismatchError: If it is bound to another loop that is not closed.
        """
        loop = running_loop(self._label)
        state = self.state
        if state == "open" and loop is self._loop and self._port is not None:
            return loop, self._port
        if state == "closed":
            raise ContextError(
                f"{self._label} is closed: it was left or closed, interrupted, or opened before a "
                "fork. Enter `async with strategy:` to open it again; copy.deepcopy(strategy) "
                "gives an unopened equal."
            )
        port = CompletionQueue.of_running_loop()
        if not self._is_bound:
            return loop, port
        if self._loop is not None:
            self._leave(self._loop, loop)
        self._loop, self._state, self._port = loop, "open", port
        table = lane_table()
        self._generation = table.generation
        if not table.is_simulated:  # there nothing is late, and a schedule ends where all wait
            self._watch = QuietWatch(loop, self._groups)
        if not self._holds_lanes:
            lane_table().acquire(self._lane_names)
            self._holds_lanes = True
        return loop, port

    def reopen(self) -> None:
        """Open on the running loop, a closed strategy too.

        Raises:
            ContextError: If it is being closed, or the event loop is not asyncio's.
            LoopMismatchError: If it is bound to another loop that is not closed.
        """
        # Its runs and loops are being ended: new ones would be ended with them.
        if self._num_closing and self._closing_in == lane_table().generation:  # not in a parent
            raise ContextError(
                f"{self._label} is being closed. Wait for `aclose` before it is opened again."
            )
        running_loop(self._label)
        if self.state == "closed":
            self._state = "new"
        self.open()

    def new_step(self, count: int = 1) -> int:
        """Number the next run, or the first of the next `count` steps of a device loop."""
        numbers = self.numbers
        step = numbers.next_step
        numbers.next_step = step + count
        return step

    def give_back_steps(self, first: int, end: int) -> None:
        """Let the next run have the numbers of steps that were not run, if none began since."""
        if self.numbers.next_step == end:
            self.numbers.next_step = first

    def started(self, group: ReplicaGroup) -> None:
        """Count a run in progress."""
        self._active.add(group)
        if (watch := self._watch) is not None and watch.timer is None:
            watch.arm()

    def ended(self, group: ReplicaGroup) -> None:
        """Forget a run."""
        self._active.discard(group)
        if self.gate.is_closed:
            self.gate.step_ended()
        if not self._active:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    def close_now(self) -> None:
        """Refuse further use and give the lanes back, without waiting."""
        self._close()
        self._give_back()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Refuse to be opened again before the block has ended."""
        generation = lane_table().generation
        if self._closing_in != generation:
            self._closing_in, self._num_closing = generation, 0
        self._num_closing += 1
        try:
            yield
        finally:
            self._num_closing -= 1

    async def aclose(self) -> None:
        """End all runs in progress with a ContextError, wait for them, close. Idempotent."""
        if not self._is_bound:
            return  # the default strategy is never closed: all code shares it
        place = PLACE.get()
        if place.is_in_step or place.in_merge:
            raise ContextError(
                f"{self._label} cannot be closed in {place.describe()}: it would wait for "
                "itself. Close it where it was opened."
            )
        if self.state == "open":
            loop = running_loop(self._label)
            if loop is not self._loop and self._loop is not None:
                if not self._loop.is_closed():
                    raise LoopMismatchError(
                        f"{self._label} is bound to {self._loop!r} and cannot be closed on "
                        f"{loop!r}."
                    )
                self._leave(self._loop, loop)
        self._close()
        cancelled: list[asyncio.CancelledError] = []
        for group in tuple(self._active):
            group.abort(ContextError(f"{self._label} was closed during step {group.step}."))
        if self._active:
            await wait_shielded(lambda: not self._active, self._new_idle, cancelled.append)
        # The cancellation waited: lanes are given back when no op can be using them any more.
        self._give_back()
        if cancelled:
            raise cancelled[0]

    def _leave(self, old: asyncio.AbstractEventLoop, new: asyncio.AbstractEventLoop) -> None:
        """End what waits on an event loop that is closed.

        Raises:
            LoopMismatchError: If it is not closed.
        """
        if not old.is_closed():
            raise LoopMismatchError(
                f"{self._label} is bound to the event loop of its first use ({old!r}) but "
                f"was used on {new!r}. Make one strategy per loop, or close the other loop first."
            )
        self._loop = self._port = None
        self._stop_watch()
        self._active.clear()
        self._idle.clear()
        if self.open_loops is not None:
            reason = f"It was ended because the event loop of {self._label} was closed."
            self.open_loops.leave(reason)
        self._store.end_waits(f"the event loop of {self._label} was closed.")

    def _close(self) -> None:
        if self._is_bound:
            self._state = "closed"
            self._loop = self._port = None
            self._stop_watch()
            self._store.end_waits(f"{self._label} was closed.")

    def _groups(self) -> list[ReplicaGroup]:
        """Return the runs of replicas; closures of a coordinator stand beside them."""
        return [run for run in self._active if isinstance(run, ReplicaGroup)]

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _give_back(self) -> None:
        if self._holds_lanes:
            self._holds_lanes = False
            lane_table().release(self._lane_names)

    def _new_idle(self) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        return waiter
