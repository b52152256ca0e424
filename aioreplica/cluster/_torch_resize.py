"""Gloo's workers when their number changes: who is left meets anew, and so do those that are added.

The store of the first meeting lives in worker 0, and is gone with it. So each worker keeps one in
reserve from the start, and tells the others its address. Survivors meet in that of the first of
them, new workers in that of worker 0: so it is always worker 0 who keeps the store.

Whom the others have left out may live, and think the same of them. So each says in its own store
whom it leaves out, and before survivors go on, the first of them looks into the stores of those:
where it finds one of its own, none of them goes on. Parts of a group that cannot reach each other
at all both do.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from types import ModuleType
from typing import Any, final

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op
from ..errors import AioReplicaError, ContextError, StallError, WorkerLostError
from ._communicator import LOST, STALLED, Failure
from ._environment import MEETING, WORKERS_BEFORE
from ._processes import ProcessId, end_hanging, start_worker, this_process
from ._resolver import ClusterResolver
from ._rows import workers_in_words
from ._torch_store import JOIN_PAUSE_S, STORE_S, Answer, Store, give_up_together, meet
from ._transport import LOGGER, WARN_S

KEEPER_S = 3.0  # for an answer of the one who keeps the store, who may be busy
DECIDING_S = 5.0  # for that one to look into the stores of the others
REACH_S = 1.0  # for one of who is thought to be gone
LEFT_OUT = "left out"  # in a worker's own store: by generation, without whom it goes on


@final
@dataclass(slots=True)
class Reserves:
    """The stores that workers keep in reserve, and how often their number has changed.

    Attributes:
        addresses: Of each worker's store, by rank.
        processes: The workers' own.
        generation: How often the number of workers has changed.
        num_attempts: How often this worker has tried to change it since.
        lost: Ranks of those that are left out of the next attempt.
    """

    addresses: list[str] = field(default_factory=list)
    processes: list[ProcessId] = field(default_factory=list)
    generation: int = 0
    num_attempts: int = 0
    lost: set[int] = field(default_factory=set)

    def after(self, members: Sequence[int]) -> Reserves:
        """Return those of the workers that are left."""
        addresses = [self.addresses[rank] for rank in members]
        processes = [self.processes[rank] for rank in members]
        return Reserves(addresses, processes, self.generation + 1)

    def new_attempt(self, what: str) -> str:
        """Return the place in a store for another attempt, which all workers name alike."""
        self.num_attempts += 1
        return f"aioreplica/{what}/{self.generation}.{self.num_attempts}"


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
    """

    store: Store
    rank: int
    size: int
    address: str
    reserves: Reserves


# ---- stores in reserve, on a thread ------------------------------------------------------


def reserve_of_process(dist: ModuleType) -> Any:
    """Return the store that this process keeps in reserve, from the first call to its end."""
    held = REGISTRY.once("torch_reserves", dict[int, Any])
    store = held.get(os.getpid())
    if store is None:
        store = held[os.getpid()] = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=KEEPER_S), wait_for_workers=False
        )
    return store


def announce_reserve(dist: ModuleType, store: Store, rank: int, address: str) -> None:
    """Tell the others where this worker's reserve is, before the meeting at an address."""
    host = own_host_towards(*_split(address))
    shown = f"[{host}]" if ":" in host else host
    told = [f"{shown}:{reserve_of_process(dist).port}", *this_process()]
    store.set(f"reserve/{rank}", json.dumps(told))


def reserves_in(store: Store, size: int) -> Reserves:
    """Return what all workers have announced, after the meeting."""
    keys = [f"reserve/{rank}" for rank in range(size)]
    told = [json.loads(each) for each in store.call(store.raw.multi_get, keys)]
    generation = int(store.get("generation")) if store.has("generation") else 0
    addresses = [address for address, *_ in told]
    return Reserves(addresses, [ProcessId(*process) for _, *process in told], generation)


def own_host_towards(host: str, port: int) -> str:
    """Return the address of the interface that leads to a host; nothing is sent."""
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:  # this host, where the others have found it
        return host


