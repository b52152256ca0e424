"""Threads that a program or a library starts itself, and event loops that run in such threads.

A started thread is an op of a pool without bounds, on a thread of its own (`_threads.py`): it goes
on when the schedule lets it, until it waits or ends. An event loop in it is asyncio's own, over a
selector that waits in virtual time; each round of it is a step of the schedule, and its tasks keep
asyncio's order.
"""

from __future__ import annotations

# mypy: disable-error-code="override"
# The methods of a loop are overridden with plainer signatures.
import asyncio
import contextvars
import inspect
import math
import queue
import selectors
import threading
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

from ._forbidden import ForbiddenIO, refuse
from ._locks import class_in_run
from ._participants import TaskList
from ._pools import PoolOp
from ._ready import Ready, SimSelector
from ._simulation import Patches
from ._streams import StreamLoop

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._simulation import Simulation

STARTED_POOL: Final = "threads"
STARTED_WORKERS: Final = 1_000_000
DONE: Final = "_aioreplica_done"
SimpleQueue: Final[Any] = queue.SimpleQueue
PurePythonQueue: Final[Any] = queue._PySimpleQueue  # type: ignore[attr-defined]
real_new_event_loop: Final = asyncio.new_event_loop


@final
class StartedOp(PoolOp):
    """A thread that was started."""

    __slots__ = ()

    @property
    def thread(self) -> threading.Thread:
        """Thread object that the program has made."""
        thread: threading.Thread = self.fn.__self__  # type: ignore[attr-defined]
        return thread

    @property
    def is_daemon(self) -> bool:
        """True if it may be left behind."""
        return bool(getattr(getattr(self.fn, "__self__", None), "daemon", False))

    def perform(self, context: contextvars.Context) -> None:
        """Run the thread, in an empty context as a real one."""
        super().perform(contextvars.Context())

    def describe(self) -> str:
        """Name it for stories."""
        started = getattr(self.fn, "__self__", None)
        return f"thread {started.name!r}" if started is not None else "a thread"


def start(simulation: Simulation, thread: threading.Thread) -> None:
    """Let a thread be started by the schedule."""
    pools = simulation.pools
    if pools.threads is None:
        pools.needs_threads = True
        raise asyncio.CancelledError("The program starts a thread, so the schedule begins again.")
    if thread._started.is_set():  # type: ignore[attr-defined]
        raise RuntimeError("threads can only be started once")
    done = threading.Event()
    setattr(thread, DONE, done)
    thread._started.set()  # type: ignore[attr-defined]
    pool = pools.pool_named(STARTED_POOL, STARTED_WORKERS)
    future = simulation.loop.create_future()
    body = _Body(simulation, thread, done)
    pool.put(StartedOp(pool, body.run, (), future))


@final
class _Body:
    """Body of a started thread."""

    def __init__(
        self, simulation: Simulation, thread: threading.Thread, done: threading.Event
    ) -> None:
        self._simulation = simulation
        self._thread = thread
        self._done = done
        self.name = thread.name
        self.daemon = thread.daemon

    def run(self) -> None:
        """Run the thread as `threading` does: known by its name, its error reported."""
        thread, ident = self._thread, threading.get_ident()
        known = threading._active  # type: ignore[attr-defined]
        outer = known.get(ident)
        known[ident] = thread
        thread._ident = ident  # type: ignore[attr-defined]
        try:
            thread.run()
        except SystemExit:
            pass
        except asyncio.CancelledError as error:
            op = self._simulation.pools.current_op
            if op is None or op.run is None or not op.run.thread.is_doomed:
                self._complain(error)
        except Exception as error:  # noqa: BLE001 - reported, as `threading` does
            self._complain(error)
        finally:
            known[ident] = outer
            _mark_as_ended(thread)
            self._done.set()

    def _complain(self, error: BaseException) -> None:
        context = {"message": f"exception in thread {self.name!r}", "exception": error}
        self._simulation.loop.call_exception_handler(context)


def _mark_as_ended(thread: Any) -> None:
    """Let `threading` itself know it too, for who asks after the run."""
    make_handle = getattr(threading, "_make_thread_handle", None)  # from Python 3.13 on
    if make_handle is None:
        thread._is_stopped = True
    else:  # its own was never started, and so cannot end
        thread._handle = make_handle(thread.ident)
        thread._handle._set_done()


# ---- event loops in threads ---------------------------------------------------------------------


