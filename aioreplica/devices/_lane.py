"""A lane: the threads of one device, first in first out.

Threads are daemons made at the first op, at a lower OS priority than the event loop's, and end
at a stop sentinel. An op that never ends therefore does not keep the process alive.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, final

from ..context import REGISTRY
from ..errors import DeviceError
from ._op import AnyOp, Op, OpProcess, OpTracker, observers_of_all
from ._streams import DeviceStreams

if TYPE_CHECKING:
    from ..tree import Array

T = TypeVar("T")
STOPPED_S = 0.1  # how often a thread that wants its lane back checks whether it was stopped


@final
@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """Counters and state of a device's process.

    Attributes:
        pid: Its process id; None before the first op, and after it has ended.
        deaths: How many processes of the device have ended without being asked to.
        bytes_sent: Bytes sent to it, copies into shared memory included.
        bytes_received: Bytes that came back.
        send_s: Seconds spent making messages and copying arrays for it.
        memory_bytes: Its resident memory; None if that is not known.
    """

    pid: int | None
    deaths: int
    bytes_sent: int
    bytes_received: int
    send_s: float
    memory_bytes: int | None


@final
class Publication(NamedTuple):
    """A value of a variable, or of something else that ops read by name.

    Attributes:
        key: Tells it from all other values of the thing.
        num_writes: How many writes it has seen.
        array: The value, read-only.
    """

    key: tuple[int, Hashable]
    num_writes: int
    array: Array


class LaneProcess(OpProcess, Protocol):
    """A process that runs the ops of a lane."""

    def stop(self) -> None:
        """End soon; from any thread."""

    def close(self) -> None:
        """End now; in the thread of the lane."""

    def statistics(self) -> ProcessStatistics:
        """Return its counts; from any thread."""


@final
@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Counters and state of a lane.

    Attributes:
        queued: Ops that no thread has taken yet, withdrawn ones included.
        running: Ops that run now.
        done: Ops that have ended since the lane was made.
        busy_s: Seconds spent inside ops, summed over the threads.
        process: Its device process; None for a lane that runs ops in its threads.
    """

    queued: int
    running: int
    done: int
    busy_s: float
    process: ProcessStatistics | None = None

    @property
    def worker(self) -> ProcessStatistics | None:
        """The same as `process`, which is the name to use."""
        return self.process