def reach(
    dist: ModuleType, address: str, place: str, seconds: float, completions: CompletionQueue
) -> Store | None:
    """Return the store at an address; None if nobody answers there in time."""
    host, port = _split(address)
    try:
        socket.create_connection((host, port), seconds).close()  # torch would try again and again
    except OSError:
        return None
    limit = timedelta(seconds=seconds / 3)  # it tries twice

    def connect() -> Any:
        raw = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        raw.set_timeout(timedelta(seconds=STORE_S))
        return raw

    answer: Answer[Any] = Answer(connect)
    lane = Lane("torch.reach", nice=0)  # while the other process is stopped it hangs
    lane.put(Op(completions, answer.make, (), {}))
    lane.stop()
    answer.wait(seconds)
    try:
        return Store(dist.PrefixStore(place, answer.result()), completions)
    except RuntimeError:
        return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# ---- fewer workers -----------------------------------------------------------------------


def meet_survivors(
    dist: ModuleType,
    reserves: Reserves,
    rank: int,
    failure: Failure | None,
    timeout: float | None,
    completions: CompletionQueue,
) -> Meeting:
    """Meet those who are left, in the reserve of the first of them.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group that has ended.
        rank: The number of this worker in it.
        failure: Why it has ended. Whom it names is left out, and ended if it hangs on this host.
        timeout: How long to wait for the others, in seconds.
        completions: Of the loop that waits.

    Raises:
        StallError: If not all who are left came in time. The next attempt goes on without.
        WorkerLostError: If the others go on without this worker.
    """
    everyone = set(range(len(reserves.addresses)))
    if failure is not None and failure.kind in (LOST, STALLED):
        reserves.lost |= everyone.intersection(failure.ranks)
    if rank in reserves.lost:
        raise left_out_error(rank)
    if failure is not None and failure.kind == STALLED:
        for each in everyone.intersection(failure.ranks):
            end_hanging(each, reserves.processes[each])
    place = reserves.new_attempt("shrink")
    own = reserve_of_process(dist)
    while True:
        own.set(f"{LEFT_OUT}/{reserves.generation}", json.dumps(sorted(reserves.lost)))
        keeper = min(everyone - reserves.lost)
        address = f"127.0.0.1:{own.port}" if keeper == rank else reserves.addresses[keeper]
        store = reach(dist, address, place, KEEPER_S, completions)
        if store is not None:
            try:
                members = Survivors(dist, reserves, rank, store, completions).members(timeout)
            except RuntimeError as error:
                store.close()
                if isinstance(error, AioReplicaError):
                    raise
            except BaseException:
                store.close()
                raise
            else:
                own_rank = members.index(rank)
                store.set(f"word/{own_rank}", "")
                return Meeting(store, own_rank, len(members), address, reserves.after(members))
        if keeper == rank:
            raise ContextError(f"Worker {rank} cannot reach its own store at {address}.")
        reserves.lost.add(keeper)


