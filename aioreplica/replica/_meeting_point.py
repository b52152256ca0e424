"""Meeting point of the replicas of one run: they arrive, one merge runs, all are released.

Tasks share one future per generation (`TaskWaiter`, the hot path), threads park at a gate each
(`_device_waiters.py`). The call that completes a generation merges it at once. Only a merge that
awaits has a task of its own (`_pending.py`). Cancelling one waiting task cancels the future that
all share; as the others can then never meet it, that ends the run (`MeetingPoint.withdrew`).

Invariants:
    * Where threads meet, the rendezvous is touched under `lock` only, by threads and by the event
      loop alike; no merge and no function of the user runs under it.
    * A gate is opened once for each time its replica is in `parked`, by the code that takes it out.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import current_task
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, final
from weakref import proxy

from ..context import PLACE, Place
from ..devices import (
    CompletionQueue,
    Gate,
    Op,
    OpTracker,
    name_of_served_lane,
    require_loop,
    synchronise_lane,
)
from ..errors import ReplicaRow
from ..telemetry import Observers
from ._errors import held_by_op_error, misuse_error, two_at_once_error
from ._failure import add_note_once
from ._meeting import AcrossWorkers, Call, Generation, Parts, SyncGroup, WaitedFor
from ._messages import Transfer
from ._pending import Pending, Reading, once_over
from ._reductions import STARTED_ALL_REDUCE
from ._rendezvous import Mismatch, Rendezvous, ReplicaState
from ._replica import Replica, who_withdrew
from ._stall import StartedWaits

if TYPE_CHECKING:
    from ._group import ReplicaGroup

NO_LOCK = nullcontext()


@final
class MeetingPoint:
    """Meeting point of the replicas of one run.

    Args:
        replicas: The state of each replica.
        everyone: The group of all of them.
        loop: The event loop of the run; None outside every run, where one replica meets itself.
        observers: Who is told of calls, waits and merges.
        now: The clock, in seconds.
        run: What ends the run.

    Attributes:
        replicas: As given.
        is_aborted: Set by the run when it ends early; every later await here raises
            CancelledError.
        num_merges: How many merges have ended, a sign of progress.
        merging: Whether each merge that takes longer than a step of its last replica has begun.
        unseen: What started collectives raised, as long as no handle was asked for it.
        lock: Guards the rendezvous where device threads meet; None where tasks do.
        parked: The gates of the replicas whose device threads wait.
        on_abort: What else is called when the run is aborted: on any thread, perhaps repeatedly.
        host_calls: Cancel what the event loop does for device threads, on the loop.
        has_streams: Whether threads meet whose functions return before their work is done.
        is_busy: Whether a program runs, or is compiled, whose progress cannot be seen.
    """

    has_streams = is_busy = False

    def __init__(
        self,
        replicas: Sequence[Replica],
        everyone: SyncGroup,
        loop: asyncio.AbstractEventLoop | None,
        observers: Observers,
        now: Callable[[], float],
        run: ReplicaGroup,
    ) -> None:
        self.is_aborted = False
        self.num_merges = 0
        self.merging: dict[Generation, bool] = {}
        self.unseen: dict[Generation, BaseException] = {}
        self.everyone = everyone
        self.rendezvous = Rendezvous(everyone.device_names, everyone)
        self.loop = loop
        self.observers = observers
        self.now = now
        self.run: ReplicaGroup = proxy(run)  # the run holds the point: no circle
        self.lock = Lock() if everyone.is_blocking else None
        self.parked: dict[int, Gate] = {}
        self.replicas = replicas
        self.on_abort: list[Callable[[], None]] = []
        self.host_calls: dict[Callable[[], None], None] = {}
        self._started: StartedWaits | None = None

    # ---- arriving ------------------------------------------------------------------------

    def start(self, replica: Replica, call: Call) -> Generation:
        """Bring a call to the rendezvous without waiting there; on the event loop.

        Raises:
            CancelledError: If the run was aborted, or is now.
        """
        if self.is_aborted:
            raise asyncio.CancelledError
        opened = call.group.open.get(call.sequence)
        if opened is not None and opened.waiter is not None and opened.waiter.cancelled():
            self.withdrew(replica, opened)  # given up by a replica that does not know it yet
            raise asyncio.CancelledError
        decided = self.rendezvous.arrive(replica.replica_id, call, self.now(), waits=False)
        generation = decided if type(decided) is Generation else self.cannot_meet(decided, call)
        if not call.position:
            call.context = copy_context()
        if generation.waiter is None and (generation.missing or self.loop is None):
            self.new_waiter(generation, call)
        if not generation.missing:
            self.merge(generation)
        return generation

    def cannot_meet(self, decided: Generation | Mismatch, call: Call) -> Generation:
        """End the run for a mismatch; return the call's generation if that is done a cycle later.

        Raises:
            CancelledError: If the run was ended at once.
        """
        assert isinstance(decided, Mismatch)
        if decided.follows_return and self.loop is not None:
            self.loop.call_soon(self.run.abort_mismatch, decided)
            return call.group.open[call.sequence]
        self.run.abort_mismatch(decided)
        raise asyncio.CancelledError

    def leave(
        self, replica_id: int, state: ReplicaState, call: Call | None = None
    ) -> Mismatch | None:
        """Record that a replica ended; see `Rendezvous.leave`."""
        if self.lock is None:
            return self.rendezvous.leave(replica_id, state, call)
        with self.lock:
            return self.rendezvous.leave(replica_id, state, call)

    def withdrew(self, replica: Replica, generation: Generation) -> None:
        """End the run if a cancelled wait was a withdrawal; find out whose cancellation it was."""
        if self.is_aborted or generation.is_merged:
            return
        who = [r for r in self.replicas if self.rendezvous.is_in(r.replica_id, generation)]
        replica = who_withdrew(who, replica)
        mismatch = self.rendezvous.leave(replica.replica_id, ReplicaState.WITHDREW)
        if mismatch is not None:
            self.run.abort_mismatch(mismatch, replica)

    def sub_group(self, members: tuple[int, ...], ids: tuple[int, ...] = ()) -> SyncGroup:
        """Return the group of some replicas, and of those of other workers with these ids."""
        with self.lock or NO_LOCK:
            return self.rendezvous.group(members, ids)

    # ---- merging -------------------------------------------------------------------------

    def merge(self, generation: Generation) -> None:
        """Merge a complete generation, in the thread that completed it."""
        if generation.timer is not None:
            generation.timer.cancel()
        if (tell := self.observers.merge_began) is not None:
            tell(generation)
        calls = generation.calls
        try:
            group = generation.group
            if group.across is None:
                parts = calls[0].collective.perform(group, calls)
            elif self.lock is None:
                parts = group.across.merge(generation)
            else:  # what crosses workers is the event loop's
                self.post(self._merge_across, generation, group.across)
                return
        # As an error of the merge each replica could catch it, and the program would not end.
        except (KeyboardInterrupt, SystemExit):
            raise  # for the loop; the others are cancelled with the run
        except BaseException as error:  # noqa: BLE001 - every member raises it
            self.release(generation, (), error)
            return
        if type(parts) is not Pending:
            self.release(generation, parts, None)
        elif self.lock is None:
            parts.begin(self, generation)
        else:
            generation.pending, self.merging[generation] = parts, False
            self.post(parts.begin, self, generation)

    def _merge_across(self, generation: Generation, across: AcrossWorkers) -> None:
        if self.is_aborted:
            self.wake_once_unread()
            return
        try:
            pending = across.merge(generation)
        except Exception as error:  # noqa: BLE001 - every member raises it
            self.release(generation, (), error)
        else:
            pending.begin(self, generation)

    def release(self, generation: Generation, parts: Parts, error: BaseException | None) -> None:
        """Hand every member its part, or the error; wake those who wait."""
        generation.parts = parts
        if error is not None:
            self._failed(generation, error)
        if self.lock is None:
            self.num_merges += 1
            generation.is_merged = True
            if (waiter := generation.waiter) is not None and not waiter.done():
                waiter.set_result(None)
            if in_flight := self.rendezvous.in_flight:
                in_flight.pop(generation, None)
                for watcher in generation.watchers or ():
                    if not watcher.done():
                        watcher.set_result(None)
        else:
            parked, group = self.parked, generation.group
            if self.has_streams:  # before anyone reads the parts
                synchronise_lane()
            with self.lock:
                self.num_merges += 1
                generation.is_merged = True
                if group.is_partial:  # members of other groups are parked too
                    gates = [parked.pop(member) for member in group.members if member in parked]
                else:  # all others wait for this merge
                    gates = list(parked.values())
                    parked.clear()
            for gate in gates:  # outside the lock, which the woken threads may need
                gate.open()
        # While the others wake up, which takes them longer.
        if (tell_end := self.observers.merge_ended) is not None:
            tell_end(generation, error)

    def _failed(self, generation: Generation, error: BaseException) -> None:
        first: Call = generation.calls[0]
        unseen = list(self.unseen.values())  # an op's thread may look at a handle
        if not unseen or unseen[-1] is not error:  # that of those before, too
            where = f"{first.describe()}, called at {first.site}"
            add_note_once(error, f"Raised by the merge of {where}.")
        generation.error = error
        generation.traceback = error.__traceback__
        # Every other collective raises where it is awaited; of a handle that may never happen.
        if first.collective is STARTED_ALL_REDUCE:
            self.unseen[generation] = error

    def merge_ended(self) -> None:
        """Tell the run that a merge that took longer has ended."""
        try:  # `suppress` is slower
            self.run.merge_ended()
        except ReferenceError:
            return  # the run was given up in an interrupt

    # ---- waiting -------------------------------------------------------------------------

    def new_waiter(self, generation: Generation, call: Call) -> asyncio.Future[None]:
        """Make the future that all tasks share that wait for a generation, and its timeout."""
        waiter: asyncio.Future[None] = asyncio.Future(loop=self.loop)
        generation.waiter = waiter
        if generation.missing and self.loop is not None:
            own = call.collective.options(call.argument)
            limit_s = generation.group.timeout_s if own is None else own.timeout_seconds
            if limit_s is not None:
                generation.timer = self.loop.call_later(limit_s, self.run.stalled, limit_s, call)
        return waiter

    def wait_for_started(
        self, replica: Replica, generation: WaitedFor, *, blocks: bool
    ) -> Callable[[], None]:
        """Record a wait for what was started, or for a message; return how that ends.

        Raises:
            CancelledError: If the run is ended, because the replicas can never meet.
        """
        if self._started is None:
            self._started = StartedWaits(self)
        return self._started.begin(replica, generation, blocks=blocks)

    # ---- ending --------------------------------------------------------------------------

    def rows(self) -> tuple[ReplicaRow, ...]:
        """Describe every replica, in replica order."""
        with self.lock or NO_LOCK:
            return self.rendezvous.rows()

    def unseen_by(self, replica_id: int) -> BaseException | None:
        """Return what a collective raised that a replica started and whose handle was not read."""
        unseen = list(self.unseen.items())
        return next((error for each, error in unseen if replica_id in each.group.members), None)

    def cancel(self) -> None:
        """Wake all who wait, once their arrays are not read; child tasks may be among them."""
        if self.lock is None:
            for waited in self.rendezvous.open_waits():
                waited.give_up()
        together: dict[Pending | None, list[Generation]] = {}
        for generation, has_begun in list(self.merging.items()):
            if self.lock is None and generation.waiter is None:
                self.new_waiter(generation, generation.first)
            pending = generation.pending if has_begun else None
            together.setdefault(pending, []).append(generation)
        for pending, generations in together.items():
            if pending is not None and pending.task is not None:
                pending.task.cancel()  # one that has not begun sees that the run is aborted
            if self.lock is None:
                once_over(_read_by([pending]), partial(_give_up_all, generations))
        self.wake_once_unread()
        for cancel in list(self.host_calls):
            cancel()

    def wake_once_unread(self) -> None:
        """Open the gates of all threads that wait, once no merge reads arrays of theirs."""
        if self.lock is not None:
            begun = [each.pending for each, has_begun in list(self.merging.items()) if has_begun]
            once_over(_read_by(dict.fromkeys(begun)), self.wake_threads)

    def wake_threads(self) -> None:
        """Open the gates of all threads that wait."""
        if self.lock is None:
            return
        with self.lock:
            gates = list(self.parked.values())
            self.parked.clear()
        for gate in gates:
            gate.open()
        if self.is_aborted:
            for wake in self.on_abort:
                wake()

    def post(self, fn: Callable[..., None], *args: object) -> bool:
        """Have the event loop call something, from a thread; False if there is none any more."""
        try:
            assert self.loop is not None  # threads meet in runs only
            self.loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            self.abandon()
            return False
        return True

    def abandon(self) -> None:
        """End the run from a thread: its event loop is closed and cannot."""
        self.is_aborted = True
        if self.loop is not None and self.loop.is_closed():  # it forgot what was in its queue
            for generation in [g for g, has_begun in list(self.merging.items()) if not has_begun]:
                generation.discard()
        self.wake_threads()

    def restart(self) -> None:
        """Forget a given-up call, outside every run."""
        self.is_aborted = False
        self.everyone.open.clear()
        self.rendezvous = Rendezvous(self.everyone.device_names, self.everyone)

    def forget(self) -> None:
        """Let go of every call."""
        with self.lock or NO_LOCK:
            self.rendezvous.forget()
        self.unseen.clear()


class Waiter(ABC):
    """Waiting of the calls of one replica.

    Attributes:
        point: Where the replicas meet.
        replica: Whose calls.
        home: The place of the replica's code; None before and after.
        place: Where calls may be made: `home`, or None while an op of the replica makes them.
        thread_id: The thread in which they may be made.
        unawaited: Calls whose coroutine has not been started; None where results come at once.
    """

    __slots__ = ("home", "place", "point", "replica", "thread_id", "unawaited")

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        self.point = point
        self.replica = replica
        self.home: Place | None = None
        self.place: Place | None = None
        self.thread_id = 0
        self.unawaited: dict[Call | Transfer, Coroutine[object, None, Any]] | None = None

    def open(self, place: Place) -> None:
        """Allow calls where `place` is current, in the calling thread."""
        self.thread_id = get_ident()
        self.home = self.place = place

    def close(self) -> None:
        """Refuse everything from now on."""
        self.home = self.place = None

    @property
    def is_here(self) -> bool:
        """True if the calling code may make calls."""
        return PLACE.get() is self.place and get_ident() == self.thread_id

    @abstractmethod
    def meet(self, call: Call) -> Any:
        """Bring a call to the meeting point; return its result, or what to await for it."""

    @abstractmethod
    def elsewhere(self, call: Call) -> Any:
        """Bring a call, not numbered yet, from where `is_here` is false.

        Raises:
            ContextError: If it must not be made there.
        """


@final
class TaskWaiter(Waiter):
    """Waits as a task: every call gives an awaitable.

    Args:
        point: Where the replicas meet.
        replica: Whose calls.
        completions: Brings what threads do to the event loop, in order; None outside every run.
        ops: The ops of the run that are in flight.
    """

    __slots__ = ("_completions", "_held_by", "_ops")

    def __init__(
        self,
        point: MeetingPoint,
        replica: Replica,
        completions: CompletionQueue | None,
        ops: OpTracker,
    ) -> None:
        self.point = point  # without super: each run makes one waiter per replica
        self.replica = replica
        self.home = self.place = None
        self.thread_id = 0
        self._completions = completions
        self._ops = ops
        self.unawaited = replica.unawaited
        self._held_by: Op[Any] | None = None  # which has started collectives from its thread

    @property
    def is_here(self) -> bool:
        """True if the calling code may make calls: the replica's own, and no op holds it."""
        if PLACE.get() is self.place and get_ident() == self.thread_id and not self._ops.pending:
            return True
        return (PLACE.get() is self.place and self.is_on_loop()) or self.is_free()

    async def meet(self, call: Call) -> Any:
        """Bring a call to the rendezvous; return its part of the merge's result."""
        replica, point = self.replica, self.point
        if get_ident() != self.thread_id:  # made here and awaited by a loop of another thread
            require_loop(point.loop or asyncio.get_running_loop(), call.describe())
        del replica.unawaited[call]
        if point.is_aborted:
            raise asyncio.CancelledError
        if replica.waiting is not None:
            raise self._two_at_once(call)
        opened = call.group.open.get(call.sequence)
        if opened is not None and opened.waiter is not None and opened.waiter.cancelled():
            point.withdrew(replica, opened)  # given up by a replica that does not know it yet
            raise asyncio.CancelledError
        decided = point.rendezvous.arrive(replica.replica_id, call, point.now())
        generation = decided if type(decided) is Generation else point.cannot_meet(decided, call)
        if not call.position:
            call.context = copy_context()
        if not generation.missing:
            point.merge(generation)
            if generation.is_merged:
                if len(generation.calls) == 1:
                    await asyncio.sleep(0)  # a loop of collectives must let others run
                return generation.take(call.position)
        waiter = generation.waiter or point.new_waiter(generation, call)
        replica.waiting = task = current_task(point.loop)
        replica.cancels_before = task.cancelling()  # type: ignore[union-attr]  # a task runs this
        observers = point.observers
        if observers.wait_began is not None:
            observers.wait_began(generation)
        try:
            await waiter
        except asyncio.CancelledError:
            point.withdrew(replica, generation)
            await generation.unread()
            if point.loop is None:  # no run waits for the merge to end
                await point.run.restart_outside()
            raise
        finally:
            replica.waiting = None
            if observers.wait_ended is not None:
                observers.wait_ended(generation)
        if point.is_aborted:
            raise asyncio.CancelledError
        return generation.take(call.position)

    def _two_at_once(self, call: Call) -> Exception:
        held = self.point.rendezvous.current_call(self.replica.replica_id)
        error = two_at_once_error(call, held)
        if self.point.loop is not None:
            self.point.run.abort(error)
        return error

    def elsewhere(self, call: Call) -> Any:
        """Make a call where the replica has been held by an op until now; else a ContextError."""
        if not self.is_free():
            raise self.misuse(call.collective.name)
        call.sequence = self.replica.next_in(call.group)
        self.point.observers.made(call)
        coroutine = self.replica.unawaited[call] = self.meet(call)
        return coroutine

    def hold(self) -> tuple[Op[Any], CompletionQueue] | None:
        """Let an op of the replica make calls from its thread until it is done.

        Returns:
            The op, and what takes the calls to the event loop, before the op's completion; None
            if no op of the replica runs, or this is the thread of the event loop.
        """
        running = self._ops.running(self.replica.replica_id)
        if self.home is None or self._completions is None or running is None or self.is_on_loop():
            return None
        self._held_by = running
        self.place = None
        return running, self._completions

    def is_on_loop(self) -> bool:
        """Tell whether the calling thread runs the event loop, and not an op."""
        if get_ident() != self.thread_id:
            return False
        return not self._ops.pending or name_of_served_lane() is None  # ops may run in this thread

    def is_free(self) -> bool:
        """Tell whether calls may be made here after all: the op that started some is done."""
        if self._held_by is None or not self._held_by.is_done:
            return False
        if PLACE.get() is not self.home or not self.is_on_loop():
            return False
        self._held_by = None
        self.place = self.home
        return True

    def misuse(self, name: str) -> Exception:
        """Build the error of a call made elsewhere."""
        step = self.point.everyone.step
        if self._held_by is not None and self.is_on_loop():
            return held_by_op_error(name, self._held_by.fn_name)
        return misuse_error(name, self.replica, step, self.home)


def _read_by(merges: Iterable[Pending | None]) -> list[Reading]:
    """Return what still reads arrays of replicas in some merges; from now on nothing else will."""
    found = [each.reading() for each in merges if each is not None and each.task is not None]
    return [reading for reading in found if reading is not None]


def _give_up_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.give_up()
