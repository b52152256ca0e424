"""Bytes and notes between workers of torch.distributed with Gloo: a process group, and the store.

When a worker dies only those that exchange with it learn that from Gloo. Each of them gives its
own connections up at once, so that the next ones fail too, and says in the store that it lives:
those that do not are named.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from types import ModuleType
from typing import Any, final

import numpy as np

from ..devices import CompletionQueue, Lane, Op
from ..errors import ContextError, WorkerLostError
from ..tree import Array
from ._communicator import ENDED, LOST, Failure
from ._rows import workers_in_words
from ._torch_reserves import KEEPER_S, Caller, Meeting, Questions, say_closed
from ._torch_resize import CONNECT_S, meet_more, meet_survivors
from ._torch_store import ANSWER_S, JOIN_PAUSE_S, LEAVE_S, Answer, is_kept_by_torchrun
from ._transport import PASSED, WAITING, Group, GroupEndedError, Note, Poll, Transport, joined

NO_TIMEOUT = timedelta(days=365)
SLACK_S = 5.0  # Gloo's own timeout comes after ours, which knows who is missing
NOTES_S = 0.05  # between two questions to the store
WORDS_S = 0.4  # between two that ask for the newest word of each worker too
MAX_WORDS = 16  # of one worker, each of another group
CONNECTING_S = 1.0  # between two looks whether those live who have not come to connect a split
EXIT_S = 2.0  # for Gloo to close connections: one that does so as the interpreter ends aborts it
ALIVE_S = 1.0  # for the others to say that they live
ALIVE_LONG_S = 3.0  # if more than one has not: rather is one of them slow


@final
class TorchTransport(Transport):
    """A process group with Gloo, and the store.

    Args:
        torch: The module.
        dist: The module torch.distributed.
        meeting: Where they have met; its store is for this engine alone.
        timeout: Of a collective, in seconds.
        completions: Of the loop that connects.
        ring: Called when something has come.

    Attributes:
        store: The same.
        knows_stalled: Whether those who are named by the failure of the group have stopped in it.
    """

    added = ("float32", "float64", "int32", "int64")

    def __init__(
        self,
        torch: ModuleType,
        dist: ModuleType,
        meeting: Meeting,
        timeout: float | None,
        completions: CompletionQueue,
        ring: Callable[[], None],
    ) -> None:
        rank, size, store = meeting.rank, meeting.size, meeting.store
        self.rank, self.size = rank, size
        self._torch, self._dist, self.store = torch, dist, store
        self._reserves = meeting.reserves
        self.knows_stalled = True
        self._completions, self._ring = completions, ring
        self._limit = NO_TIMEOUT if timeout is None else timedelta(seconds=timeout + SLACK_S)
        self._group = group = self._new_group(meeting)
        is_alone = isinstance(group, dist.ProcessGroupGloo)
        gloo = group if is_alone else group._get_backend(torch.device("cpu"))
        self._gloo: dict[str, Any] = {"": gloo}  # by the name of the group
        self._num_read = self._num_words = 0
        self._read_at = self._words_at = 0.0
        self._asked: Answer[list[Note]] | None = None  # the notes
        self._words: list[bytes] = [b""] * size  # the newest of each worker
        self._own_words: dict[str, bytes] = {}  # the newest of this one in each group
        self._is_open = True
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def _new_group(self, meeting: Meeting) -> Any:
        """Connect those who have met; beside the group of the program, if it has made one."""
        dist, place = self._dist, (meeting.rank, meeting.size)
        store = dist.PrefixStore("group", self.store.raw)
        if meeting.before is not None:  # those of the program's are others, or will be
            if not changes_timeouts(self._torch.__version__):
                return dist.ProcessGroupGloo(store, *place, self._limit)
            gloo = dist.ProcessGroupGloo(store, *place, timedelta(seconds=CONNECT_S))
            gloo._set_default_timeout(self._limit)
            return gloo
        if not dist.is_initialized():
            rank, size = place
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=self._limit
            )
            return dist.group.WORLD
        if (dist.get_rank(), dist.get_world_size()) != place:
            raise ContextError(
                f"torch.distributed was initialised as worker {dist.get_rank()} of "
                f"{dist.get_world_size()}, but this is worker {meeting.rank} of {meeting.size}."
            )
        return dist.new_group(backend="gloo", timeout=self._limit)

    def met_anew(self, num_new: int, failure: Failure | None, caller: Caller) -> Meeting:
        """Meet those who are left, or all there are with some who are added; let this group go.

        Args:
            num_new: How many to add; 0 if the group has ended.
            failure: Why it has.
            caller: Who waits for it.

        Raises:
            ContextError: If a worker could not be started, or this was abandoned.
            StallError: If not all came in time.
            WorkerLostError: If one was lost, or the others go on without this one.
        """
        if num_new:
            meeting = meet_more(self._dist, self._reserves, num_new, caller)
        else:
            known = failure if self.knows_stalled else None
            meeting = meet_survivors(self._dist, self._reserves, known, caller)
        self._let_go().clear()
        return meeting

    # ---- exchanges -----------------------------------------------------------------------

    def all_gather(self, group: Group, send: Array, recv: Array) -> Poll:
        if np.may_share_memory(send, recv):
            send = send.copy()
        tensors = self._tensor(recv), self._tensor(send)
        return self._exchange(group, lambda gloo: gloo._allgather_base(*tensors), send, recv)

    def all_to_all(self, group: Group, sends: list[Array], recv: Array, counts: list[int]) -> Poll:
        send, own = joined(sends), [each.size for each in sends]
        args = self._tensor(recv), self._tensor(send), counts, own
        return self._exchange(group, lambda gloo: gloo.alltoall_base(*args), sends, send, recv)

    def broadcast(self, group: Group, buffer: Array, root: int) -> Poll:
        tensor = self._tensor(buffer)
        return self._exchange(group, lambda gloo: gloo.broadcast(tensor, root), buffer)

    def barrier(self, group: Group) -> Poll:
        return self.all_gather(group, np.zeros(1, np.uint8), np.empty(group.size, np.uint8))

    def add(self, group: Group, array: Array) -> Poll:
        tensor = self._torch.from_numpy(array)
        return self._exchange(group, lambda gloo: gloo.allreduce(tensor), array)

    def _exchange(self, group: Group, begin: Callable[[Any], Any], *held: object) -> Poll:
        """Begin an exchange, once the group is connected; hold what Gloo may still use."""
        gloo = self._gloo.get(group.name)
        if gloo is not None:
            return _poll_of(begin(gloo), self._ring, held)
        if not self._is_open:
            raise RuntimeError("The process groups have been destroyed.")
        connecting = self._connecting(group)
        questions = Questions(self._dist, self._reserves, self._completions, KEEPER_S)
        require_living = _watch(group, questions if self._reserves.addresses else None)
        poll: Poll | None = None

        def poll_once_connected() -> bool:
            nonlocal poll
            if poll is None:
                if not connecting.is_done:
                    require_living()
                    return False
                self._gloo[group.name] = gloo = connecting.result()
                poll = _poll_of(begin(gloo), self._ring, held)
            return poll()

        return poll_once_connected

    def _connecting(self, group: Group) -> Answer[object]:
        """Let Gloo connect a split, on a thread: it waits until all members have come.

        With a connection to the store of its own, as that can be asked nothing else meanwhile; and
        by our name of the group: torch's own tells in which order groups are made.
        """
        raw = self.store.raw

        def connect() -> object:
            own = raw.clone() if hasattr(raw, "clone") else raw  # torch 2.7 has none
            try:
                store = self._dist.PrefixStore(f"split{group.name}", own)
                return self._dist.ProcessGroupGloo(store, group.rank, group.size, self._limit)
            finally:
                self._ring()

        answer = Answer(connect)
        self._on_a_thread(answer.make)
        return answer

    def _on_a_thread(self, fn: Callable[[], None]) -> None:
        lane = Lane("torch.groups", nice=0)
        lane.put(Op(self._completions, fn, (), {}))
        lane.stop()

    def _tensor(self, array: Any) -> object:
        """Return a tensor of an array's memory, which may be read-only where it is only sent."""
        memory = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
        return self._torch.from_numpy(np.frombuffer(memory, np.uint8))

    # ---- notes ---------------------------------------------------------------------------

    def tell(self, note: Note) -> None:
        raw, data = self.store.raw, note.encode()
        if note.kind in (WAITING, PASSED):  # the next one takes its place
            self._num_words += 1  # the same again is a sign of life
            self._own_words.pop(note.group, None)
            self._own_words[note.group] = data
            if len(self._own_words) > MAX_WORDS:
                del self._own_words[next(iter(self._own_words))]
            word = b"%d %s" % (self._num_words, b"\n".join(self._own_words.values()))
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
                    said = word.partition(b" ")[2]
                    found += [Note.decode(each) for each in said.split(b"\n")]
        return found

    # ---- the end -------------------------------------------------------------------------

    def explain(self, error: Exception, what: str) -> Failure | None:
        if isinstance(error, WorkerLostError):  # of a split that was not connected
            self.end()
            return _lost(error.ranks, what, str(error))
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
        return _lost(missing, what, reason)

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

    def forget(self, group: Group) -> None:
        self._gloo.pop(group.name, None)

    def end(self) -> None:
        """Close the connections; on a thread, as Gloo first waits for what is on its way."""
        groups = self._let_go()
        if not groups:
            return

        def wait_at_exit() -> None:
            if self._pid == os.getpid():
                ending.wait(EXIT_S)

        def let_end() -> None:
            groups.clear()
            atexit.unregister(wait_at_exit)

        ending = Answer(let_end)
        atexit.register(wait_at_exit)
        self._on_a_thread(ending.make)

    def leave(self) -> None:
        """Give the group up, and let the others see that."""
        say_closed(self._dist, self._reserves)
        self.end()
        self.store.close()

    def _let_go(self) -> list[object]:
        """Return the process groups, whose connections are closed when nothing refers to them."""
        if not self._is_open:
            return []
        self._is_open = False
        atexit.unregister(self._at_exit)
        groups: list[object] = [self._group, *self._gloo.values()]
        self._group = None
        self._gloo.clear()
        with suppress(RuntimeError, ValueError):
            self._dist.destroy_process_group(groups[0])
        return groups

    def close(self) -> Poll:
        """Begin to leave; worker 0, which keeps the store, waits for the others.

        They may still be in the last call, and read notes.
        """
        store, end = self.store, monotonic() + LEAVE_S
        say_closed(self._dist, self._reserves)
        left = store.ask(partial(store.raw.add, "left", 1))

        def poll() -> bool:
            nonlocal left
            with suppress(RuntimeError):  # the store is gone
                is_last = left.is_done and (self.rank or left.result() >= self.size)
                if not is_last and monotonic() < end:
                    if left.is_done:
                        left = store.ask(partial(store.raw.add, "left", 0))
                    return False
            self._let_go().clear()
            store.close()
            return True

        return poll

    def _at_exit(self) -> None:
        if self._pid == os.getpid():
            say_closed(self._dist, self._reserves)
            self._let_go().clear()