@final
class Survivors:
    """One attempt of those who are left to agree on who they are.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group that has ended.
        rank: The number of this worker in it.
        store: Where they meet.
        completions: Of the loop that waits.
    """

    def __init__(
        self,
        dist: ModuleType,
        reserves: Reserves,
        rank: int,
        store: Store,
        completions: CompletionQueue,
    ) -> None:
        self._dist = dist
        self._reserves = reserves
        self._rank = rank
        self._store = store
        self._completions = completions
        self._everyone = set(range(len(reserves.addresses)))

    def members(self, timeout: float | None) -> list[int]:
        """Wait for the others; return who goes on, by the ranks that they had.

        Raises:
            StallError: If not all have come in time.
            WorkerLostError: If the others go on without this worker.
            RuntimeError: If who keeps the store is gone, or silent.
        """
        store, lost, start = self._store, self._reserves.lost, monotonic()
        keeper = min(self._everyone - lost)
        is_keeper = self._rank == keeper
        limit = math.inf if timeout is None else timeout if is_keeper else timeout + DECIDING_S
        warn_at = start + WARN_S
        store.set(f"came/{self._rank}", json.dumps(sorted(lost)))
        while not store.has("members"):
            now = monotonic()
            is_given_up = store.add("stalled", 0) > 0
            is_over = is_given_up or now > start + limit
            if is_keeper or is_over or now > warn_at:
                present, out, missing = self._arrivals()
                if is_keeper and not missing and not is_given_up:
                    members = sorted(present - out)
                    agreed = [] if self._are_left_out(members, out) else members
                    store.set("members", json.dumps(agreed))
                    continue
                if is_given_up and not missing:  # they have missed this one
                    raise left_out_error(self._rank)
                if is_over:
                    give_up_together(store, 0 if is_keeper else self._rank, len(present))
                    lost |= missing or {keeper}
                    raise self._stalled(missing or {keeper}, timeout)
                if now > warn_at:
                    warn_at = math.inf
                    LOGGER.warning(
                        "%s not come to shrink for %g s; worker %d waits.",
                        _have(missing), WARN_S, self._rank,
                    )  # fmt: skip
            sleep(JOIN_PAUSE_S)
        members = json.loads(store.get("members"))
        if self._rank not in members:
            raise left_out_error(self._rank)
        return list(members)

    def _arrivals(self) -> tuple[set[int], set[int], set[int]]:
        """Return who has come, whom they leave out, and who is missing."""
        store, present, out = self._store, set(), set(self._reserves.lost)
        for each in self._everyone:
            if store.has(f"came/{each}"):
                present.add(each)
                out |= set(json.loads(store.get(f"came/{each}")))
        return present, out, self._everyone - out - present

    def _stalled(self, missing: set[int], timeout: float | None) -> StallError:
        within = "" if timeout is None else f" within {timeout:g} s"
        return StallError(
            f"{_have(missing)} not come to shrink{within}. Look whether each of them "
            "calls it, or call it again to go on without.",
            timeout_s=timeout,
            ranks=tuple(sorted(missing)),
        )

    def _are_left_out(self, members: Sequence[int], out: set[int]) -> bool:
        """Tell whether someone who is thought to be gone lives, and leaves out one of these."""
        for rank in sorted(out):
            address = self._reserves.addresses[rank]
            store = reach(self._dist, address, LEFT_OUT, REACH_S, self._completions)
            if store is None:
                continue
            key = str(self._reserves.generation)
            with closing(store):
                if store.has(key) and set(members).intersection(json.loads(store.get(key))):
                    return True
        return False


def _have(missing: Iterable[int]) -> str:
    ranks = tuple(sorted(missing))
    return f"{workers_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def left_out_error(rank: int) -> WorkerLostError:
    """Return the error of a worker without whom the others go on."""
    return WorkerLostError(
        f"The others have gone on without worker {rank}, which was lost, has stopped or came too "
        "late. Start it again.",
        ranks=(rank,),
    )


# ---- more workers ------------------------------------------------------------------------


def meet_more(
    dist: ModuleType,
    reserves: Reserves,
    rank: int,
    num_new: int,
    timeout: float | None,
    completions: CompletionQueue,
) -> Meeting:
    """Start more workers, and meet them and the others in the reserve of worker 0.

    Each of the workers starts one, in turns, on its own host.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group so far.
        rank: The number of this worker in it.
        num_new: How many to add.
        timeout: How long to wait for the others, in seconds.
        completions: Of the loop that waits.

    Raises:
        StallError: If not all came in time; names those that did not.
        WorkerLostError: If worker 0 is gone, or a worker that this one has started has ended.
    """
    before, place = len(reserves.addresses), reserves.new_attempt("grow")
    size = before + num_new
    address = reserves.addresses[0]
    store = reach(dist, address, place, KEEPER_S, completions)
    if store is None:
        raise WorkerLostError(f"Worker 0 does not answer at {address}.", ranks=(0,))
    host, port = _split(address)
    variables = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port),
        WORKERS_BEFORE: str(before), MEETING: place,
    }  # fmt: skip
    try:
        started = {
            each: start_worker({**variables, "RANK": str(each)})
            for each in range(before, size)
            if each % before == rank
        }
        resolver = ClusterResolver(
            task_id=rank, num_workers=size, coordinator_address=address, source="grow"
        )
        if rank == 0:
            store.set("generation", str(reserves.generation + 1))
        announce_reserve(dist, store, rank, address)
        meet(store, resolver, timeout, started)
        return Meeting(store, rank, size, address, reserves_in(store, size))
    except BaseException:
        store.close()
        raise