@final
class ThreadSelector(SimSelector):
    """Selector of a loop in a thread; `select` suspends the op.

    Args:
        simulation: Of the run.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.open_network())
        self._simulation = simulation
        self._fired: list[Ready] = []
        self._reported: list[Ready] = []
        self._is_woken = False
        self._sleeper: Any = None

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """Wait until a socket is ready, another thread wakes the loop or the time has passed."""
        op = self._simulation.pools.current_op
        if op is None:
            refuse("An event loop inside the event loop", "Run it in a thread.")
        run = op.on_thread()
        for ready in self._reported:
            ready.rest()
        self._reported = []
        self._simulation.pools.catch_up()
        if self._fired or self._is_woken or (timeout is not None and timeout <= 0):
            run.give_way()
        else:
            self._sleeper = run
            try:
                run.wait(None, timeout)
            finally:
                self._sleeper = None
        self._is_woken = False
        self._reported, self._fired = self._fired, []
        return [
            (key, selectors.EVENT_WRITE if ready.is_write else selectors.EVENT_READ)
            for ready in self._reported
            if (key := self.keys.get(ready.sock.number)) is not None
        ]

    def notify(self, ready: Ready) -> None:
        """Wake the loop for a socket."""
        self._fired.append(ready)
        self.wake()

    def wake(self) -> None:
        """Wake the loop."""
        self._is_woken = True
        if self._sleeper is not None:
            self._sleeper.wake()


@final
class ThreadLoop(StreamLoop, ForbiddenIO, asyncio.SelectorEventLoop):
    """The event loop of a simulated thread.

    Args:
        simulation: Of the run.

    Attributes:
        sim_tasks: Its tasks, in the order of their making.
    """

    run_until_complete = asyncio.SelectorEventLoop.run_until_complete
    run_forever = asyncio.SelectorEventLoop.run_forever

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.sim_tasks = TaskList()
        self._parent: SimLoop = simulation.loop
        selector: Any = ThreadSelector(simulation)
        super().__init__(selector)
        self._selector = selector

    def new_index(self) -> int:
        """Number the next participant of the run."""
        return self._parent.new_index()

    def time(self) -> float:
        """Return virtual time, in seconds, with what a step of a task has slept."""
        return self._parent.now + self._simulation.pools.slept_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Register a callback; another thread may do so by completing a future."""
        handle = super().call_soon(callback, *args, context=context)
        self._write_to_self()
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Register a callback for a moment of virtual time; at infinity it never comes."""
        if when < math.inf:
            return super().call_at(when, callback, *args, context=context)
        loop: Any = self
        return asyncio.TimerHandle(when, callback, args, loop, context)

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Register a callback for another thread, once the time has passed that it has slept."""
        self._simulation.pools.catch_up()
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> Any:
        """Submit a call to the simulated twin of an executor."""
        return self._simulation.pools.submit_call(executor, func, args, self)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """End the simulated default pool."""
        self._executor_shutdown_called = True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an unhandled exception where those of the run are."""
        if self._exception_handler is not None:  # type: ignore[attr-defined]
            super().call_exception_handler(context)
        else:
            self._parent.call_exception_handler(context)

    def close(self) -> None:
        """Close it; what its tasks did not finish is nobody's any more."""
        for task in self.sim_tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = None if task.done() else task.get_coro()
            if (
                inspect.iscoroutine(coroutine)
                and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
            ):
                coroutine.close()  # the schedule was given up before it began
        self.sim_tasks = TaskList()
        if not self.is_running() and not self.is_closed():
            asyncio.BaseEventLoop.close(self)
            self._selector.close()

    def _make_self_pipe(self) -> None:
        """Nothing sleeps that a socket would have to wake."""

    def _write_to_self(self) -> None:
        self._selector.wake()


def thread_patches(simulation: Simulation) -> Patches:
    """Return what to replace in `threading`, `queue` and asyncio."""
    thread, here = threading.Thread, simulation.is_here
    real_start, real_join, real_is_alive = thread.start, thread.join, thread.is_alive

    def start_it(self: Any) -> None:
        if here():
            start(simulation, self)
        else:
            real_start(self)

    def join(self: Any, timeout: float | None = None) -> None:
        done = vars(self).get(DONE)
        if done is None or not here():
            real_join(self, timeout)
        elif threading.current_thread() is self:
            raise RuntimeError("cannot join current thread")
        else:
            done.wait(timeout)

    def is_alive(self: Any) -> bool:
        done = vars(self).get(DONE)
        return real_is_alive(self) if done is None else not done.is_set()

    def new_event_loop() -> Any:
        return ThreadLoop(simulation) if here() else real_new_event_loop()

    def make_by_policy(self: object) -> object:
        return ThreadLoop(simulation) if here() else real_make(self)

    def begin_loop(self: Any, selector: object = None) -> None:
        if here() and type(self) is not ThreadLoop:
            self._closed = True  # for its finaliser
            refuse(
                f"An event loop of {type(self).__qualname__}, made by its class,",
                "Call asyncio.new_event_loop() or asyncio.run().",
            )
        real_begin(self, selector)

    real_begin: Any = BaseSelectorEventLoop.__init__
    policy: Any = vars(asyncio.events).get("BaseDefaultEventLoopPolicy")
    policy = policy or vars(asyncio.events)["_BaseDefaultEventLoopPolicy"]  # from Python 3.14 on
    real_make = policy.new_event_loop
    return [
        (thread, "start", start_it),
        (thread, "join", join),
        (thread, "is_alive", is_alive),
        (queue, "SimpleQueue", class_in_run(simulation, SimpleQueue, PurePythonQueue)),
        (asyncio, "new_event_loop", new_event_loop),
        (asyncio.events, "new_event_loop", new_event_loop),
        (policy, "new_event_loop", make_by_policy),
        (BaseSelectorEventLoop, "__init__", begin_loop),
    ]
