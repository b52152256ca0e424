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
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import Any, Self, final

import numpy as np

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op, new_gate
from ..errors import AioReplicaError, ContextError, StallError, WorkerLostError
from ..tree import Array
from ._communicator import ENDED, LOST, Communicator, Failure, require_timeout
from ._engine import EngineCommunicator, has_ended
from ._local import workers_in_words
from ._resolver import ClusterResolver
from ._torch_store import (
    ANSWER_S,
    JOIN_PAUSE_S,
    LEAVE_S,
    Answer,
    Store,
    StoreSilentError,
    is_kept_by_torchrun,
    meet,
    open_store,
)
from ._transport import (
    PASSED,
    WAITING,
    Group,
    GroupEndedError,
    Link,
    Note,
    Poll,
    Transport,
    joined,
)

NO_TIMEOUT = timedelta(days=365)
SLACK_S = 5.0  # Gloo's own timeout comes after ours, which knows who is missing
WAIT_S = 0.02  # for Gloo, between two looks at notes and clock
NOTES_S = 0.05  # between two questions to the store
WORDS_S = 0.4  # between two that ask for the newest word of each worker too
ALIVE_S = 1.0  # for the others to say that they live
ALIVE_LONG_S = 3.0  # if more than one has not: rather is one of them slow


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
        completions = CompletionQueue.of_running_loop()
        joining: Op[Store] = Op(completions, join, (resolver, timeout, completions), {}, lane)
        joining.put()
        try:
            await has_ended(joining, None)  # all in it has timeouts of its own
            store = joining.result()
            connecting: Op[TorchTransport] = Op(
                completions, new_transport, (store, resolver, timeout, completions), {}, lane
            )
            connecting.put()
            if not await has_ended(connecting, None if timeout is None else timeout + SLACK_S):
                raise StallError(
                    f"Not all workers that came to {resolver.coordinator_address} could be "
                    f"connected within {timeout:g} s: one of them has stopped. Look whether a "
                    "process is suspended.",
                    timeout_s=timeout,
                )
            transport = connecting.result()
        except BaseException:
            lane.stop()
            raise
        link = Link(transport, lane)
        for stop in (lane.stop, transport.store.close):
            weakref.finalize(link, stop).atexit = False  # splits may be closed after the group
        return cls(link, tuple(range(transport.size)), timeout)

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


def join(resolver: ClusterResolver, timeout: float | None, completions: CompletionQueue) -> Store:
    """Meet the other workers in the store; return it.

    Raises:
        StallError: If a worker did not come in time, or the store does not answer.
        WorkerLostError: If who keeps the store has gone.
    """
    _, dist = import_torch()
    address = str(resolver.coordinator_address)
    stores = REGISTRY.once("torch_stores", dict[str, tuple[Any, int]])  # kept as long as we live
    store, ordinal = stores.get(address, (None, 0))
    if store is None:
        store = open_store(dist, resolver, timeout)
    stores[address] = store, ordinal + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    raw = dist.PrefixStore(f"aioreplica/{restart}/{ordinal}", store)
    store = Store(raw, completions)
    try:
        meet(store, resolver, timeout)
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
    return store


def new_transport(
    store: Store, resolver: ClusterResolver, timeout: float | None, completions: CompletionQueue
) -> TorchTransport:
    """Let Gloo connect the workers, which have met.

    Raises:
        WorkerLostError: If it cannot.
    """
    torch, dist = import_torch()
    try:
        return TorchTransport(torch, dist, store, resolver, timeout, completions)
    except BaseException as error:
        store.close()
        if not isinstance(error, RuntimeError) or isinstance(error, AioReplicaError):
            raise
        address = resolver.coordinator_address
        raise WorkerLostError(
            f"The workers came to {address}, but could not be connected: {error}"
        ) from error


