"""MPI, through mpi4py: started and ended on one thread of the process, and used by one at a time.

mpi4py starts MPI at its import, so that happens at the first connection only, and with our
options. MPI calls have no timeouts and cannot be cancelled: nothing here blocks in one, but for
the start and the end of MPI, and what changes the number of workers.

mpi4py does not keep the arrays of a non-blocking call alive: each poll function does.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from threading import Lock
from time import sleep
from types import ModuleType
from typing import Any, Self, final

import numpy as np

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op, new_gate
from ..errors import ContextError, StallError, WorkerLostError
from ..tree import Array
from ._arguments import require_timeout
from ._communicator import ENDED, LOST, STALLED, Failure, nothing_lost_error
from ._engine import EngineCommunicator, has_ended
from ._environment import WORKERS_BEFORE
from ._poller import Poller
from ._processes import FOLDER, ProcessId, end_hanging, own_command, this_process
from ._rows import workers_in_words
from ._transport import (
    ALARM,
    LEFT,
    LOGGER,
    NOTE_BYTES,
    PASSED,
    WAITING,
    WARN_S,
    Group,
    Link,
    Note,
    Poll,
    Transport,
    joined,
)

ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # which `mpirun --with-ft ulfm` sets
EXIT_S = 2.0  # for the others to hear why a group has ended, before this process goes
PAIRS = 8  # workers that exchange with each other directly: measured to be faster than MPI's own
MAX_TAG = 30_000  # every MPI has at least 32,767


@final
class MpiCommunicator(EngineCommunicator):
    """A worker of all those that `mpirun` has started; made by `connect`.

    Any MPI that mpi4py finds; `pip install "aioreplica[mpi]"` brings Open MPI. A thread
    of its own makes the calls of MPI, but for a moment of the event loop's where a task waits. If a
    worker dies, MPI's launcher ends the others as well. Started as `mpirun --with-ft ulfm` (Open
    MPI), they live on: each raises a `WorkerLostError`, and `shrink` makes a group of those that
    are left.
    """

    @classmethod
    async def connect(cls, *, timeout: float | None = None) -> Self:
        """Start MPI if need be, and meet all of its workers.

        Args:
            timeout: How long this, and each collective, may wait for the others, in seconds; None
                waits for ever.

        Raises:
            ImportError: If mpi4py or an MPI is not installed.
            ContextError: If the process was forked from one that uses MPI, or MPI was started
                without support for threads.
            StallError: If not all workers came before the timeout.
            TypeError: If `timeout` is not a number.
            ValueError: If `timeout` is not above 0.

        Cancellation:
            What was begun goes on in the background; connect again only in a new process.
        """
        timeout = require_timeout(timeout)
        runtime = REGISTRY.once("mpi", MpiRuntime)
        runtime.check_process()
        transport = await runtime.run("start MPI", timeout, runtime.new_transport)
        made = cls(
            Link(transport, runtime.poller, runtime.held), tuple(range(transport.size)), timeout
        )
        made.is_new = runtime.was_added
        return made

    async def _resized(self, num_new: int) -> MpiCommunicator:
        if not (num_new or self.has_failed):
            raise nothing_lost_error()
        runtime = REGISTRY.once("mpi", MpiRuntime)
        runtime.check_process()
        transport = self.link.transport
        assert isinstance(transport, MpiTransport)  # made by `connect`
        failure = self._failure
        hang = failure.ranks if failure is not None and failure.kind == STALLED else ()
        what, fn = "shrink the group", partial(transport.shrunk, hang)
        if num_new:
            what, fn = "grow the group", partial(transport.grown, num_new)
        try:
            resized = await runtime.run(what, self.timeout, fn)
        except StallError as error:  # nothing goes on behind this call
            self._end_all(Failure(STALLED, str(error), timeout=self.timeout))
            raise
        except WorkerLostError as error:
            self._end_all(Failure(LOST, str(error), error.ranks))
            raise
        link = Link(resized, runtime.poller, runtime.held)
        return MpiCommunicator(link, tuple(range(resized.size)), self.timeout)


@final
class MpiRuntime:
    """MPI in this process: its thread, its start and its end.

    Attributes:
        poller: Makes the calls of MPI; the event loop's thread does for a moment, with its lock.
        was_added: Whether others have started this process, and wait for it in `grow`.
        held: Memory of groups that have failed, to which MPI may write as long as it runs.
    """

    def __init__(self) -> None:
        self.poller = Poller(Lane("mpi", nice=0), Lock())
        self.mpi: Any = None  # the module; Any: mpi4py is optional
        self.failed = False  # a group has
        self.held: list[object] = []
        self.was_added = WORKERS_BEFORE in os.environ
        self._has_met = False  # those who have started it
        self._is_waiting = False  # what was begun has not come to its end
        self.is_stalled = False  # a worker has stopped, and nothing of MPI ends it
        self.newest: Any = None  # a communicator of all there are
        self._pid = os.getpid()
        self._is_ours = False
        self._completions: CompletionQueue | None = None

    def check_process(self) -> None:
        """Check that this is the process that has MPI.

        Raises:
            ContextError: If it is a fork of it, or something was left hanging in it.
        """
        if self._pid != os.getpid():
            raise ContextError(
                f"Process {self._pid} uses MPI, and this one was forked from it: it cannot use "
                "MPI. Fork before connecting, or start processes with the 'spawn' method."
            )

    async def run(self, what: str, timeout: float | None, fn: Any, *args: object) -> Any:
        """Run a call of MPI that blocks until the others have made it too.

        Raises:
            StallError: If that took too long.
        """
        self._completions = completions = CompletionQueue.of_running_loop()
        op: Op[object] = Op(completions, fn, args, {})
        self.poller.put(op)
        self._is_waiting = True
        warn_s = WARN_S if timeout is None else min(WARN_S, timeout)
        if not await has_ended(op, warn_s) and warn_s != timeout:
            LOGGER.warning(
                "Not all workers have come to %s for %g s; this one waits.", what, warn_s
            )
            await has_ended(op, None if timeout is None else timeout - warn_s)
        if not op.done():
            raise StallError(
                f"Not all workers came to {what} within {timeout:g} s. Look whether each of them "
                "gets as far as ar.cluster.connect(), or raise the timeout.",
                timeout_s=timeout,
            )
        self._is_waiting = False
        return op.result()

    # ---- on the lane's thread ------------------------------------------------------------

    def new_transport(self) -> MpiTransport:
        """Start MPI if that was not done, and take a communicator of its own.

        Raises:
            ContextError: If the workers are gone that have started this one.
        """
        if self.mpi is None:
            self._start()
        if not self.was_added:
            return MpiTransport(self.mpi, self.mpi.COMM_WORLD.Dup(), self)
        if self._has_met:
            raise ContextError(
                "This worker was added to others that have gone on without it. Start all again."
            )
        self._has_met = True
        return self.joined(self.mpi.Comm.Get_parent(), is_new=True)

    def joined(self, link: Any, *, is_new: bool) -> MpiTransport:
        """Return a transport between the workers on both sides of a link, the new ones behind.

        Raises:
            WorkerLostError: If one of them is gone.
        """
        try:
            comm = link.Merge(high=is_new)
            link.Disconnect()  # else Open MPI looks at it in the end, and ends in a fault
            comm.Set_errhandler(self.mpi.ERRORS_RETURN)
            # All end MPI or none: who does waits for the others.
            self.failed = comm.allreduce(self.failed, op=self.mpi.LOR)
            return MpiTransport(self.mpi, comm, self)
        except self.mpi.Exception as error:
            who = "those who started this worker" if is_new else "the new workers"
            raise WorkerLostError(f"MPI could not meet {who}: {error}") from error

    def _start(self) -> None:
        mpi = import_mpi()
        if not mpi.Is_initialized():
            init_mpi(mpi)
            self._is_ours = True
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise ContextError(
                "MPI was started without support for threads. Connect before mpi4py.MPI is "
                "imported, or set mpi4py.rc.thread_level = 'serialized' before that."
            )
        self.mpi = mpi
        if self._is_ours:
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """End MPI, which waits for the others; or leave that to the launcher after a failure."""
        if self._pid != os.getpid() or self._completions is None:
            return
        if self.failed or self._is_waiting:
            self._leave_failed()
            return
        gate = new_gate(None)

        def finalize() -> None:
            if not self.failed:  # the lane may just have learnt of it
                self.mpi.Finalize()
            gate.open()

        self.poller.lane.put(Op(self._completions, finalize, (), {}))
        self.poller.rest()
        while not gate.wait(1.0):
            pass
        if self.failed:
            self._leave_failed()

    def _leave_failed(self) -> None:
        """Let the others hear why; the launcher then ends them.

        Not with ULFM, where a worker that has stopped would stay for ever: nobody can go on from
        that, as shrinking needs workers that are gone, so all are ended.
        """
        sleep(EXIT_S)
        if self.is_stalled and survives_losses():
            self.newest.Abort(1)


def survives_losses() -> bool:
    """Tell whether MPI was started so that workers live on if another one dies."""
    return os.environ.get(ULFM_VARIABLE, "0") not in ("0", "false")


def shrink_error() -> ContextError:
    """Return the error of an MPI that ends with its first worker."""
    return ContextError(
        "This MPI cannot go on after the loss of a worker. Start the workers with "
        "`mpirun --with-ft ulfm` of Open MPI, or restart all of them."
    )


def import_mpi() -> ModuleType:
    """Return the module mpi4py.MPI, which is not to start MPI by itself.

    Raises:
        ImportError: If it is not installed, or finds no MPI; says what to install.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no library of MPI
        raise ImportError(
            f'MPI needs mpi4py and an MPI: pip install "aioreplica[mpi]". ({error})'
        ) from error
    return MPI


