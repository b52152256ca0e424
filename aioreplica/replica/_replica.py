"""One replica of one run: the mutable state that its group keeps of it, and its random streams."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Sequence
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any, final

import numpy as np

from ..devices import Op
from ._meeting import Call, SyncGroup
from ._messages import Transfer


@final
class Replica:
    """State of one replica in one run.

    Attributes:
        replica_id: Index in the sync group.
        work: The replica's task; in a run of a plain function, the future of its op;
            None before the start and after the run.
        op: The op of a plain function's run, else None.
        waiting: The task that waits in a collective, the replica's own or a child; else None.
        cancels_before: How often that task had been cancelled when it began to wait.
        sequence: Number of the replica's latest call among all replicas.
        sequences: The same for groups of some replicas.
        unawaited: Calls whose coroutine has not been started.
        started: Calls made with a handle that has not been awaited, as the keys.
        was_cancelled: Whether the group cancelled it; what it raises then is not a failure.
        thread_id: The device thread that a plain function runs on; None elsewhere.
        steps_done: In a device loop, how many of its steps are complete.
        activity: What the replica waits for outside every collective, for tables; else None.
        is_over: Whether the run has ended, and with it everything that belongs to it.
        streams: Random streams that go on within a step, by the step and whose they are.
    """

    __slots__ = (
        "activity", "cancels_before", "is_over", "op", "replica_id", "sequence", "sequences",
        "started", "steps_done", "streams", "thread_id", "unawaited", "waiting", "was_cancelled",
        "work",
    )  # fmt: skip

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.work: asyncio.Future[Any] | None = None  # Any: step functions return everything
        self.op: Op[Any] | None = None
        self.waiting: asyncio.Task[object] | None = None
        self.cancels_before = 0
        self.sequence = 0
        self.sequences: dict[SyncGroup, int] = {}
        self.unawaited: dict[Call | Transfer, Coroutine[object, None, Any]] = {}
        self.started: dict[Call, None] = {}
        self.was_cancelled = False
        self.thread_id: int | None = None
        self.steps_done = 0
        self.activity: str | None = None
        self.is_over = False
        self.streams: dict[tuple[int, object], np.random.Generator] = {}

    def cancel(self) -> None:
        """Cancel the replica where it waits; an op that has started runs to its end."""
        if self.work is None or self.work.done():
            return
        self.was_cancelled = True
        if self.op is not None:
            if self.op.withdraw():
                self.op.cancel()
            return
        self.work.cancel()

    def next_in(self, group: SyncGroup) -> int:
        """Number the next call in a group."""
        if not group.is_partial:
            self.sequence += 1
            return self.sequence
        number = self.sequences[group] = self.sequences.get(group, 0) + 1
        return number

    def not_awaited(self, everyone: SyncGroup) -> list[str]:
        """Name the calls whose coroutine has not been started so far.

        What is not a collective may be given up before that: nobody waits for it.

        Args:
            everyone: All replicas of the run.
        """
        return [
            f"replica {everyone.global_id(self.replica_id)}: {call.describe()} at {call.site}"
            for call, coroutine in self.unawaited.items()
            if call.sequence or getcoroutinestate(coroutine) != CORO_CLOSED
        ]

    def given_up(self) -> Call | None:
        """Return a collective that was cancelled before its first step, if there is one."""
        for call, coroutine in self.unawaited.items():
            if call.sequence and getcoroutinestate(coroutine) == CORO_CLOSED:
                assert isinstance(call, Call)  # others have no number before their first step
                return call
        return None

    def close_unawaited(self) -> None:
        """Close what will never be awaited, once the replica has ended."""
        for coroutine in self.unawaited.values():
            coroutine.close()
        self.unawaited.clear()

    def stream(
        self, step: int, owner: object, make: Callable[[], np.random.Generator]
    ) -> np.random.Generator:
        """Return an owner's random stream in a step, which goes on from where it was left."""
        found = self.streams.get((step, owner))
        if found is not None:
            return found
        for key in list(self.streams):  # an op and the task may both be here
            if key[0] != step:
                self.streams.pop(key, None)
        return self.streams.setdefault((step, owner), make())

    def forget(self) -> None:
        """Let go of the ended task and of what was started."""
        self.work = self.op = None
        self.started.clear()
        self.streams.clear()
        self.is_over = True


def who_withdrew(replicas: Sequence[Replica], woken: Replica) -> Replica:
    """Return whose cancellation cancelled the future that all waiting tasks share.

    Each of them wakes with a CancelledError. The one whose own count of cancellations has grown is
    the cause; else one that had been cancelled just before it arrived.
    """
    waiting = [(each, each.waiting.cancelling()) for each in replicas if each.waiting is not None]
    grown = [replica for replica, cancels in waiting if cancels > replica.cancels_before]
    earlier = [replica for replica, cancels in waiting if cancels]
    return (grown or earlier or [woken])[0]


def warn_never_awaited(replicas: Sequence[Replica], everyone: SyncGroup) -> None:
    """Warn of every handle whose result was not asked for, once per call site.

    Args:
        replicas: Those of this worker.
        everyone: All replicas of the run.

    Warns:
        RuntimeWarning: At the line of the call.
    """
    found: dict[tuple[str, int, str], list[int]] = {}
    for replica in replicas:
        for call in replica.started:
            where = (call.file, call.line, call.describe())
            found.setdefault(where, []).append(everyone.global_id(replica.replica_id))
    for (file, line, text), ids in found.items():
        who = f"replica{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
        warnings.warn_explicit(
            f"The handle of {text}, called at {file}:{line} in {who}, was never awaited, so its "
            "result is lost. Await it, or call handle.discard() if it is not wanted.",
            RuntimeWarning,
            file,
            line,
        )


_SHARED, _REPLICA = 0, 1  # kinds of random streams


def random_stream(seed: int, step: int, replica_id: int | None, name: str) -> np.random.Generator:
    """Return the generator of (seed, step, replica, name); None is the stream all share.

    Equal keys give equal numbers, whatever else was drawn. Different keys are independent.

    Raises:
        TypeError: If `name` is not a str.

    Source:
        numpy.random.SeedSequence, O'Neill's seed_seq hashing of the whole key.

    Example:
        >>> a = random_stream(0, 3, 1, "dropout")
        >>> b = random_stream(0, 3, 1, "dropout")
        >>> a.random() == b.random()
        True
    """
    if not isinstance(name, str):
        raise TypeError(f"A random stream needs a str as its name, got {name!r}.")
    kind = (_SHARED, 0) if replica_id is None else (_REPLICA, replica_id)
    key = (seed, step, *kind, *name.encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
