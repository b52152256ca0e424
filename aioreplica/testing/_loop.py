"""The simulated event loop: a ready set instead of a ready queue, and a clock that jumps.

There is no selector and no thread. One schedule runs on one loop: `run` takes a step of one
participant after the other, and asks `choose` wherever two or more could go on. What may be chosen
at a fidelity is decided here, by where `call_soon` puts things:

* `reorder`: every task's step is an option of its own. A plain callback keeps its place: whatever
  was registered after it waits behind it, tasks included, while steps registered before it may
  come before or after it.
* `asyncio`: tasks stand in the same queue as callbacks, so only events from outside (ops of pools,
  timers due together) vary.
* `adversarial`: callbacks are options of their own too, and the clock may move at any time.

Virtual time moves when nothing else is left to do; while ops are in flight, the schedule decides
whether one of them completes first. Steps take no time, but on a real machine they do: so the
schedule may also let a timer fire while tasks are ready, as if they had taken up to `JITTER_S`.
"""

from __future__ import annotations

# mypy: disable-error-code="override"
# The methods of a loop are overridden with plainer signatures: they are called very often.
import asyncio
import sys
import threading
from array import array
from asyncio import events
from asyncio.log import logger
from asyncio.selector_events import BaseSelectorEventLoop
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, Protocol, final
from weakref import WeakValueDictionary

from ._forbidden import ForbiddenIO
from ._participants import (
    FIRST_INDEX,
    JITTER_S,
    START_S,
    CallbackQueue,
    Choose,
    Clock,
    Participant,
    SimHandle,
    SimTask,
    SimTimer,
    TaskList,
    fifo,
    name_of_task,
)
from ._streams import Executors, NetworkLoop

UNEXPLORED: Final = (
    "Tasks of the class {} were not explored: the program's task factory makes them, and they keep "
    "asyncio's own order among the plain callbacks. Make asyncio.Task, or use "
    "asyncio.eager_task_factory: its tasks are explored after their first step."
)
MAX_STEPS: Final = 100_000
SPIN_STEPS: Final = 10_000
MIN_SPIN_STEPS: Final = 100
SAME_INSTANT_S: Final = 1e-9


def _find_step_type() -> type:
    """Return the type of the callable that the C task schedules for its next step."""
    seen: list[Any] = []

    class Probe(asyncio.BaseEventLoop):
        def call_soon(self, callback: Any, *_: object, **__: object) -> Any:
            seen.append(callback)

    async def nothing() -> None: ...

    coroutine, loop = nothing(), Probe()
    task = SimTask(coroutine, loop=loop)
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it never runs
    coroutine.close()
    return type(seen[0])


STEP: Final = _find_step_type()
BUILTIN: Final = type(len)


class Due(Protocol):
    """Something that waits for a moment of virtual time: a timer, or an op that sleeps."""

    def is_off(self) -> bool:
        """Return True if it waits no longer."""

    def become_due(self, loop: SimLoop) -> None:
        """Go on: the moment has come."""