def init_mpi(mpi: ModuleType) -> None:
    """Start MPI, which waits for the other workers; lets other threads run meanwhile.

    mpi4py's own function keeps the interpreter's lock while it waits, so that no timeout could
    ever be told. Where the library cannot be found it is called all the same.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        (library,) = set(re.findall(r"(/\S*/libmpi(?:_abi)?\.so[.0-9]*)$", maps, re.MULTILINE))
        init = ctypes.CDLL(library).MPI_Init_thread
    except (OSError, ValueError, AttributeError):
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
        return
    if init(None, None, mpi.THREAD_SERIALIZED, ctypes.byref(ctypes.c_int())):
        raise ContextError("MPI could not be started; see what it has printed.")
    for each in (mpi.COMM_WORLD, mpi.COMM_SELF):
        each.Set_errhandler(mpi.ERRORS_RETURN)


@final
class MpiTransport(Transport):
    """One communicator of MPI for exchanges, and one for notes.

    Few workers, and those of a split, exchange messages in pairs; all of many use MPI's own
    collectives.

    Args:
        mpi: The module.
        comm: For this transport alone.
        runtime: Told when the group has failed.
    """

    def __init__(self, mpi: ModuleType, comm: Any, runtime: MpiRuntime) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._mpi = mpi
        self._comm = runtime.newest = comm
        self._runtime = runtime
        self._notes = comm.Dup()
        self._processes: list[ProcessId] = comm.allgather(this_process())
        for each in (self._comm, self._notes):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        self._max_tag = comm.Get_attr(mpi.TAG_UB) or MAX_TAG
        self._sent: list[Any] = []  # requests, and what they send
        self._buffer = np.zeros(NOTE_BYTES, np.uint8)
        self._receive = self._next_note()

    # ---- exchanges -----------------------------------------------------------------------

    def all_gather(self, group: Group, send: Array, recv: Array) -> Poll:
        rows = recv.reshape(group.size, -1)
        if self._goes_in_pairs(group):
            return self._exchange(group, [send] * group.size, rows)
        own = rows[self.rank]
        mine = self._mpi.IN_PLACE if np.may_share_memory(send, own) else self._of(send)
        return poll_of(self._comm.Iallgather(mine, self._of(recv)).Test, send, recv)

    def all_to_all(self, group: Group, sends: list[Array], recv: Array, counts: list[int]) -> Poll:
        if self._goes_in_pairs(group):
            return self._exchange(group, sends, np.split(recv, _starts(counts)[1:]))
        own, send = [each.size for each in sends], joined(sends)
        send_spec = [send, own, _starts(own), self._mpi.BYTE]
        recv_spec = [recv, counts, _starts(counts), self._mpi.BYTE]
        return poll_of(self._comm.Ialltoallv(send_spec, recv_spec).Test, sends, send, recv)

    def broadcast(self, group: Group, buffer: Array, root: int) -> Poll:
        if not group.name:
            return poll_of(self._comm.Ibcast(self._of(buffer), root).Test, buffer)
        if group.rank == root:
            requests = (self._send_to(group, buffer, rank) for rank in group.others)
            return self._poll(requests, buffer)
        return self._poll([self._receive_from(group, buffer, root)], buffer)

    def barrier(self, group: Group) -> Poll:
        if not group.name:
            return poll_of(self._comm.Ibarrier().Test)
        return self.all_gather(group, np.zeros(1, np.uint8), np.empty(group.size, np.uint8))

    def add(self, group: Group, array: Array) -> Poll:
        raise NotImplementedError("Sums are made by the engine's thread.")

    def _goes_in_pairs(self, group: Group) -> bool:
        """Tell whether members send each other messages: to make a communicator would block."""
        return bool(group.name) or self.size <= PAIRS

    def _exchange(
        self, group: Group, parts: Sequence[Array], rows: Array | Sequence[Array]
    ) -> Poll:
        receives = (self._receive_from(group, rows[rank], rank) for rank in group.others)
        sends = (self._send_to(group, parts[rank], rank) for rank in group.others)
        return self._poll(chain(receives, sends), parts, rows)

    def _send_to(self, group: Group, array: Array, rank: int) -> object:
        return self._comm.Isend(self._of(array), group.ranks[rank], self._tag_of(group))

    def _receive_from(self, group: Group, array: Array, rank: int) -> object:
        return self._comm.Irecv(self._of(array), group.ranks[rank], self._tag_of(group))

    def _tag_of(self, group: Group) -> int:
        """Return that of a group's messages; they arrive in order, in which workers agree."""
        return tag_of(group.name, self._max_tag) if group.name else 0

    def _poll(self, requests: Iterable[object], *held: object) -> Poll:
        """Begin requests; where one cannot, MPI may still write to the memory of those before."""
        begun: list[object] = []
        try:
            begun.extend(requests)
        except BaseException:
            self._runtime.held.append((begun, held))
            raise
        test = self._mpi.Request.Testall
        return poll_of(lambda: test(begun), *held)

    def _of(self, array: Array) -> object:
        return [array, self._mpi.BYTE]

    # ---- notes ---------------------------------------------------------------------------

    def tell(self, note: Note) -> None:
        data = np.zeros(NOTE_BYTES, np.uint8)
        encoded = note.encode()
        data[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        if note.kind not in (WAITING, PASSED, LEFT, ALARM):
            self._runtime.failed = True
            self._runtime.is_stalled |= note.kind == STALLED
        self._sent = [each for each in self._sent if not self._has_gone(each[0])]
        for rank in range(self.size):
            if rank != self.rank:
                try:
                    request = self._notes.Isend(self._of(data), rank)
                except self._mpi.Exception:
                    continue  # it is gone
                self._sent.append((request, data))

    def _has_gone(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True  # its receiver is gone

    def notes(self, *, at_once: bool = False, waits: bool = True) -> list[Note]:
        found = []
        while self.size > 1 and self._receive.Test():
            found.append(Note.decode(self._buffer.tobytes().rstrip(b"\0")))
            self._runtime.is_stalled |= found[-1].kind == STALLED
            self._receive = self._next_note()
        return found

    def _next_note(self) -> Any:
        self._buffer[:] = 0
        return self._notes.Irecv(self._of(self._buffer), self._mpi.ANY_SOURCE)

    # ---- the end -------------------------------------------------------------------------

    def explain(self, error: Exception, what: str) -> Failure | None:
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            return None
        code = error.Get_error_class()
        is_loss = code in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        # A test of several requests says only that one of them has failed.
        ranks = self._lost() if is_loss or code == mpi.ERR_IN_STATUS else ()
        if not is_loss and not ranks:
            text = f"MPI failed in {what} on worker {self.rank}: {error}"
            return Failure(ENDED, text, (self.rank,))
        who = f"{workers_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'}" if ranks else "?"
        text = f"{who} gone, as MPI says in {what}. Restart from the newest checkpoint."
        return Failure(LOST, text, ranks)

    def _lost(self) -> tuple[int, ...]:
        mpi = self._mpi
        try:
            failed, everyone = self._notes.Get_failed(), self._notes.Get_group()
        except NotImplementedError:  # an MPI that does not survive a loss
            return ()
        ranks = mpi.Group.Translate_ranks(failed, list(range(failed.Get_size())), everyone)
        return tuple(sorted(ranks))

    def unreachable(self) -> tuple[int, ...]:
        return ()

    def forget(self, group: Group) -> None:
        pass  # messages of a split have a tag, no more

    def end(self) -> None:
        self._runtime.failed = True
        if self not in self._runtime.held:  # notes may still come
            self._runtime.held.append(self)

    def close(self) -> Poll:
        self._receive.Cancel()
        return lambda: True

    def shrunk(self, hang: Sequence[int]) -> MpiTransport:
        """Return a transport between the workers that are left.

        Args:
            hang: Workers that have not gone, but do not come. Those on this host are ended.

        Raises:
            ContextError: If this MPI was not told to survive a loss.
        """
        mpi = self._mpi
        if not survives_losses():
            raise shrink_error()
        for rank in () if self.rank in hang else hang:
            end_hanging(rank, self._processes[rank])
        try:
            smaller = self._comm.Shrink()
            transport = MpiTransport(mpi, smaller, self._runtime)
        except NotImplementedError:
            raise shrink_error() from None
        except mpi.Exception as error:
            raise WorkerLostError(f"MPI could not shrink the group: {error}") from error
        self._runtime.is_stalled = False  # who had stopped is gone
        return transport

    def grown(self, num_new: int) -> MpiTransport:
        """Start workers as this one was, and return a transport between all there are then.

        Raises:
            ContextError: If MPI cannot start them.
            WorkerLostError: If a worker is gone.
        """
        mpi = self._mpi
        info = mpi.Info.Create({"wdir": FOLDER})
        arguments = [f"{WORKERS_BEFORE}={self.size}", *own_command()]
        if survives_losses():
            arguments.insert(0, f"{ULFM_VARIABLE}=1")
        try:
            started = self._comm.Spawn("env", arguments, num_new, info)
        except mpi.Exception as error:
            failure = self.explain(error, "grow")
            if failure is not None and failure.kind == LOST:
                raise failure.error() from error
            raise ContextError(
                f"MPI could not start {num_new} more workers: {error}. The launcher needs as many "
                "free slots: `mpirun --map-by :OVERSUBSCRIBE`, or a host file that has them. Open "
                "MPI 5.0 starts some 60 in one launch, then start all again."
            ) from error
        return self._runtime.joined(started, is_new=False)


@lru_cache(maxsize=1024)
def tag_of(group: str, most: int) -> int:
    """Return the tag of the messages in a group, from 1 to `most`: a hash of its name, of 31 bits.

    Of 30,000 tags two were the same for one pair in six of a hundred groups, whose messages would
    have crossed; of 2**31 that takes tens of thousands of groups.
    """
    digest = blake2b(group.encode(), digest_size=8).digest()
    return 1 + (int.from_bytes(digest, "little") >> 33) % most


def poll_of(test: Any, *held: object) -> Poll:
    """Return a poll function that holds what MPI may still use."""

    def poll(_held: tuple[Any, ...] = held) -> bool:
        return bool(test())

    return poll


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts))]
