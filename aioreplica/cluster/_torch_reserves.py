"""Stores that Gloo's workers keep in reserve, where they are found when their number changes.

The store of the first meeting lives in worker 0, and is gone with it. So each worker keeps one of
its own from the start, and tells the others its address. What a worker says there is about one
generation of one group, and whoever reads it knows from the answer that the process lives:

* `attempt`: how often it has called its survivors together;
* `left out`: without whom it means to go on;
* `gone on`: with whom it has, and where these are found;
* `closed`: it takes part no more.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from types import ModuleType
from typing import Any, final
from uuid import uuid4

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op
from ..errors import ContextError
from ._processes import ProcessId, this_process
from ._torch_store import STORE_S, Answer, Store

KEEPER_S = 3.0  # for an answer of the one who keeps the store, who may be busy
BETWEEN_S = 0.5  # two questions to one worker
ATTEMPT, LEFT_OUT, GONE_ON, CLOSED = "attempt", "left out", "gone on", "closed"


@final
@dataclass(slots=True)
class Reserves:
    """Addresses of the workers of a group, and how often their number has changed.

    Attributes:
        group: Tells it from other groups that these processes have been in.
        addresses: Of each worker's store, by rank.
        processes: The workers' own.
        generation: How often the number of workers has changed.
        rank: The number of this worker among them.
        attempts: By the owner of the store, the number of the newest attempt to meet the survivors
            there that has ended here.
        suspects: Ranks of those that may be lost.
        lost: Ranks of those that are left out of the next attempt.
    """

    group: str = ""
    addresses: list[str] = field(default_factory=list)
    processes: list[ProcessId] = field(default_factory=list)
    generation: int = 0
    rank: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    @property
    def place(self) -> str:
        """Beginning of the keys of this generation."""
        return f"aioreplica/{self.group}/{self.generation}"

    def after(self, members: Sequence[int], group: str) -> Reserves:
        """Return those of the workers that are left, under another name."""
        addresses = [self.addresses[rank] for rank in members]
        processes = [self.processes[rank] for rank in members]
        rank = members.index(self.rank)
        return Reserves(group, addresses, processes, self.generation + 1, rank)

    def become(self, other: Reserves, rank: int) -> None:
        """Be those of a later generation."""
        self.group, self.addresses, self.processes = other.group, other.addresses, other.processes
        self.generation, self.rank = other.generation, rank
        self.attempts, self.suspects, self.lost = {}, set(), set()

    def encode(self) -> str:
        """Return it for a store, without what is this worker's own."""
        return json.dumps([self.group, self.addresses, self.processes, self.generation])

    @staticmethod
    def decode(data: bytes) -> Reserves:
        """Return what `encode` was called on."""
        group, addresses, processes, generation = json.loads(data)
        return Reserves(group, addresses, [ProcessId(*each) for each in processes], generation)


@final
@dataclass(frozen=True, slots=True)
class Meeting:
    """Workers that have met.

    Attributes:
        store: Theirs alone.
        rank: The number of this worker among them.
        size: How many they are.
        address: Of the store.
        reserves: The other stores.
        before: Those of the group that they were; None at first.
        members: Who of that group goes on, by rank.
    """

    store: Store
    rank: int
    size: int
    address: str
    reserves: Reserves
    before: Reserves | None = None
    members: Sequence[int] = ()

    def give_up(self) -> None:
        """Say that not all go on, unless that is decided; give the store back. Does not wait."""
        raw = self.store.raw
        if self.before is not None:
            self.store.ask(lambda: raw.compare_set("decided", "", "failed"))
        self.store.close()


@final
@dataclass(frozen=True, slots=True)
class Caller:
    """Task that waits for a meeting.

    Attributes:
        timeout: How long it waits for the others, in seconds.
        completions: Of its event loop.
        abandoned: Gets an item when it waits no more.
    """

    timeout: float | None
    completions: CompletionQueue
    abandoned: list[object]

    def require_waiting(self, what: str) -> None:
        """Check that it still waits.

        Raises:
            ContextError: If it was cancelled.
        """
        if self.abandoned:
            raise ContextError(f"This {what} was cancelled.")