@final
class TorchTransport(Transport):
    """A process group with Gloo, and the store.

    Args:
        torch: The module.
        dist: The module torch.distributed.
        store: For this engine alone.
        resolver: Which worker this is, of how many.
        timeout: Of a collective, in seconds.
        completions: Of the loop that connects.

    Attributes:
        store: The same.
    """

    added = ("float32", "float64", "int32", "int64")

    def __init__(
        self,
        torch: ModuleType,
        dist: ModuleType,
        store: Store,
        resolver: ClusterResolver,
        timeout: float | None,
        completions: CompletionQueue,
    ) -> None:
        assert resolver.rank is not None  # checked by `connect`
        rank, size = resolver.rank, resolver.num_workers
        self.rank, self.size = rank, size
        self._torch, self._dist, self.store = torch, dist, store
        self._completions = completions
        self._limit = NO_TIMEOUT if timeout is None else timedelta(seconds=timeout + SLACK_S)
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise ContextError(
                    f"torch.distributed was initialised as worker {dist.get_rank()} of "
                    f"{dist.get_world_size()}, but this is worker {rank} of {size}."
                )
            group = dist.new_group(backend="gloo", timeout=self._limit)
        else:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", store.raw), rank=rank, world_size=size,
                timeout=self._limit,
            )  # fmt: skip
            group = dist.group.WORLD
        self._groups: dict[str, object] = {"": group}  # of torch, by the names of ours
        self._num_read = self._num_words = 0
        self._read_at = self._words_at = 0.0
        self._asked: Answer[list[Note]] | None = None  # the notes
        self._words: list[bytes] = [b""] * size  # the newest of each worker
        self._is_open = True
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    # ---- exchanges -----------------------------------------------------------------------

    def all_gather(self, group: Group, send: Array, recv: Array) -> Poll:
        if np.may_share_memory(send, recv):
            send = send.copy()
        dist = self._dist
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older
        work = gather(
            self._tensor(recv), self._tensor(send), self._process_group(group), async_op=True
        )
        return _poll_of(work, send, recv)

    def all_to_all(self, group: Group, sends: list[Array], recv: Array, counts: list[int]) -> Poll:
        send, own = joined(sends), [each.size for each in sends]
        work = self._dist.all_to_all_single(
            self._tensor(recv), self._tensor(send), counts, own,
            self._process_group(group), async_op=True,
        )  # fmt: skip
        return _poll_of(work, sends, send, recv)

    def broadcast(self, group: Group, buffer: Array, root: int) -> Poll:
        work = self._dist.broadcast(
            self._tensor(buffer), group=self._process_group(group), async_op=True, group_src=root
        )
        return _poll_of(work, buffer)

    def barrier(self, group: Group) -> Poll:
        return self.all_gather(group, np.zeros(1, np.uint8), np.empty(group.size, np.uint8))

    def add(self, group: Group, array: Array) -> Poll:
        work = self._dist.all_reduce(
            self._torch.from_numpy(array), group=self._process_group(group), async_op=True
        )
        return _poll_of(work, array)

    def _process_group(self, group: Group) -> object:
        """Return that of a group, which is made at the first exchange of it."""
        known = self._groups.get(group.name)
        if known is None:
            if not self._is_open:
                raise RuntimeError("The process groups have been destroyed.")
            known = self._groups[group.name] = self._dist.new_group(
                list(group.ranks), self._limit, "gloo", use_local_synchronization=True,
                group_desc=group.name,
            )  # fmt: skip
        return known

    def _tensor(self, array: Any) -> object:
        """Return a tensor of an array's memory, which may be read-only where it is only sent."""
        memory = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
        return self._torch.from_numpy(np.frombuffer(memory, np.uint8))

    # ---- notes ---------------------------------------------------------------------------

    def tell(self, note: Note) -> None:
        raw, data = self.store.raw, note.encode()
        if note.kind in (WAITING, PASSED):  # the next one takes its place
            self._num_words += 1  # the same again is a sign of life
            word = b"%d %s" % (self._num_words, data)
            self.store.ask(lambda: raw.set(f"word/{self.rank}", word))
            return

        def write() -> None:
            raw.set(f"note/{raw.add('notes', 1)}", data)

        with suppress(RuntimeError):  # the store is gone, and with it worker 0
            self.store.call(write)

    def notes(self, *, at_once: bool = False, waits: bool = True) -> list[Note]:
        found: list[Note] = []
        if at_once and self._asked is not None:  # before the notes of now were there
            found += self._answer(waits=True)
        now = monotonic()
        if self._asked is None and (at_once or now >= self._read_at + NOTES_S):
            self._read_at = now
            self._asked = self.store.ask(partial(self._read, at_once or now >= self._words_at))
        return found + self._answer(waits=waits)

    def _answer(self, *, waits: bool) -> list[Note]:
        """Return the notes that were asked for, if the store has answered."""
        asked = self._asked
        if asked is None or (waits and not self.store.is_silent and not asked.wait(ANSWER_S)):
            return []
        if not asked.is_done:
            return []
        self._asked = None
        return asked.result()

    def _read(self, with_words: bool) -> list[Note]:
        """Read what is new in the store; on its thread."""
        raw, found = self.store.raw, []
        for number in range(self._num_read + 1, raw.add("notes", 0) + 1):
            if not raw.check([f"note/{number}"]):
                break  # it is just being written
            found.append(Note.decode(raw.get(f"note/{number}")))
            self._num_read = number
        if with_words:
            self._words_at = monotonic() + WORDS_S
            words = raw.multi_get([f"word/{rank}" for rank in range(self.size)])
            for rank, word in enumerate(words):
                if rank != self.rank and word != self._words[rank]:
                    self._words[rank] = word
                    found.append(Note.decode(word.partition(b" ")[2]))
        return found

    # ---- the end -------------------------------------------------------------------------

    def explain(self, error: Exception, what: str) -> Failure | None:
        if not isinstance(error, RuntimeError):
            return None
        with suppress(RuntimeError):
            self.store.set(f"alive/{self.rank}", "1")  # first: the end may take its time
        self.end()
        reason = str(error).strip().splitlines()[0][:200]
        try:
            missing = self._missing()
        except GroupEndedError as ended:
            return ended.failure
        except RuntimeError:
            if self.rank == 0 or is_kept_by_torchrun():
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
        store, missing, start = self.store, set(range(self.size)), monotonic()
        while missing and monotonic() < start + (ALIVE_S if len(missing) == 1 else ALIVE_LONG_S):
            for note in self.notes(at_once=True):
                if note.kind in (LOST, ENDED, "stalled"):
                    raise GroupEndedError(Failure(note.kind, note.text, note.ranks, note.timeout))
            missing -= {each for each in missing if store.has(f"alive/{each}")}
            if missing:
                sleep(JOIN_PAUSE_S)
        return tuple(sorted(missing))

    def unreachable(self) -> tuple[int, ...]:
        is_here = self.rank == 0 or is_kept_by_torchrun()
        return (0,) if self.store.is_silent and not is_here else ()

    def end(self) -> None:
        """Close the connections; on a thread, as Gloo first waits for what is on its way."""
        groups = self._let_go()
        if groups:
            lane = Lane("torch.end", nice=0)
            lane.put(Op(self._completions, groups.clear, (), {}))
            lane.stop()

    def _let_go(self) -> list[object]:
        """Return the process groups, whose connections are closed when nothing refers to them."""
        if not self._is_open:
            return []
        self._is_open = False
        atexit.unregister(self._at_exit)
        groups = list(self._groups.values())
        self._groups.clear()
        with suppress(RuntimeError, ValueError):
            self._dist.destroy_process_group(groups[0])
        return groups

    def close(self) -> None:
        with suppress(RuntimeError):
            self.store.add("left", 1)
            end = monotonic() + LEAVE_S
            while self.rank == 0 and self.store.add("left", 0) < self.size and monotonic() < end:
                sleep(JOIN_PAUSE_S)  # others may still be in the last call, and read notes
        self._let_go().clear()
        self.store.close()

    def _at_exit(self) -> None:
        if self._pid == os.getpid():
            self._let_go().clear()


def _poll_of(work: Any, *held: object) -> Poll:
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
