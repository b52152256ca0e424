"""torch.distributed with Gloo: for users who have torch, and for launchers that are not MPI's.

The workers meet in a store at the coordinator's address; there they also leave their notes. Gloo
has threads of its own, which ring when an exchange is over. Arrays are NumPy's, on the host.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self, final
from weakref import WeakValueDictionary

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op
from ..errors import AioReplicaError, ContextError, StallError, WorkerLostError
from ._arguments import require_timeout
from ._communicator import ENDED, LOST, STALLED, Communicator, Failure, nothing_lost_error
from ._engine import EngineCommunicator, forget, has_ended
from ._environment import MEETING, WORKERS_BEFORE, is_added
from ._poller import Poller
from ._processes import require_own_program
from ._resolver import ClusterResolver
from ._torch_reserves import (
    Caller,
    Meeting,
    Reserves,
    announce_reserve,
    newest_reserves,
    no_reserve,
    reserves_in,
    say_closed,
)
from ._torch_resize import CONNECT_S, DECIDING_S, settle
from ._torch_store import Store, StoreSilentError, is_kept_by_torchrun, meet, open_store
from ._torch_transport import SLACK_S, TorchTransport
from ._transport import Link


@final
class TorchCommunicator(EngineCommunicator):
    """A worker of a group that torch.distributed connects, with Gloo; made by `connect`.

    `pip install "aioreplica[torch]"`. Works beside a program's own use of torch.distributed: if
    that was initialised, a group of its own is made in it; else it initialises that, until the
    number of workers changes. Results are NumPy arrays, as with every engine; NCCL, which needs
    arrays on GPUs, is not offered.

    If a worker dies the others raise a `WorkerLostError` within seconds, and live on: `shrink`
    makes a group of them. Not under `torchrun`, which starts all of them again, if told to.
    """

    @classmethod
    async def connect(cls, resolver: ClusterResolver, *, timeout: float | None = None) -> Self:
        """Meet all workers of the cluster at its coordinator's address.

        Args:
            resolver: Says where that is, which worker this is, and how many there are.
            timeout: How long this, and each collective, may wait for the others, in seconds; None
                waits for ever (for the coordinator, 5 minutes).

        Raises:
            ImportError: If torch is not installed, or is built without torch.distributed.
            StallError: If not all workers came before the timeout; names those that did not.
            TypeError: If `timeout` is not a number.
            ValueError: If the coordinator's address is missing or in use, this worker was started
                twice, workers were told of different numbers of workers, or GLOO_SOCKET_IFNAME is
                not the name of one interface.

        Cancellation:
            What was begun goes on in the background, and others are told in their first call that
            this worker has left; connect again only in a new process.
        """
        timeout = require_timeout(timeout)
        if resolver.rank is None:
            raise ValueError(f"A task of type {resolver.task_type!r} is not a worker.")
        check_interfaces(resolver)
        made = await cls._made(partial(join, resolver), timeout)
        made.is_new = is_added(resolver)
        return made

    async def _resized(self, num_new: int) -> Communicator:
        if is_kept_by_torchrun():
            what = "with more workers" if num_new else "after the loss of a worker"
            raise ContextError(
                f"Workers of torchrun cannot go on {what}: it keeps their number, or starts all "
                "again, from the newest checkpoint. `torchrun --max-restarts 3` does that by "
                "itself after a loss."
            )
        if num_new:
            require_own_program("grow")
        elif not self.has_failed:
            raise nothing_lost_error()
        transport = self.link.transport
        assert isinstance(transport, TorchTransport)  # made by `connect`
        met = partial(transport.met_anew, num_new, self._failure)
        try:
            return await self._made(met, self.timeout)
        except Exception as error:
            transport.knows_stalled = False  # who did not come to this may live
            kind = STALLED if isinstance(error, StallError) else LOST
            if not isinstance(error, StallError | WorkerLostError):
                kind = ENDED
            self._end_all(Failure(kind, str(error), getattr(error, "ranks", ()), self.timeout))
            raise

    @classmethod
    async def _made(
        cls, met: Callable[[Caller], Meeting], timeout: float | None
    ) -> TorchCommunicator:
        """Meet others, and let Gloo connect all who have met.

        Args:
            met: Meets them, on a thread; ends by itself when nobody waits any more.
            timeout: Of that, and of what is returned.

        Raises:
            StallError: If one of them has stopped meanwhile.
            WorkerLostError: If Gloo cannot connect them.
        """
        lane = Lane("torch.connect", nice=0)  # it may have to wait for long
        completions = CompletionQueue.of_running_loop()
        caller = Caller(timeout, completions, [])
        connecting: Op[TorchTransport] | None = None
        meetings: list[Meeting] = []
        joining: Op[Meeting] = Op(completions, come, (met, caller, meetings), {}, lane)
        joining.put()
        try:
            await has_ended(joining, None)
            meeting = joining.result()
            poller = the_poller()
            connecting = Op(completions, new_transport, (meeting, caller, poller.ring), {}, lane)
            connecting.put()
            connecting.add_done_callback(forget)  # it may end after the timeout
            limit = None if timeout is None else timeout + SLACK_S
            if meeting.before is not None:
                limit = CONNECT_S + 2 * DECIDING_S
            if not await has_ended(connecting, limit):
                caller.abandoned.append(None)
                connecting.add_done_callback(_leave)
                raise StallError(
                    f"Not all workers that came to {meeting.address} could be connected within "
                    f"{limit:g} s: one of them has stopped. Look whether a process is suspended.",
                    timeout_s=limit,
                )
            transport = connecting.result()
        except asyncio.CancelledError:
            caller.abandoned.append(None)
            if connecting is None:
                leaving = Op(completions, give_up, (meetings, caller, the_poller().ring), {}, lane)
                leaving.put()  # behind `joining`, whatever becomes of the loop
                leaving.add_done_callback(forget)
            else:
                connecting.add_done_callback(_leave)
            raise
        finally:
            lane.stop()
        link = Link(transport, poller)
        # Splits may be closed after the group.
        weakref.finalize(link, transport.store.close).atexit = False
        return cls(link, tuple(range(transport.size)), timeout)


def _leave(connecting: Op[TorchTransport]) -> None:
    """Take no part in a group whose communicator nobody gets."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().leave()