def reserve_of_process(dist: ModuleType) -> Any:
    """Return the store that this process keeps in reserve, from the first call to its end."""
    held = REGISTRY.once("torch_reserves", dict[int, Any])
    store = held.get(os.getpid())
    if store is None:
        store = held[os.getpid()] = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=KEEPER_S), wait_for_workers=False
        )
    return store


def say(dist: ModuleType, reserves: Reserves, key: str, value: str) -> None:
    """Say something about a generation, in this worker's own store."""
    with suppress(RuntimeError):  # as the interpreter ends
        reserve_of_process(dist).set(f"{reserves.place}/{key}", value)


def say_closed(dist: ModuleType, reserves: Reserves) -> None:
    """Say that this worker takes part no more."""
    if reserves.addresses:  # none under torchrun
        say(dist, reserves, CLOSED, "")


def newest_reserves() -> dict[int, Reserves]:
    """Return those of the newest group, by the process."""
    return REGISTRY.once("torch_newest", dict[int, Reserves])


def say_newest_closed(dist: ModuleType) -> None:
    """Say so of the newest group, before this process waits for another one at its end."""
    reserves = newest_reserves().get(os.getpid())
    if reserves is not None:
        say_closed(dist, reserves)


# ---- addresses ---------------------------------------------------------------------------


def announce_reserve(
    dist: ModuleType, store: Store, rank: int, address: str, generation: int
) -> None:
    """Tell the others where this worker's reserve is, at a meeting.

    Args:
        dist: The module torch.distributed.
        store: Of the meeting.
        rank: The number of this worker; worker 0 names the group.
        address: Where the meeting is.
        generation: How often the number of workers has changed, which worker 0 tells.
    """
    if rank == 0:
        store.set("group", json.dumps([new_group(), generation]))
    host = own_host_towards(address, rank)
    shown = f"[{host}]" if ":" in host else host
    told = [f"{shown}:{reserve_of_process(dist).port}", *this_process()]
    store.set(f"reserve/{rank}", json.dumps(told))


def no_reserve() -> None:
    """Tell nothing: torchrun keeps the number of workers."""


def new_group() -> str:
    """Return what tells a group from all others."""
    return uuid4().hex


def reserves_in(store: Store, rank: int, size: int) -> Reserves:
    """Return what all workers have announced, after the meeting."""
    keys = [f"reserve/{rank}" for rank in range(size)]
    told = [json.loads(each) for each in store.call(store.raw.multi_get, keys)]
    group, generation = json.loads(store.get("group"))
    addresses = [address for address, *_ in told]
    processes = [ProcessId(*process) for _, *process in told]
    return Reserves(group, addresses, processes, generation, rank)


def own_host_towards(address: str, rank: int) -> str:
    """Return the name or address of this host that the others reach.

    Worker 0 is where the others have found it. Elsewhere it is the address of the interface that
    leads there, which is asked for without sending anything. Where that is the loopback interface
    this is the host of worker 0, whose name may well lead there only on itself.
    """
    host, port = split(address)
    if rank == 0:
        return host
    for family, kind, _, _, where in _addresses(host, port):
        with suppress(OSError), socket.socket(family, kind) as asked:
            asked.connect(where)
            own = str(asked.getsockname()[0])
            return host if own.startswith("127.") or own == "::1" else own
    return socket.gethostname()


def _addresses(host: str, port: int) -> list[Any]:
    with suppress(OSError):
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    return []


