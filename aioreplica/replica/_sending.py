"""Sends and receives as replicas call them: what is checked, handed over, told and waited for.

The decisions are in `_messages.py` and `_rendezvous.py`.
"""

from __future__ import annotations

import asyncio
import gc
import operator
from collections.abc import Hashable, Iterator, Sequence
from contextvars import Context
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj

from ..context import PLACE, Place
from ..devices import Gate, OpTracker, require_loop
from ..devices.backends import untraced
from ..tree import unflatten
from ._device_waiters import OpWaiter, ThreadWaiter
from ._meeting import SyncGroup
from ._meeting_point import MeetingPoint, TaskWaiter, Waiter
from ._messages import Transfer
from ._reductions import payload_of
from ._rendezvous import Mismatch
from ._replica import Replica


def send(
    waiter: Waiter, everyone: SyncGroup, value: object, to: int, tag: Hashable, frame: FrameType
) -> Any:
    """Hand a value to another replica; return what the waiter gives for it.

    Raises:
        TypeError: If `to` is no int, or the tag cannot be hashed.
        ValueError: If `to` is no other replica of this worker.
        ContextError: If called elsewhere than in the replica.
    """
    own = waiter.replica.replica_id
    destination = _other(to, own, everyone, "send", "to")
    _require_tag(tag, "send")
    leaves, spec, _ = payload_of(value, "send", waiter.home)
    handed = unflatten(spec, [_handed_over(leaf) for leaf in leaves])
    return _carry_out(
        waiter, Transfer(everyone, own, destination, tag, handed, frame, is_send=True)
    )


def receive(
    waiter: Waiter, everyone: SyncGroup, from_: int, tag: Hashable, frame: FrameType
) -> Any:
    """Take the next value of another replica; return what the waiter gives for it.

    Raises:
        TypeError: If `from_` is no int, or the tag cannot be hashed.
        ValueError: If `from_` is no other replica of this worker.
        ContextError: If called elsewhere than in the replica.
    """
    own = waiter.replica.replica_id
    source = _other(from_, own, everyone, "receive", "from_")
    _require_tag(tag, "receive")
    return _carry_out(waiter, Transfer(everyone, source, own, tag, None, frame, is_send=False))


def _carry_out(waiter: Waiter, transfer: Transfer) -> object:
    """Send or receive; return what came, or for a task what to await for it.

    Raises:
        ContextError: If called elsewhere than in the replica.
    """
    if isinstance(waiter, TaskWaiter):
        if not waiter.is_here:
            raise waiter.misuse(transfer.name)
        coroutine = waiter.replica.unawaited[transfer] = _in_task(waiter, transfer)
        return coroutine
    if isinstance(waiter, ThreadWaiter):
        if not waiter.is_here:
            raise waiter.misuse(transfer.name)
        return _in_thread(waiter, transfer)
    assert isinstance(waiter, OpWaiter)
    if not waiter.is_in_op():
        raise waiter.misuse(transfer.name)
    return waiter.exchange(transfer, bring)


def _in_thread(waiter: ThreadWaiter, transfer: Transfer) -> object:
    """Send or receive, and wait in the calling device thread; return what came."""
    point, replica_id, lock = waiter.point, waiter.replica.replica_id, waiter.point.lock
    assert lock is not None  # threads meet here
    woken: Gate | None = None
    with lock:
        if point.is_aborted:
            raise asyncio.CancelledError
        decided = _exchange(point, transfer)
        if isinstance(decided, Transfer):
            woken = point.parked.pop(decided.replica_id, None)
        # Decided under the lock: a gate that is parked will be opened, even if the other replica
        # comes before this thread waits. Left open, it would let the next wait pass at once.
        must_wait = not transfer.is_over
        if must_wait:
            point.parked[replica_id] = waiter.gate
            if decided is None:
                decided = point.rendezvous.wait_for_started(replica_id, transfer)
    _tell(point, transfer, decided)
    if woken is not None:  # outside the lock, which it may need
        woken.open()
    if isinstance(decided, Mismatch):
        point.post(point.run.abort_mismatch, decided)
    if must_wait:
        waiter.wait_for(transfer, transfer.group.timeout_s, transfer)
        with lock:
            point.rendezvous.waited_for_started(replica_id, transfer)
    if not transfer.is_over:
        raise asyncio.CancelledError
    return transfer.result


async def _in_task(waiter: TaskWaiter, transfer: Transfer) -> object:
    """Send or receive, and wait in the calling task; return what came.

    Cancellation:
        A send that waits is not made; a receive takes nothing.
    """
    replica, point = waiter.replica, waiter.point
    if get_ident() != waiter.thread_id:  # made here and awaited by a loop of another thread
        require_loop(point.loop or asyncio.get_running_loop(), transfer.describe())
    del replica.unawaited[transfer]
    bring(point, transfer)
    future = transfer.waiter
    if future is None:
        return transfer.result
    blocks = asyncio.current_task(point.loop) is replica.work
    ended = point.wait_for_started(replica, transfer, blocks=blocks)
    try:
        await future
    except asyncio.CancelledError:
        _take_back(point, transfer)
        raise
    finally:
        ended()
    if point.is_aborted:
        raise asyncio.CancelledError
    return transfer.result