def check_interfaces(resolver: ClusterResolver) -> None:
    """Check the address, and which network interface Gloo takes.

    Gloo takes that of the host's name, which may be none that the others reach: workers that meet
    at a loopback address take the loopback interface, unless GLOO_SOCKET_IFNAME is set.

    Raises:
        ValueError: If there is no address, or a list of interfaces.
    """
    address = resolver.coordinator_address
    if address is None:
        raise ValueError(
            f"torch.distributed needs an address where the workers meet, and {resolver.source} "
            "tells none. Give ClusterResolver(coordinator_address='host:port'), the same on every "
            "worker, with a port that is free on the host of worker 0."
        )
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is not None and (not name.strip() or "," in name):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME has to be the name of one network interface, got {name!r}."
        )
    host = address.rpartition(":")[0].strip("[]")
    is_loopback = host == "localhost" or host.startswith("127.") or host == "::1"
    if name is None and is_loopback and Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def the_poller() -> Poller:
    """Return that of this process, whose thread ends when no communicator is left."""
    pollers = REGISTRY.once("torch_pollers", WeakValueDictionary[int, Poller])
    poller = pollers.get(os.getpid())
    if poller is None:
        lane = Lane("torch.distributed", nice=0)
        poller = pollers[os.getpid()] = Poller(lane, is_rung=True)
        weakref.finalize(poller, lane.stop).atexit = False
    return poller


# ---- on a thread -------------------------------------------------------------------------