def split(address: str) -> tuple[str, int]:
    """Return the host and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# ---- asking ------------------------------------------------------------------------------


def reach(
    dist: ModuleType, address: str, place: str, seconds: float, completions: CompletionQueue
) -> Store:
    """Return the store at an address.

    Raises:
        ConnectionRefusedError: If no process listens there: it is gone.
        TimeoutError: If nobody answers in time.
    """
    host, port = split(address)
    try:
        socket.create_connection((host, port), seconds).close()  # torch would try again and again
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise TimeoutError(str(error)) from error
    limit = timedelta(seconds=seconds / 3)  # it tries twice

    def connect() -> Any:
        raw = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        raw.set_timeout(timedelta(seconds=STORE_S))
        return raw

    begun = REGISTRY.once("torch_reaching", dict[str, Answer[Any]])
    answer = begun.get(address)
    if answer is None:  # else it hangs, as the other process is stopped
        answer = begun[address] = Answer(connect)
        _on_a_thread(answer, completions)
    if not answer.wait(seconds):
        raise TimeoutError(f"{address} does not answer")
    begun.pop(address, None)
    try:
        return Store(dist.PrefixStore(place, answer.result()), completions)
    except RuntimeError as error:
        raise TimeoutError(str(error)) from error


@final
@dataclass(frozen=True, slots=True)
class Word:
    """Statement of a worker about a generation, if it makes any.

    Attributes:
        is_gone: No process listens at its address, or it has closed its communicator.
        is_silent: Nobody answers.
        is_shrinking: It wants to meet the survivors.
        left_out: Without whom it means to go on.
        gone_on: With whom it has, by the ranks that they had, and where they are found.
    """

    is_gone: bool = False
    is_silent: bool = False
    is_shrinking: bool = False
    left_out: frozenset[int] = frozenset()
    gone_on: tuple[list[int], Reserves] | None = None


@final
class Questions:
    """Questions to the stores of workers, asked on threads again and again.

    Args:
        dist: The module torch.distributed.
        reserves: Where the workers are.
        completions: Of the loop that waits.
        seconds: How long an answer may take.
    """

    def __init__(
        self, dist: ModuleType, reserves: Reserves, completions: CompletionQueue, seconds: float
    ) -> None:
        self._dist = dist
        self._reserves = reserves
        self._completions = completions
        self._seconds = seconds
        self._asked: dict[int, Answer[Word]] = {}

    def word(self, rank: int, since: float = 0.0) -> Word | None:
        """Return the newest word of a worker, None before the first; ask again if it is old.

        Args:
            rank: The worker.
            since: No answer counts to a question from before that.
        """
        answer = self._asked.get(rank)
        if answer is None or (answer.is_done and monotonic() > answer.asked_at + BETWEEN_S):
            asked = self._asked[rank] = Answer(partial(self.word_of, rank))
            _on_a_thread(asked, self._completions)
        if answer is None or not answer.is_done or answer.asked_at < since:
            return None
        return answer.result()

    def word_of(self, rank: int) -> Word:
        """Ask a worker, and wait for what it says."""
        address, place = self._reserves.addresses[rank], self._reserves.place
        try:
            store = reach(self._dist, address, place, self._seconds, self._completions)
        except ConnectionRefusedError:
            return Word(is_gone=True)
        except TimeoutError:
            return Word(is_silent=True)
        try:
            return word_in(store)
        except RuntimeError:
            return Word(is_silent=True)
        finally:
            store.close()


def word_in(store: Store) -> Word:
    """Return what the owner of a store says of a generation.

    Raises:
        RuntimeError: If the store is gone, or silent.
    """
    gone_on = None
    if store.has(GONE_ON):
        members, reserves = json.loads(store.get(GONE_ON))
        gone_on = members, Reserves.decode(reserves)
    is_shrinking = store.has(LEFT_OUT)
    left_out = frozenset(json.loads(store.get(LEFT_OUT)) if is_shrinking else ())
    return Word(store.has(CLOSED), False, is_shrinking, left_out, gone_on)


def _on_a_thread(answer: Answer[Any], completions: CompletionQueue) -> None:
    lane = Lane("torch.reach", nice=0)
    lane.put(Op(completions, answer.make, (), {}))
    lane.stop()