@final
class Lane:
    """Runs the ops of one device in the order they were put.

    Args:
        name: Device name, used for the threads too.
        num_streams: How many threads serve the queue; with 1 (a device) ops never overlap.
        nice: Added to the threads' OS niceness; ignored where the system refuses.
        background: Whether the threads run only where a core has nothing else to do; where the
            system refuses, they are as nice as without it.
        process: What runs the ops; None runs them in the threads.
        streams: What the threads enqueue on; None where functions end with their work.
    """

    def __init__(
        self,
        name: str,
        *,
        num_streams: int = 1,
        nice: int = 5,
        background: bool = False,
        process: LaneProcess | None = None,
        streams: DeviceStreams | None = None,
    ) -> None:
        self.name = name
        self.streams = streams
        self._process = process
        self._observers = observers_of_all()  # for ops outside every run
        self._num_streams = num_streams
        self._nice = nice
        self._background = background
        self._queue: SimpleQueue[AnyOp | _Handover | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._serving = 0  # threads that take ops; those that lend the lane do not count
        self._num_open = 0  # ops for these, queued or running; counted where threads are several
        self._past = _Stream()  # what threads did that have ended
        self._lenders: list[OpTracker] = []  # runs with an op that lends the lane
        self._held_back: deque[AnyOp] = deque()  # ops of those runs, until that op has ended

    def put(self, op: AnyOp) -> None:
        """Enqueue an op; makes a thread if all are busy and another one is allowed.

        Raises:
            DeviceError: If the lane was stopped: the op would never run.
        """
        if self._stopped:
            raise self._given_back()
        tracker = op.tracker
        observers = self._observers if tracker is None else tracker.observers
        if (tell := observers.op_queued) is not None:
            tell(op, self.name)
        if self._num_streams > 1:
            with self._lock:
                self._num_open += 1
        self._queue.put(op)
        if self._serving < self._num_streams and self._serving < max(self._num_open, 1):
            self._start_thread(op)
        # Not under the lock: `put` is on the path of every op, and a lane is stopped once.
        if self._stopped and op.withdraw():  # it may have landed behind the stop sentinels
            raise self._given_back()

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let other ops run while the calling thread, which runs one, waits for something.

        Another thread takes over if there is an op to run. The caller goes on once the lane is
        free again: after the op that runs by then and those put before the wait was over. Ops of
        the caller's own run are held back until its op has ended, so their order stays.
        """
        tracker = self._serving_stream().tracker
        with self._lock:
            self._serving -= 1
            self._num_open -= 1
            if tracker is not None:
                self._lenders.append(tracker)
            has_queued = not self._queue.empty()
        if has_queued:
            self._start_thread(None)
        try:
            yield
        finally:
            self._take_back()
            if tracker is not None:
                with self._lock:
                    self._lenders.remove(tracker)
                    is_waited_for = self._num_streams > 1 and self._queue_held_back()
                if is_waited_for:
                    self._start_thread(None)

    def _queue_held_back(self) -> bool:
        """Queue what may run beside the caller again; tell if it needs another thread for that.

        Threads that are idle wait at the queue. After a stop sentinel they would not find it: then
        the caller runs it after its op.
        """
        if self._stopped:
            return False
        for op in [op for op in self._held_back if op.tracker not in self._lenders]:
            self._held_back.remove(op)
            self._num_open += 1
            self._queue.put(op)
        return self._serving < self._num_open

    def _serving_stream(self) -> _Stream:
        return _serving_threads()[threading.get_ident()][1]

    def _take_back(self) -> None:
        with self._lock:
            # Nobody took over meanwhile: the thread goes on without a trip through the queue.
            if self._serving < self._num_streams:
                self._serving += 1
                self._num_open += 1
                return
            handover = _Handover()
            self._queue.put(handover)
        # Polled, as no one wakes it when the other thread's op hangs and the program ends.
        while not handover.is_done.wait(STOPPED_S):
            if self._stopped:  # then the op of the other thread may never end
                return

    def stop(self) -> None:
        """Let the threads end after what is queued; idempotent, does not wait."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                for _ in self._threads:
                    self._queue.put(None)
                if self._process is not None:
                    self._process.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, at most `timeout_s` seconds in all."""
        deadline = monotonic() + timeout_s
        for thread in self._threads.copy():  # one that gives the lane back is taken out meanwhile
            thread.join(max(0.0, deadline - monotonic()))

    def statistics(self) -> LaneStatistics:
        """Return counts of queued, running and finished ops, and the busy time."""
        with self._lock:  # a thread that ends is one of the streams, or in the past
            streams = self._streams.copy()
            done, busy_s = self._past.num_done, self._past.busy_s
        return LaneStatistics(
            queued=self._queue.qsize() + len(self._held_back),
            running=sum(stream.is_running for stream in streams),
            done=done + sum(stream.num_done for stream in streams),
            busy_s=busy_s + sum(stream.busy_s for stream in streams),
            process=None if self._process is None else self._process.statistics(),
        )

    def __repr__(self) -> str:
        s = self.statistics()
        return f"<Lane {self.name} | {s.running} running, {s.queued} queued, {s.done} done>"

    def _start_thread(self, op: AnyOp | None) -> None:
        with self._lock:
            if self._serving >= self._num_streams or self._stopped:
                return
            stream = _Stream()
            name = f"aioreplica {self.name}"
            thread = threading.Thread(target=self._serve, args=(stream,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if op is None:  # no thread takes over: the queued ops wait for the caller
                    return
                op.withdraw()
                raise
            self._serving += 1
            self._streams.append(stream)
            self._threads.append(thread)

    def _given_back(self) -> DeviceError:
        return DeviceError(
            f"Device {self.name} was given back, so it runs no more ops. Use a strategy that "
            "is open, and do not start ops while the interpreter exits.",
            device=self.name,
        )

    def _serve(self, stream: _Stream) -> None:
        _lower_priority(self._nice, self._background)
        _serving_threads()[threading.get_ident()] = self, stream
        name, take, is_counted = self.name, self._queue.get, self._num_streams > 1
        runner: OpProcess | None = self._process or self.streams
        while True:
            op = (self._held_back_op() if self._held_back else None) or take()
            if type(op) is not Op:
                self._end(stream, op)
                return
            tracker = op.tracker
            # The run that lends this lane has an op in the middle of its call; a later one of the
            # same run would overtake it.
            if self._lenders and tracker in self._lenders:
                with self._lock:  # another thread of the lane may walk through them
                    self._held_back.append(op)
                    self._num_open -= 1
                continue
            # It was withdrawn: a cancelled op stays in the queue, which has no removal.
            if not op.claim():
                del op  # an idle thread must not keep the last op's arrays alive
                if is_counted:
                    self._close_one()
                continue
            stream.tracker = tracker
            stream.is_running = True
            observers = self._observers if tracker is None else tracker.observers
            if (tell := observers.op_started) is not None:
                tell(op, name)
            if runner is None:
                op.run_claimed()
            else:
                op.run_claimed_by(runner)
            if (tell := observers.op_ended) is not None:
                tell(op, name)
            stream.is_running = False
            stream.num_done += 1
            stream.busy_s += op.seconds
            if is_counted:  # before the next op may come, which needs no further thread then
                self._close_one()
            completions = op.completions
            completions.add(op)
            del op  # before its awaiter learns that it is done: its result may be used again
            if not completions.is_armed:
                completions.wake()

    def _end(self, stream: _Stream, handover: _Handover | None) -> None:
        """End the calling thread, at a stop sentinel or because another takes the lane back."""
        del _serving_threads()[threading.get_ident()]
        if handover is None:
            if self._process is not None:
                self._process.close()
            return
        with self._lock:
            self._threads.remove(threading.current_thread())
            self._streams.remove(stream)
            self._past.num_done += stream.num_done
            self._past.busy_s += stream.busy_s
            self._num_open += 1
        handover.is_done.set()  # the one that takes over counts in its place

    def _held_back_op(self) -> AnyOp | None:
        """Take the first op whose run lends the lane no longer, if there is one."""
        with self._lock:
            for op in self._held_back:
                if op.tracker not in self._lenders:
                    self._held_back.remove(op)
                    self._num_open += 1
                    return op
        return None

    def _close_one(self) -> None:
        with self._lock:
            self._num_open -= 1


@final
class _Handover:
    """Asks the thread that finds it in the queue to give the lane back and end."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = threading.Event()


@final
class _Stream:
    """The counts of one thread, written by that thread alone, so without a lock."""

    __slots__ = ("busy_s", "is_running", "num_done", "tracker")

    def __init__(self) -> None:
        self.tracker: OpTracker | None = None  # of the run whose op it runs or ran last
        self.is_running = False
        self.num_done = 0
        self.busy_s = 0.0


def served_lane() -> Lane | None:
    """Return the lane whose ops the calling thread runs, None elsewhere."""
    lane, _ = _serving_threads().get(threading.get_ident(), (None, None))
    return lane


def served_streams() -> DeviceStreams | None:
    """Return the streams of the lane whose ops the calling thread runs, None if it has none."""
    lane = served_lane()
    return None if lane is None else lane.streams


def synchronise_lane(made: object = None) -> None:
    """Wait for what the calling thread has enqueued on its lane's streams; nothing elsewhere.

    Args:
        made: What others get of the thread. The event loop may read it when the thread has gone on
            and let go of it: its memory is given back behind the default stream, too.
    """
    streams = served_streams()
    if streams is not None:
        streams.synchronise(made)


def follow_others(value: T) -> T:
    """Return what other threads have made, for the streams of the calling thread's lane."""
    streams = served_streams()
    if streams is not None:
        streams.follow(value)
    return value


def forget_other_threads() -> None:
    """Forget, in the child of a fork, the threads that it lacks: their ids are used again."""
    serving = _serving_threads()
    own = serving.get(threading.get_ident())
    serving.clear()
    if own is not None:
        serving[threading.get_ident()] = own


def _serving_threads() -> dict[int, tuple[Lane, _Stream]]:
    """Return which lane each thread serves, by thread id; each entry is its thread's own."""
    return REGISTRY.once("serving_threads", dict[int, tuple[Lane, _Stream]])


def _lower_priority(nice: int, background: bool) -> None:
    """Make the calling thread nicer; Linux counts niceness and policy per thread."""
    refused = AttributeError, OSError  # by the system, or not there
    if background:
        with suppress(*refused):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
    if nice:
        with suppress(*refused):
            thread = threading.get_native_id()
            current = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, current + nice)