class LoopObserver(Protocol):
    """Observes every step of a run."""

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step, and who else could have."""

    def after(self, chosen: Participant) -> None:
        """Note what came of the step."""


@final
class SimLoop(NetworkLoop, ForbiddenIO, BaseSelectorEventLoop):
    """An event loop that runs one schedule of one program.

    Args:
        choose: Picks one of the options wherever there are several.
        fidelity: "asyncio", "reorder" or "adversarial".
        budget: When to call a program endless.
        observer: Told of every step, or None; only reruns for a trace have one.

    Attributes:
        order: Which participant took each step so far, by number.
        now: Virtual time.
        early_until: Up to when timers may fire although tasks are ready.
    """

    def __init__(
        self,
        choose: Choose,
        fidelity: str = "reorder",
        budget: Budget | None = None,
        observer: LoopObserver | None = None,
    ) -> None:
        asyncio.BaseEventLoop.__init__(self)  # that of the selector loop would open sockets
        self.begin_network()
        self.choose = choose
        self.fidelity = fidelity
        self.budget = budget or Budget()
        self.observer = observer
        self.now = START_S
        self.order = array("i")  # numbers alone: a long run takes little memory
        self.stepping: Participant | None = None  # known only where a trace is made
        self.sim_tasks = TaskList()
        self.executors: Executors | None = None  # set before the run
        self.enabled: list[Participant] = []
        self.external: list[Participant] = []  # steps of ops: they may happen at any moment
        self.waiting: deque[Any] = deque()  # the first callback and whatever came after it
        self.complaints: list[dict[str, Any]] = []
        self.is_logging = True  # until the program has ended
        self.notes: dict[str, None] = {}  # what is not simulated, in words; of all runs
        self._generators: WeakValueDictionary[int, AsyncGenerator[Any, Any]] | None = None
        self._num_generators = 0
        self._timers: list[tuple[float, int, Due]] = []
        self.num_due = 0  # timers that are due and have neither fired nor been cancelled
        self._due_at = 0.0
        self.early_until = START_S + JITTER_S  # timers up to then may fire while tasks are ready
        self._overdue: deque[SimTimer] = deque()  # timers that an earlier one keeps waiting
        self.moved: Callable[[float], None] | None = None  # told of the clock
        self.num_indices = FIRST_INDEX
        self.callbacks: CallbackQueue = CallbackQueue(self)
        self.clock: Clock = Clock(self)
        self._holds_tasks = fidelity != "asyncio"
        self._holds_callbacks = fidelity == "adversarial"
        self._old_hooks: Any = None

    def new_index(self) -> int:
        """Number the next participant."""
        index = self.num_indices
        self.num_indices = index + 1
        return index

    # ---- registering -----------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Any:
        """Register a callback, or the next step of a task."""
        kind = type(callback)
        if kind is STEP or (kind is BUILTIN and callback.__name__ == "task_wakeup"):
            task = callback.__self__  # type: ignore[attr-defined]
            if type(task) is SimTask:
                task.callback = callback
                task.args = args
                task.context = context
                if self.followers is not None:
                    self.followers.append((task, callback))
                waiting = self.waiting
                if self._holds_tasks:
                    if waiting:
                        waiting.append(task)
                    else:
                        self.enabled.append(task)
                    return None
                if not waiting:
                    self.enabled.append(self.callbacks)
                waiting.append(task)
                return None
        if self._closed:
            self._check_closed()  # type: ignore[attr-defined]
        if self._holds_callbacks and self.network is None:  # asyncio's transports need the order
            free = SimHandle(callback, args, self, context)
            self.enabled.append(free)
            return free
        handle = events.Handle(callback, args, self, context)
        if not self.waiting:
            self.enabled.append(self.callbacks)
        self.waiting.append(handle)
        return handle

    call_soon_threadsafe = NetworkLoop.call_from_thread  # type: ignore[assignment]  # by position

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        """Register a callback for a moment of virtual time."""
        if delay is None:
            raise TypeError("delay must not be None")
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        """Register a callback for a moment of virtual time."""
        timer = SimTimer(when, callback, args, self, context)
        timer._scheduled = True
        if when <= self.now:  # due at once: a real loop looks for it when the queue is done
            self.call_soon(self._add_timer, timer)
        elif when < inf:  # one at infinity never fires
            heappush(self._timers, (when, timer.index, timer))
        return timer

    def _add_timer(self, timer: SimTimer) -> None:
        heappush(self._timers, (timer.when(), timer.index, timer))
        self.jump(self.now, is_early=True)

    def call_when_due(self, when: float, participant: Due) -> None:
        """Let a participant's `become_due` be called at a moment of virtual time."""
        heappush(self._timers, (when, self.new_index(), participant))

    def time(self) -> float:
        """Return virtual time, in seconds."""
        return self.now

    def create_task(self, coro: Coroutine[object, None, Any], **kwargs: Any) -> asyncio.Task[Any]:
        """Make a task that the schedule may hold."""
        self._check_closed()  # type: ignore[attr-defined]
        task: asyncio.Task[Any]
        if self._task_factory is None:  # type: ignore[attr-defined]
            task = SimTask(coro, loop=self, **kwargs)
        else:
            task = super().create_task(coro, **kwargs)
            if type(task) is not SimTask:
                self.notes[UNEXPLORED.format(type(task).__qualname__)] = None
                return task
            task.set_name(kwargs.get("name") or name_of_task(task.number))  # some make it "None"
        if self.network is not None and asyncio.current_task(self) is None:
            task.ends_with_run = True  # of a server: nobody in the program can await it
        return task

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> Any:
        """Submit a call to the simulated twin of an executor."""
        assert self.executors is not None
        return self.executors.submit_call(executor, func, args)

    def put_due(self, timer: SimTimer) -> None:
        """Put a due timer into the queue, where it waits for its turn."""
        if not self.waiting:
            self.enabled.append(self.callbacks)
        self.waiting.append(timer)

    # ---- running ---------------------------------------------------------------------------

    def run_until(self, done: Callable[[], bool]) -> str:
        """Take steps until something is done; say how that ended.

        Returns:
            "done"; "deadlock" when nothing can happen any more; "endless" when the budget is used.
        """
        enabled, external, order, timers = self.enabled, self.external, self.order, self._timers
        choose, observer, holds_clock = self.choose, self.observer, self._holds_callbacks
        end = self.budget.first_check
        while True:
            if self.postponed:
                self.offer_postponed()
            if enabled:
                options = enabled + external if external else enabled
                if holds_clock or (timers and timers[0][0] <= self.early_until):
                    options = self._with_clock()
            elif external:
                options = self._with_clock() if timers else external
            else:
                when = self.next_when()
                if when is None:
                    return "deadlock"
                self.jump(when)
                continue
            at = choose(options) if len(options) > 1 else 0
            chosen = options[at]
            if observer is not None:
                observer.before(chosen, options)
            num = len(enabled)
            if at < num:
                del enabled[at]
            elif at < num + len(external):
                del external[at - num]
            order.append(chosen.index)
            chosen.fire()
            if observer is not None:
                observer.after(chosen)
            if done():
                return "done"
            if len(order) >= end:
                end = self.budget.check(self)
                if not end:
                    return "endless"
                choose = self.choose

    def _with_clock(self) -> list[Participant]:
        """Return all options, the clock among them if it may move on."""
        options = self.enabled + self.external
        when = self.next_when()
        if when is None:
            return options
        if not self._holds_callbacks:
            if self.enabled and when > self.early_until:
                return options
            if any(op.deadline < when for op in self.external):  # type: ignore[attr-defined]
                return options
        options.append(self.clock)
        return options

    def next_when(self) -> float | None:
        """Return when the next timer is due; None without timers."""
        timers = self._timers
        while timers:
            timer = timers[0][2]
            if not timer.is_off():
                return timers[0][0]
            heappop(timers)
        return None

    def jump(self, when: float, *, is_early: bool = False) -> None:
        """Move the clock, early where tasks are ready, and make what is due then an option.

        Timers fire in the order of their times, also where the clock has passed several at once:
        those of a later instant have to wait for those of an earlier one.
        """
        self.now = max(self.now, when)
        if self.moved is not None:
            self.moved(self.now)
        if not is_early:
            self.early_until = self.now + JITTER_S
        limit = self.now + SAME_INSTANT_S
        timers = self._timers
        while timers and timers[0][0] <= limit:
            timer = heappop(timers)[2]
            if type(timer) is SimTimer:
                self._overdue.append(timer)
            else:
                timer.become_due(self)
        self._release()

    def _release(self) -> None:
        """Make options of the overdue timers of the first instant."""
        overdue = self._overdue
        while overdue and (not self.num_due or overdue[0].when() <= self._due_at + SAME_INSTANT_S):
            timer = overdue.popleft()
            if not timer.is_off():
                if not self.num_due:
                    self._due_at = timer.when()
                timer.become_due(self)

    def no_longer_due(self) -> None:
        """Note that a due timer has fired or was cancelled."""
        self.num_due -= 1
        self._release()

    # ---- what asyncio asks of a loop -------------------------------------------------------

    def start(self) -> None:
        """Make this the running loop of the thread."""
        self._thread_id = threading.get_ident()
        self._old_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook,
            finalizer=self._asyncgen_finalizer_hook,
        )
        events._set_running_loop(self)

    def finish(self) -> None:
        """Stop being the running loop, for ever."""
        self.forget_network()
        events._set_running_loop(None)
        sys.set_asyncgen_hooks(*self._old_hooks)
        self._thread_id = None  # type: ignore[assignment]  # as in the base class
        self.enabled.clear()
        self.external.clear()
        self.waiting.clear()
        self._timers.clear()
        self._overdue.clear()
        self._closed = True
        self.sim_tasks = TaskList()  # these close cycles, which only the collector could free
        self.executors = self.observer = self.make_network = self.moved = None
        self.callbacks = self.clock = None  # type: ignore[assignment]

    @property
    def open_generators(self) -> list[AsyncGenerator[Any, Any]]:
        """Asynchronous generators that were begun and not ended, in the order of their making."""
        if self._generators is None:
            return []
        return [agen for agen in self._generators.values() if getattr(agen, "ag_frame", None)]

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        if self._generators is None:
            self._generators = WeakValueDictionary()
        self._num_generators += 1
        self._generators[self._num_generators] = agen

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self._end_generator, agen)

    async def shutdown_asyncgens(self) -> None:
        """Close all asynchronous generators, in the order of their making."""
        closing = self.open_generators
        closed = await asyncio.gather(*[agen.aclose() for agen in closing], return_exceptions=True)
        for agen, error in zip(closing, closed, strict=True):
            if isinstance(error, Exception):
                text = f"an error occurred during closing of asynchronous generator {agen!r}"
                context = {"message": text, "exception": error, "asyncgen": agen}
                self.call_exception_handler(context)

    def _end_generator(self, agen: AsyncGenerator[Any, Any]) -> None:
        task = self.create_task(agen.aclose())
        if type(task) is SimTask:
            task.ends_with_run = True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled exception and log it, unless the program has a handler of its own."""
        if self._exception_handler is not None:  # type: ignore[attr-defined]
            super().call_exception_handler(context)
        elif not self._closed:
            self.complaints.append(context)
            if self.is_logging and logger.hasHandlers():  # else every schedule would print it
                self.default_exception_handler(context)

    def _timer_handle_cancelled(self, handle: Any) -> None:
        if handle.is_due:
            handle.is_due = False
            self.enabled[:] = [each for each in self.enabled if each is not handle]
            self.no_longer_due()

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """End the simulated default pool."""
        self._executor_shutdown_called = True


@final
class Budget:
    """Decides when a run has taken too many steps.

    Virtual time does not pass while anything can run, so a program that spins until some time has
    passed would spin for ever. After `SPIN_STEPS` steps at one instant the clock moves on, to the
    next timer or by a doubling number of seconds; and again after half as many as long as it is a
    timer that is reached, since a program may poll until many of them have fired. From then on the
    run keeps asyncio's own order, in which whatever is due or ready has its turn: a schedule that
    favours what spins would starve a program that ends on every real loop.

    Args:
        max_steps: Steps after which a run is endless.

    Attributes:
        has_decided: Whether asyncio's own order was kept where there was a choice.
    """

    __slots__ = ("_jump_s", "_last_now", "_spin", "has_decided", "max_steps")

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.max_steps = max_steps
        self.has_decided = False
        self._last_now = START_S
        self._jump_s = 1.0
        self._spin = SPIN_STEPS

    @property
    def first_check(self) -> int:
        """Number of steps at which to ask first."""
        return min(SPIN_STEPS, self.max_steps)

    def check(self, loop: SimLoop) -> int:
        """Return the number of steps at which to ask again; 0 when the run is endless."""
        steps = len(loop.order)
        if steps >= self.max_steps:
            return 0
        if loop.now == self._last_now:
            loop.choose = self._keep_order
            when = loop.next_when()
            if when is None:
                when = loop.now + self._jump_s
                self._jump_s *= 2
            else:
                self._spin = max(self._spin // 2, MIN_SPIN_STEPS)
            loop.jump(when)
        self._last_now = loop.now
        return min(steps + self._spin, self.max_steps)

    def _keep_order(self, options: list[Participant]) -> int:
        self.has_decided = True
        return fifo(options)
