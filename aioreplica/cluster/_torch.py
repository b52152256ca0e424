"""torch.distributed with Gloo: for users who have torch, and for launchers that are not MPI's.

The workers meet in a store at the coordinator's address; there they also leave their notes. Gloo
has threads of its own, so the lane waits for it without polling. Arrays are NumPy's, on the host.

When a worker dies only those that exchange with it learn that from Gloo. Each of them gives its
own connections up at once, so that the next ones fail too, and says in the store that it lives:
those that do not are named.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self, final

import numpy as np

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op, new_gate
from ..errors import AioReplicaError, ContextError, StallError, WorkerLostError
from ._communicator import ENDED, LOST, Communicator, Failure, require_timeout
from ._engine import Engine, EngineCommunicator, GroupEndedError, Link, Note, has_ended
from ._exchange import Exchange, Poll
from ._local import workers_in_words
from ._resolver import ClusterResolver

NO_TIMEOUT = timedelta(days=365)
SLACK_S = 5.0  # Gloo's own timeout comes after ours, which knows who is missing
STORE_S = 300.0  # to meet in the store, without a timeout
WAIT_S = 0.02  # for Gloo, between two looks at notes and clock
NOTES_S = 0.05  # between two questions to the store
ALIVE_S = 1.0  # for the others to say that they live
ALIVE_LONG_S = 3.0  # if more than one has not: rather is one of them slow
ADDED = ("float32", "float64", "int32", "int64")  # what Gloo adds up as NumPy does
LEAVE_S = 0.7  # that worker 0, which keeps the store, waits for the others to leave
JOIN_PAUSE_S = 0.01


@final
class TorchCommunicator(EngineCommunicator):
    """A worker of a group that torch.distributed connects, with Gloo; made by `connect`.

    `pip install "aioreplica[torch]"`. Works beside a program's own use of torch.distributed: if
    that was initialised, a group of its own is made in it. Results are NumPy arrays, as with every
    engine; NCCL, which needs arrays on GPUs, is not offered.

    If a worker dies the others raise a `WorkerLostError` within seconds, and live on. `torchrun`
    starts all of them again, if told to.
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
            What was begun goes on in the background; connect again only in a new process.
        """
        timeout = require_timeout(timeout)
        if resolver.rank is None:
            raise ValueError(f"A task of type {resolver.task_type!r} is not a worker.")
        check_interfaces(resolver)
        lane = Lane("torch.distributed", nice=0)
        op: Op[TorchEngine] = Op(
            CompletionQueue.of_running_loop(), join, (resolver, timeout), {}, lane
        )
        op.put()
        try:
            await has_ended(op, None)
            engine = op.result()
        except BaseException:
            lane.stop()
            raise
        link = Link(engine, lane)
        weakref.finalize(link, lane.stop).atexit = False  # splits may be closed after the group
        return cls(link, tuple(range(engine.size)), timeout)

    async def _shrink(self) -> Communicator:
        raise ContextError(
            "torch.distributed with Gloo cannot go on after the loss of a worker. Start all again, "
            "from the newest checkpoint: `torchrun --max-restarts 3` does it by itself."
        )


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


# ---- on the lane's thread ----------------------------------------------------------------


def import_torch() -> tuple[Any, Any]:
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


def join(resolver: ClusterResolver, timeout: float | None) -> TorchEngine:
    """Meet the other workers in the store, then let Gloo connect them."""
    torch, dist = import_torch()
    address = str(resolver.coordinator_address)
    stores = REGISTRY.once("torch_stores", dict[str, tuple[Any, int]])  # kept as long as we live
    store, ordinal = stores.get(address, (None, 0))
    if store is None:
        store = open_store(dist, resolver, timeout)
    stores[address] = store, ordinal + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"aioreplica/{restart}/{ordinal}", store)
    try:
        meet(store, resolver, timeout)
        return TorchEngine(torch, dist, store, resolver, timeout)
    except RuntimeError as error:
        if isinstance(error, AioReplicaError):
            raise
        raise WorkerLostError(
            f"The workers came to {address}, but could not be connected: {error}"
        ) from error


def meet(store: Any, resolver: ClusterResolver, timeout: float | None) -> None:
    """Wait in the store until all workers have come, and see whether they agree."""
    start, rank, size = monotonic(), resolver.rank, resolver.num_workers
    address = resolver.coordinator_address
    if store.add(f"came/{rank}", 1) > 1:
        raise ValueError(
            f"Worker {rank} was started twice: another process has come to {address} as worker "
            f"{rank} of {size}. Give each process a number of its own."
        )
    store.set(f"size/{rank}", str(size))
    waited_for = set(range(size))
    while waited_for:
        for each in sorted(waited_for):
            if store.check([f"size/{each}"]):
                told = int(store.get(f"size/{each}"))
                if told != size:
                    raise ValueError(
                        f"Worker {each} was told of {told} workers, and this one (worker {rank}) "
                        f"of {size}. Start all with the same number."
                    )
                waited_for.discard(each)
        if not waited_for:
            return
        if timeout is not None and (monotonic() > start + timeout or store.add("stalled", 0)):
            give_up_together(store, rank, size - len(waited_for))
            missing = tuple(sorted(waited_for))
            raise StallError(
                f"{workers_in_words(missing)} did not come to {address} within {timeout:g} s. "
                "Look whether each worker was started, or raise the timeout.",
                timeout_s=timeout,
                ranks=missing,
            )
        sleep(JOIN_PAUSE_S)


def give_up_together(store: Any, rank: int | None, num_present: int) -> None:
    """Tell those who have come that time is up; worker 0 keeps the store until they know."""
    store.add("stalled", 1)
    end = monotonic() + LEAVE_S
    while rank == 0 and store.add("stalled", 0) < num_present and monotonic() < end:
        sleep(JOIN_PAUSE_S)


def open_store(dist: Any, resolver: ClusterResolver, timeout: float | None) -> Any:
    """Return the store at the coordinator's address; worker 0 keeps it, or torchrun does.

    Raises:
        StallError: If there is none before the timeout.
        ValueError: If the address is in use.
    """
    address = str(resolver.coordinator_address)
    host, _, port = address.rpartition(":")
    keeps = resolver.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = STORE_S if timeout is None else timeout
    try:
        return dist.TCPStore(
            host.strip("[]"), int(port), None, keeps, timedelta(seconds=seconds),
            wait_for_workers=False,
        )  # fmt: skip
    except RuntimeError as error:
        text = str(error)
        if keeps:
            raise ValueError(
                f"Worker 0 cannot listen at {address}: the address is in use, by another program "
                "or because worker 0 was started twice, or is not one of this host. "
                f"({text.splitlines()[0]})"
            ) from error
        raise StallError(
            f"Worker 0 did not come to {address} within {seconds:g} s: nothing answers there. "
            "Look whether it was started, and whether the address is right.",
            timeout_s=timeout,
            ranks=(0,),
        ) from error


@final
class TorchEngine(Engine):
    """A process group with Gloo, and the store.

    Args:
        torch: The module.
        dist: The module torch.distributed.
        store: For this engine alone.
        resolver: Which worker this is, of how many.
        timeout: Of a collective, in seconds.
    """

    def __init__(
        self, torch: Any, dist: Any, store: Any, resolver: ClusterResolver, timeout: float | None
    ) -> None:
        assert resolver.rank is not None  # checked by `connect`
        rank, size = resolver.rank, resolver.num_workers
        self.rank, self.size = rank, size
        self._torch, self._dist, self._store = torch, dist, store
        self._limit = NO_TIMEOUT if timeout is None else timedelta(seconds=timeout + SLACK_S)
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise ContextError(
                    f"torch.distributed was initialised as worker {dist.get_rank()} of "
                    f"{dist.get_world_size()}, but this is worker {rank} of {size}."
                )
            self._group = dist.new_group(backend="gloo", timeout=self._limit)
        else:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size,
                timeout=self._limit,
            )  # fmt: skip
            self._group = dist.group.WORLD
        self._messages = GlooMessages(torch, dist, self._group, rank, size)
        self._subgroups: list[GlooMessages] = []
        self._num_read = 0
        self._read_at = 0.0
        self._is_open = True
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def all_gather(self, send: Any, recv: Any) -> Poll:
        return self._messages.all_gather(send, recv)

    def all_to_all(self, send: Any, recv: Any, counts: list[int]) -> Poll:
        return self._messages.all_to_all(send, recv, counts)

    def broadcast(self, buffer: Any, root: int) -> Poll:
        return self._messages.broadcast(buffer, root)

    def barrier(self) -> Poll:
        return self._messages.barrier()

    def add(self, source: Any, target: Any) -> Poll | None:
        return self._messages.add(source, target)

    def subgroup(self, ranks: tuple[int, ...], name: str) -> Exchange:
        dist = self._dist
        group = dist.new_group(
            list(ranks), self._limit, "gloo", use_local_synchronization=True,
            group_desc=name,
        )  # fmt: skip
        messages = GlooMessages(self._torch, dist, group, ranks.index(self.rank), len(ranks))
        self._subgroups.append(messages)
        return messages

    # ---- notes ---------------------------------------------------------------------------

    def tell(self, note: Note) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it worker 0
            self._store.set(f"note/{self._store.add('notes', 1)}", note.encode())

    def notes(self, *, at_once: bool = False) -> list[Note]:
        now = monotonic()
        if now < self._read_at + NOTES_S and not at_once:
            return []
        self._read_at = now
        found = []
        for number in range(self._num_read + 1, self._store.add("notes", 0) + 1):
            found.append(Note.decode(self._store.get(f"note/{number}")))
            self._num_read = number
        return found

    # ---- the end -------------------------------------------------------------------------

    def explain(self, error: Exception, what: str) -> Failure | None:
        if not isinstance(error, RuntimeError):
            return None
        with suppress(RuntimeError):
            self._store.set(f"alive/{self.rank}", "1")  # first: the end may take its time
        self.end()
        reason = str(error).strip().splitlines()[0][:200]
        try:
            missing = self._missing()
        except GroupEndedError as ended:
            return ended.failure
        except RuntimeError:
            if self.rank == 0 or "TORCHELASTIC_RUN_ID" in os.environ:
                text = f"The store is gone, which torch.distributed needs, in {what}: {reason}"
                return Failure(ENDED, text)
            text = f"Worker 0, which kept the store, is gone; noticed in {what}: {reason}"
            return Failure(LOST, f"{text} Restart from the newest checkpoint.", (0,))
        if not missing:
            return Failure(ENDED, f"torch.distributed failed in {what}: {reason}")
        are = "is" if len(missing) == 1 else "are"
        text = f"{workers_in_words(missing)} {are} gone; noticed in {what}: {reason}"
        return Failure(LOST, f"{text} Restart from the newest checkpoint.", missing)

    def _missing(self) -> tuple[int, ...]:
        """Say that this worker lives; return those that do not say so in time.

        Raises:
            GroupEndedError: If another worker has said why the group has ended.
        """
        store, missing, start = self._store, set(range(self.size)), monotonic()
        while missing and monotonic() < start + (ALIVE_S if len(missing) == 1 else ALIVE_LONG_S):
            for note in self.notes(at_once=True):
                if note.kind in (LOST, ENDED, "stalled"):
                    raise GroupEndedError(Failure(note.kind, note.text, note.ranks, note.timeout))
            missing -= {each for each in missing if store.check([f"alive/{each}"])}
            if missing:
                sleep(JOIN_PAUSE_S)
        return tuple(sorted(missing))

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            atexit.unregister(self._at_exit)
            with suppress(RuntimeError, ValueError):
                self._dist.destroy_process_group(self._group)
            self._group = None  # connections are closed when nothing refers to it
            for messages in (self._messages, *self._subgroups):
                messages.forget()

    def close(self) -> None:
        with suppress(RuntimeError):
            self._store.add("left", 1)
            end = monotonic() + LEAVE_S
            while self.rank == 0 and self._store.add("left", 0) < self.size and monotonic() < end:
                sleep(JOIN_PAUSE_S)  # others may still be in the last call, and read notes
        self.end()

    def _at_exit(self) -> None:
        if self._pid == os.getpid():
            self.end()


@final
class GlooMessages(Exchange):
    """Exchanges between the workers of one process group.

    Args:
        torch: The module.
        dist: The module torch.distributed.
        group: The process group.
        rank: Of this worker in it.
        size: Of the group.
    """

    def __init__(self, torch: Any, dist: Any, group: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._torch, self._dist, self._group = torch, dist, group

    def all_gather(self, send: Any, recv: Any) -> Poll:
        if np.may_share_memory(send, recv):
            send = send.copy()
        dist = self._dist
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older
        work = gather(self._tensor(recv), self._tensor(send), self._group, async_op=True)
        return _poll_of(work, send, recv)

    def all_to_all(self, send: Any, recv: Any, counts: list[int]) -> Poll:
        work = self._dist.all_to_all_single(
            self._tensor(recv), self._tensor(send), [counts[self.rank]] * self.size, counts,
            self._group, async_op=True,
        )  # fmt: skip
        return _poll_of(work, send, recv)

    def broadcast(self, buffer: Any, root: int) -> Poll:
        work = self._dist.broadcast(
            self._tensor(buffer), group=self._group, async_op=True, group_src=root
        )
        return _poll_of(work, buffer)

    def barrier(self) -> Poll:
        return self.all_gather(np.zeros(1, np.uint8), np.empty(self.size, np.uint8))

    def add(self, source: Any, target: Any) -> Poll | None:
        if target.dtype.name not in ADDED:
            return None
        np.copyto(target, source)
        work = self._dist.all_reduce(
            self._torch.from_numpy(target), group=self._group, async_op=True
        )
        return _poll_of(work, target)

    def forget(self) -> None:
        """Let go of the process group."""
        self._group = None

    def _tensor(self, array: Any) -> Any:
        """Return a tensor of an array's memory, which may be read-only where it is only sent."""
        memory = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
        return self._torch.from_numpy(np.frombuffer(memory, np.uint8))


def _poll_of(work: Any, *held: Any) -> Poll:
    """Return a poll function that waits for Gloo, and holds what it may still use."""
    gate = new_gate(None)
    work.get_future().add_done_callback(lambda _: gate.open())

    def poll(_pause_s: float, _held: tuple[Any, ...] = held) -> bool:
        nonlocal work
        if not gate.wait(WAIT_S):
            return False
        done, work = work, None  # it holds the connections, and this function may be kept
        try:
            done.wait()
        finally:
            del done
        return True

    return poll