def import_torch() -> tuple[ModuleType, ModuleType]:
    """Return torch and torch.distributed.

    Raises:
        ImportError: If it is not installed or not built; says what to install.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            f'The engine "torch" needs torch: pip install "aioreplica[torch]". ({error})'
        ) from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise ImportError("This build of torch has no torch.distributed with Gloo. Install one.")
    return torch, dist


def come(met: Callable[[Caller], Meeting], caller: Caller, meetings: list[Meeting]) -> Meeting:
    """Meet others; note where."""
    meetings.append(met(caller))
    return meetings[-1]


def give_up(meetings: list[Meeting], caller: Caller, ring: Callable[[], None]) -> None:
    """Let others not wait for a worker that was cancelled, if it has met them.

    Those that meet for the first time are connected all the same: they learn in their first call
    that this one has left.

    Raises:
        ContextError: If they were connected.
        WorkerLostError: If they could not be.
    """
    for meeting in meetings:
        if meeting.before is None:
            new_transport(meeting, caller, ring)
        else:
            meeting.give_up()


def join(resolver: ClusterResolver, caller: Caller) -> Meeting:
    """Meet the other workers in the store.

    Raises:
        ContextError: If this worker was added to others that have gone on without it.
        StallError: If a worker did not come in time, or the store does not answer.
        WorkerLostError: If who keeps the store has gone.
    """
    _, dist = import_torch()
    timeout = caller.timeout
    address = str(resolver.coordinator_address)
    stores = REGISTRY.once("torch_stores", dict[str, tuple[Any, int]])  # kept as long as we live
    store, ordinal = stores.get(address, (None, 0))
    if store is None:
        store = open_store(dist, resolver, timeout)
    elif is_added(resolver):
        raise ContextError(
            "This worker was added to others that have gone on without it. Start all again."
        )
    stores[address] = store, ordinal + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = os.environ.get(MEETING) if is_added(resolver) else f"aioreplica/{restart}/{ordinal}"
    store = Store(dist.PrefixStore(place, store), caller.completions)
    rank, size = resolver.rank, resolver.num_workers
    assert rank is not None  # checked by `connect`
    try:
        announce = partial(announce_reserve, dist, store, rank, address, 0)
        meet(store, resolver, timeout, no_reserve if is_kept_by_torchrun() else announce)
        reserves = Reserves() if is_kept_by_torchrun() else reserves_in(store, rank, size)
        if not is_added(resolver):
            return Meeting(store, rank, size, address, reserves)
        members = range(int(os.environ[WORKERS_BEFORE]))
        return Meeting(store, rank, size, address, reserves, Reserves(), members)
    except StoreSilentError:
        store.close()
        keeper = () if is_kept_by_torchrun() else (0,)
        who = "Worker 0, which keeps" if keeper else "torchrun, which keeps"
        raise StallError(
            f"{who} the store at {address}, has stopped: it does not answer. Look whether that "
            "process is suspended.",
            timeout_s=timeout,
            ranks=keeper,
        ) from None
    except BaseException as error:
        store.close()
        if not isinstance(error, RuntimeError) or isinstance(error, AioReplicaError):
            raise
        raise WorkerLostError(
            f"The store at {address}, where the workers meet, is gone: who keeps it has ended "
            f"before all had come; see what it raised. ({str(error).splitlines()[0]})",
            ranks=() if is_kept_by_torchrun() else (0,),
        ) from error


def new_transport(meeting: Meeting, caller: Caller, ring: Callable[[], None]) -> TorchTransport:
    """Let Gloo connect the workers, which have met.

    Raises:
        ContextError: If nobody waits for it any more.
        WorkerLostError: If it cannot.
    """
    torch, dist = import_torch()
    transport: TorchTransport | None = None
    try:
        transport = TorchTransport(torch, dist, meeting, caller.timeout, caller.completions, ring)
        caller.require_waiting("call")
        if meeting.before is not None:
            settle(dist, meeting)
        newest_reserves()[os.getpid()] = meeting.reserves
        return transport
    except BaseException as error:
        if transport is not None:
            transport.end()
        if caller.abandoned:
            say_closed(dist, meeting.reserves)
        meeting.give_up()
        if not isinstance(error, RuntimeError) or isinstance(error, AioReplicaError):
            raise
        raise WorkerLostError(
            f"The workers came to {meeting.address}, but could not be connected: {error}"
        ) from error