def bring(point: MeetingPoint, transfer: Transfer) -> None:
    """Send or receive on the event loop; what is not over has a `waiter` afterwards.

    Raises:
        CancelledError: If the run was aborted.
    """
    if point.is_aborted:
        raise asyncio.CancelledError
    decided = _exchange(point, transfer)
    _tell(point, transfer, decided)
    assert point.loop is not None  # there are several replicas
    if isinstance(decided, Mismatch):  # of a replica that returned: others may be failing
        point.loop.call_soon(point.run.abort_mismatch, decided)
    elif decided is not None:
        decided.wake()
    if transfer.is_over:
        return
    transfer.waiter = asyncio.Future(loop=point.loop)
    timeout_s = transfer.group.timeout_s
    if timeout_s is not None:
        transfer.timer = point.loop.call_later(timeout_s, point.run.stalled, timeout_s, transfer)


def _exchange(point: MeetingPoint, transfer: Transfer) -> Transfer | Mismatch | None:
    """Bring a send or a receive to the rendezvous; where threads meet, under the lock.

    Returns what ends the run, or the transfer that may go on now.
    """
    rendezvous = point.rendezvous
    running = PLACE.get().replica
    if rendezvous.may_act is None and point.lock is None and running is not None:
        rendezvous.may_act = partial(_may_act, point.loop, point.replicas, running.op_tracker)
    transfer.arrived_s = point.now()
    return rendezvous.exchange(transfer)


def _tell(point: MeetingPoint, transfer: Transfer, decided: Transfer | Mismatch | None) -> None:
    """Tell observers of a send or a receive, and of the value that was handed over by it."""
    point.observers.made(transfer)
    tell = point.observers.value_received
    if tell is not None:
        receive = decided if transfer.is_send else transfer
        if isinstance(receive, Transfer) and receive.is_over:
            tell(receive)


def _may_act(
    loop: asyncio.AbstractEventLoop | None,
    replicas: Sequence[Replica],
    ops: OpTracker,
    replica_id: int,
    num_waits: int,
) -> bool:
    """Tell whether a replica does something besides its `num_waits` waits in the meeting.

    A task of it may be about to call, or an op. Only looked at where a circle was found.
    """
    actors = sum(each.replica_id == replica_id for each in ops.pending)
    # The task that awaits an op which waits here is one with it.
    actors -= ops.blocks(replica_id, replicas[replica_id].work)
    places = [place for task in asyncio.all_tasks(loop) for place in _places_of(task)]
    own = [each.replica for each in places if each.replica is not None]
    actors += sum(each.op_tracker is ops and each.local_replica_id == replica_id for each in own)
    return actors > num_waits


def _places_of(task: asyncio.Task[object]) -> Iterator[Place]:
    """Yield where a task runs: in a replica for its own task and for child tasks."""
    get_context = getattr(task, "get_context", None)
    contexts: list[Context]
    if get_context is not None:
        contexts = [get_context()]
    else:  # Python 3.11: a task does not tell, but the collector knows
        found = [each for each in gc.get_referents(task) if isinstance(each, Context)]
        contexts = list({id(each): each for each in found}.values())
    for context in contexts:
        place = context.get(PLACE)
        if place is not None:
            yield place


def _take_back(point: MeetingPoint, transfer: Transfer) -> None:
    """Undo a send or a receive whose task was cancelled, on the event loop."""
    messages = point.rendezvous.messages
    if transfer.timer is not None:
        transfer.timer.cancel()
    if point.is_aborted or messages is None:
        return
    following = messages.withdraw(transfer)
    if following is not None:
        following.wake()


def _other(given: int, own: int, everyone: SyncGroup, what: str, argument: str) -> int:
    """Return the index of another replica among those of this process."""
    try:
        asked = operator.index(given)
    except TypeError:
        raise TypeError(f"{what} needs a replica id as {argument}, got {given!r}.") from None
    across, here = everyone.across, len(everyone.members)
    first, total = (0, here) if across is None else (across.first_replica, across.num_replicas)
    if not 0 <= asked < total:
        raise ValueError(f"{what} got {argument}={asked}, but replicas are 0 to {total - 1}.")
    if asked == first + own:
        raise ValueError(
            f"{what} got {argument}={asked}, the replica that calls it. Keep the value in a "
            "variable of the function."
        )
    if not first <= asked < first + here:
        raise ValueError(
            f"{what} got {argument}={asked}, a replica of another worker: this one has replicas "
            f"{first} to {first + here - 1}, and values are handed over in memory. Use a "
            "collective, such as broadcast, between workers."
        )
    return asked - first


def _require_tag(tag: Hashable, what: str) -> None:
    try:
        hash(tag)
    except TypeError:
        raise TypeError(
            f"{what} needs a tag that can be hashed, such as a text, got {tag!r}."
        ) from None


def _handed_over(leaf: object) -> object:
    """Return a leaf as the receiver gets it: the same memory, read-only where that can be said."""
    if isinstance(leaf, np.ndarray):
        view = leaf.view()
        view.flags.writeable = False
        return view
    if isinstance(leaf, np.generic) or not is_array_api_obj(leaf):
        return leaf
    return untraced(leaf)