def _lost(ranks: tuple[int, ...], what: str, reason: str) -> Failure:
    are = "is" if len(ranks) == 1 else "are"
    text = f"{workers_in_words(ranks)} {are} gone; noticed in {what}: {reason}"
    return Failure(LOST, f"{text} Restart from the newest checkpoint.", ranks)


def changes_timeouts(version: str) -> bool:
    """Tell whether the timeout of a group can be changed once it is connected: from torch 2.10."""
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) >= (2, 10)


def _watch(group: Group, questions: Questions | None) -> Callable[[], None]:
    """Return what checks that the others of a split live, who may not have come to connect it.

    Gloo waits for them without a word: they are asked in their own stores, now and then.

    Raises:
        WorkerLostError: By what is returned, if one is gone.
    """
    others = [] if questions is None else [group.ranks[each] for each in group.others]
    look_at = monotonic() + CONNECTING_S

    def require_living() -> None:
        nonlocal look_at
        if questions is None or monotonic() < look_at:
            return
        look_at = monotonic() + CONNECTING_S
        words = {each: questions.word(each) for each in others}
        gone = tuple(each for each, word in words.items() if word is not None and word.is_gone)
        if gone:
            raise WorkerLostError("The split has not been connected yet.", ranks=gone)

    return require_living


def _poll_of(work: Any, ring: Callable[[], None], held: tuple[object, ...]) -> Poll:
    """Return a poll function of what Gloo does, which holds what it may still use."""
    is_done = False

    def note(_: object) -> None:
        nonlocal is_done
        is_done = True
        ring()

    work.get_future().add_done_callback(note)

    def poll(_held: tuple[object, ...] = held) -> bool:
        nonlocal work
        if not is_done:
            return False
        done, work = work, None  # it holds the connections, and this function may be kept
        try:
            done.wait()
        finally:
            del done
        return True

    return poll
