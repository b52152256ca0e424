"""Gloo's workers when their number changes: who is left meets anew, and so do those that are added.

Survivors meet in the store of the first of them, new workers and all others in that of worker 0: so
it is always worker 0 who keeps the store. The owner of the store calls the others together, counts
those who come, and asks those who do not for a sign of life in their own stores. Then all connect,
and decide in the store whether all could: either all of them go on, or none does.

Whom the others have left out may live, and think the same of them. So each says in its own store
whom it leaves out, and with whom it has gone on, before the owner looks into the stores of those
who are left out: where one of them leaves out a member, none of these goes on. Parts of a group
that cannot reach each other at all both do.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from time import monotonic, sleep
from types import ModuleType
from typing import Any, NoReturn, final

from ..errors import AioReplicaError, ContextError, StallError, WorkerLostError
from ._communicator import LOST, STALLED, Failure
from ._environment import MEETING, WORKERS_BEFORE
from ._processes import end_hanging, start_worker
from ._resolver import ClusterResolver
from ._rows import workers_in_words
from ._torch_reserves import (
    ATTEMPT,
    GONE_ON,
    KEEPER_S,
    LEFT_OUT,
    Caller,
    Meeting,
    Questions,
    Reserves,
    Word,
    announce_reserve,
    new_group,
    reach,
    reserve_of_process,
    reserves_in,
    say,
    say_newest_closed,
    split,
    word_in,
)
from ._torch_store import JOIN_PAUSE_S, Store, StoreSilentError, meet
from ._transport import LOGGER, WARN_S

REACH_S = 1.0  # for an answer of one who does not come
DECIDING_S = 5.0  # longer than the owner of the store the others wait for what it decides
CONNECT_S = 30.0  # for Gloo to connect all who have met


def own_address(dist: ModuleType, reserves: Reserves, rank: int) -> str:
    """Return where a store is found from here."""
    if rank == reserves.rank:
        return f"127.0.0.1:{reserve_of_process(dist).port}"
    return reserves.addresses[rank]


def decide(store: Store, value: str) -> bool:
    """Say whether those who have met go on; tell whether they do, which may be decided already."""
    return bytes(store.call(store.raw.compare_set, "decided", "", value)) == b"go"


def settle(dist: ModuleType, meeting: Meeting) -> None:
    """Go on with those who have met, once all of them could be connected.

    Raises:
        WorkerLostError: If not all could.
        RuntimeError: If who keeps the store is gone, or silent.
    """
    store, ranks, start = meeting.store, range(meeting.size), monotonic()
    assert meeting.before is not None  # else nothing has to be decided
    store.set(f"connected/{meeting.rank}", "")
    while not store.has("decided"):
        if meeting.rank == 0 and all(store.has(f"connected/{rank}") for rank in ranks):
            decide(store, "go")
        elif monotonic() > start + CONNECT_S + DECIDING_S:
            decide(store, "failed")
        else:
            sleep(JOIN_PAUSE_S)
    if not decide(store, "failed"):
        raise WorkerLostError(
            "One of the workers that have met could not be connected, so none of them goes on. "
            "Call shrink, maybe again."
        )
    if meeting.before.addresses:
        record = [list(meeting.members), meeting.reserves.encode()]
        say(dist, meeting.before, GONE_ON, json.dumps(record))
        store.set(f"gone on/{meeting.rank}", "")
        return
    # A worker that was added knows nothing yet: it is never the only one who has gone on.
    while not all(store.has(f"gone on/{rank}") for rank in meeting.members):
        if monotonic() > start + CONNECT_S + 2 * DECIDING_S:
            raise WorkerLostError("The workers that have started this one do not go on.")
        sleep(JOIN_PAUSE_S)


# ---- fewer workers -----------------------------------------------------------------------


def meet_survivors(
    dist: ModuleType,
    reserves: Reserves,
    failure: Failure | None,
    caller: Caller,
) -> Meeting:
    """Meet those who are left, in the reserve of the first of them.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group that has ended.
        failure: Why it has. Who has stopped is left out, and ended if it hangs on this host; of
            others that it names it is looked whether they live.
        caller: Who waits for it.

    Raises:
        ContextError: If it was abandoned.
        StallError: If not all who are left came in time. The next attempt goes on without.
        WorkerLostError: If the others go on without this worker.
    """
    everyone = set(range(len(reserves.addresses)))
    kind = "" if failure is None else failure.kind
    named = everyone.intersection(() if failure is None else failure.ranks)
    if kind == STALLED:
        if reserves.rank in named:
            raise left_out_error(reserves.rank)
        for each in named:
            end_hanging(each, reserves.processes[each])
        reserves.lost |= named
    if kind == LOST:
        reserves.suspects |= named
    survivors = Survivors(dist, reserves, caller)
    while True:
        try:
            return survivors.meet()
        except GoneOnError as news:  # of all this worker has missed no more than that they go on
            if reserves.rank not in news.members:
                raise left_out_error(reserves.rank) from None
            say(dist, reserves, GONE_ON, json.dumps([news.members, news.reserves.encode()]))
            reserves.become(news.reserves, news.members.index(reserves.rank))


@final
class GoneOnError(Exception):
    """Says that others have gone on, and with whom."""

    def __init__(self, members: list[int], reserves: Reserves) -> None:
        super().__init__(members)
        self.members = members
        self.reserves = reserves


@final
class ClosedError(Exception):
    """Says that a worker has closed its communicator, and takes part no more."""


@final
class Survivors:
    """The workers that are left of a group, on their way to meet.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group that has ended.
        caller: Who waits for it.
    """

    def __init__(
        self,
        dist: ModuleType,
        reserves: Reserves,
        caller: Caller,
    ) -> None:
        self._dist = dist
        self._reserves = reserves
        self._caller = caller
        self._start = monotonic()
        self._warn_at = self._start + WARN_S

    @property
    def _everyone(self) -> set[int]:
        return set(range(len(self._reserves.addresses)))

    def meet(self) -> Meeting:
        """Find the first who is left, and meet the others there.

        Raises:
            GoneOnError: If others of this generation have gone on to the next.
            Exception: As `meet_survivors`.
        """
        reserves, lost = self._reserves, self._reserves.lost
        while True:
            say(self._dist, reserves, LEFT_OUT, json.dumps(sorted(lost)))
            keeper = min(self._everyone - lost)
            address = own_address(self._dist, reserves, keeper)
            try:
                hub = reach(self._dist, address, reserves.place, KEEPER_S, self._caller.completions)
            except ConnectionRefusedError:
                self._lose(keeper)
                continue
            except TimeoutError:
                self._lose(keeper, only_if=keeper in reserves.suspects)
                self._require_time({keeper}, DECIDING_S)
                continue
            try:
                call = self._call_together if keeper == reserves.rank else self._come
                members, attempt, group = call(hub, keeper)
                store = Store(
                    self._dist.PrefixStore(str(attempt), hub.raw), self._caller.completions
                )
                store.set(f"word/{members.index(reserves.rank)}", "")
            except ClosedError:
                self._lose(keeper)
            except RuntimeError as error:
                if isinstance(error, AioReplicaError):
                    raise
                sleep(JOIN_PAUSE_S)  # the store is gone, or silent, as the next look will show
            else:
                after = reserves.after(members, group)
                return Meeting(store, after.rank, len(members), address, after, reserves, members)
            finally:
                hub.close()

    def _lose(self, rank: int, *, only_if: bool = True) -> None:
        if rank == self._reserves.rank:
            raise ContextError(f"Worker {rank} cannot reach its own store.")
        if only_if:
            self._reserves.lost.add(rank)

    def _require_time(self, missing: Iterable[int], more_s: float = 0.0) -> None:
        """Look at the clock.

        Raises:
            ContextError: If nobody waits for this any more.
            StallError: If time is up.
        """
        now = monotonic()
        timeout = self._caller.timeout
        self._caller.require_waiting("shrink")
        if timeout is not None and now > self._start + timeout + more_s:
            self._raise_stalled(missing)
        if now > self._warn_at:
            self._warn_at = math.inf
            LOGGER.warning(
                "%s not come to shrink for %g s; worker %d waits.",
                _have(missing), WARN_S, self._reserves.rank,
            )  # fmt: skip

    def _raise_stalled(self, missing: Iterable[int]) -> NoReturn:
        ranks, timeout = tuple(sorted(missing)), self._caller.timeout
        self._reserves.lost.update(ranks)
        within = "" if timeout is None else f" within {timeout:g} s"
        raise StallError(
            f"{_have(ranks)} not come to shrink{within}. Look whether each of them calls it, or "
            "call it again to go on without.",
            timeout_s=timeout,
            ranks=ranks,
        )

    # ---- in the store of this worker -----------------------------------------------------

    def _call_together(self, hub: Store, keeper: int) -> tuple[list[int], int, str]:
        """Wait for the others, and decide who goes on.

        Returns:
            Who does, the number of the attempt, and a name for them.

        Raises:
            Exception: As `meet`.
        """
        attempt = hub.add(ATTEMPT, 1)
        questions = Questions(self._dist, self._reserves, self._caller.completions, REACH_S)
        hub.set(f"{attempt}/came/{keeper}", "[]")
        looked_at, left_out, since = set[int](), set[int](), monotonic()
        while True:
            present, out = self._arrivals(hub, attempt)
            missing = self._everyone - out - present
            if out != left_out:  # to be said before it is looked what those say
                say(self._dist, self._reserves, LEFT_OUT, json.dumps(sorted(out)))
                looked_at, left_out, since = set(), out, monotonic()
            try:
                if keeper in out:  # one of the others leaves this worker out
                    raise left_out_error(keeper)
                for each in sorted(missing | (out - looked_at)):
                    word = questions.word(each, since if each in out else 0.0)
                    if word is not None and self._has_heard(each, word, out, present):
                        looked_at.add(each)
                if not missing and out <= looked_at:
                    members, group = sorted(present - out), new_group()
                    hub.set(f"{attempt}/members", json.dumps([members, group]))
                    return members, attempt, group
                self._require_time(missing)
            except StallError:
                hub.set(f"{attempt}/missed", json.dumps(sorted(missing)))
                raise
            except ContextError:
                hub.set(f"{attempt}/given up", "")
                raise
            except AioReplicaError:
                hub.set(f"{attempt}/members", json.dumps([[], ""]))
                raise
            sleep(JOIN_PAUSE_S)

    def _arrivals(self, hub: Store, attempt: int) -> tuple[set[int], set[int]]:
        """Return who has come, and whom these and this worker leave out."""
        present, out = set[int](), set(self._reserves.lost)
        for each in self._everyone:
            if hub.has(f"{attempt}/came/{each}"):
                present.add(each)
                out |= set(json.loads(hub.get(f"{attempt}/came/{each}")))
        return present, out

    def _has_heard(self, rank: int, word: Word, out: set[int], present: set[int]) -> bool:
        """Hear what one says that is missing or left out; true if it is out, and may be.

        Raises:
            GoneOnError: If it has gone on.
            WorkerLostError: If it leaves out one of those who are here.
        """
        if word.gone_on is not None:
            raise GoneOnError(*word.gone_on)
        if rank not in out:
            if word.is_gone or (word.is_silent and rank in self._reserves.suspects):
                self._lose(rank)
            return False
        if word.left_out & (present - out):
            raise left_out_error(self._reserves.rank)
        return True

    # ---- in that of another --------------------------------------------------------------

    def _come(self, hub: Store, keeper: int) -> tuple[list[int], int, str]:
        """Come to the store of another one, and wait for what it decides.

        Returns:
            Who goes on, the number of the attempt, and a name for them.

        Raises:
            ClosedError: If that one takes part no more.
            Exception: As `meet`.
        """
        reserves, attempt = self._reserves, 0
        while True:
            word = word_in(hub)
            if word.gone_on is not None:
                raise GoneOnError(*word.gone_on)
            if word.is_gone:
                raise ClosedError(keeper)
            newest = hub.add(ATTEMPT, 0)
            if newest > max(attempt, reserves.attempts.get(keeper, 0)):
                attempt = newest
                hub.set(f"{attempt}/came/{reserves.rank}", json.dumps(sorted(reserves.lost)))
            if attempt and hub.has(f"{attempt}/members"):
                reserves.attempts[keeper] = attempt
                members, group = json.loads(hub.get(f"{attempt}/members"))
                if reserves.rank not in members:
                    raise left_out_error(reserves.rank)
                return members, attempt, group
            if attempt and hub.has(f"{attempt}/given up"):  # by who is about to leave
                reserves.attempts[keeper], attempt = attempt, 0
            if attempt and hub.has(f"{attempt}/missed"):
                reserves.attempts[keeper] = attempt
                missed = set(map(int, json.loads(hub.get(f"{attempt}/missed"))))
                if reserves.rank in missed:
                    raise left_out_error(reserves.rank)
                self._raise_stalled(missed)
            self._require_time({keeper}, DECIDING_S)
            sleep(JOIN_PAUSE_S)


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
    num_new: int,
    caller: Caller,
) -> Meeting:
    """Start more workers, and meet them and the others in the reserve of worker 0.

    Each of the workers starts one, in turns, on its own host. If this fails on one, those that it
    has started are ended, and all others are told.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group so far.
        num_new: How many to add.
        caller: Who waits for it.

    Raises:
        ContextError: If this was abandoned.
        StallError: If not all came in time; names those that did not.
        WorkerLostError: If a worker is gone, one that was started has ended, or a worker could not
            start one.
    """
    rank, before = reserves.rank, len(reserves.addresses)
    place, size, address = f"{reserves.place}/grow", before + num_new, reserves.addresses[0]
    newcomers = Newcomers(dist, reserves, caller)
    store = newcomers.store_at(place)
    host, port = split(address)
    variables = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port),
        WORKERS_BEFORE: str(before), MEETING: place,
    }  # fmt: skip
    try:
        newcomers.start(range(before, size), variables)
        resolver = ClusterResolver(
            task_id=rank, num_workers=size, coordinator_address=address, source="grow"
        )
        announce = partial(announce_reserve, dist, store, rank, address, reserves.generation + 1)
        meet(store, resolver, caller.timeout, announce, newcomers.look)
        after = reserves_in(store, rank, size)
    except BaseException as error:
        newcomers.end()
        failure = _failure_to_grow(error, rank, address)
        raw, is_stall = store.raw, isinstance(failure, StallError)
        reason = json.dumps([is_stall, str(failure), getattr(failure, "ranks", ())])
        store.ask(lambda: (raw.compare_set("reason", "", reason), raw.add("stalled", 1)))
        store.close()
        if failure is error:
            raise
        raise failure from error
    return Meeting(store, rank, size, address, after, reserves, range(before))


@final
class Newcomers:
    """The workers that this one has started, and what is heard of the others meanwhile.

    Args:
        dist: The module torch.distributed.
        reserves: Of the group so far.
        caller: Who waits for it.
    """

    def __init__(
        self,
        dist: ModuleType,
        reserves: Reserves,
        caller: Caller,
    ) -> None:
        self._dist = dist
        self._reserves = reserves
        self._caller = caller
        self._questions = Questions(dist, reserves, caller.completions, KEEPER_S)
        self._started: dict[int, Any] = {}

    def store_at(self, place: str) -> Store:
        """Return the store of worker 0.

        Raises:
            StallError: If it does not answer in time.
            WorkerLostError: If it is gone.
        """
        start, timeout = monotonic(), self._caller.timeout
        address = own_address(self._dist, self._reserves, 0)
        while True:
            try:
                return reach(self._dist, address, place, KEEPER_S, self._caller.completions)
            except ConnectionRefusedError as error:
                raise WorkerLostError(
                    f"Worker 0 is gone: nobody listens at {address}.", ranks=(0,)
                ) from error
            except TimeoutError as error:
                self._caller.require_waiting("grow")
                if timeout is not None and monotonic() > start + timeout:
                    raise StallError(
                        f"Worker 0 does not answer at {address} within {timeout:g} s.",
                        timeout_s=timeout,
                        ranks=(0,),
                    ) from error

    def start(self, ranks: Iterable[int], variables: Mapping[str, str]) -> None:
        """Start this worker's share of the new ones."""
        for each in ranks:
            if each % len(self._reserves.addresses) == self._reserves.rank:
                self._started[each] = start_worker({**variables, "RANK": str(each)})
        if self._started:  # at the end it is called before the wait for these
            atexit.register(say_newest_closed, self._dist)

    def look(self, waited_for: set[int]) -> None:
        """See whether all who are waited for may still come.

        Raises:
            ContextError: If nobody waits for this any more.
            WorkerLostError: If one of them cannot come.
        """
        self._caller.require_waiting("grow")
        for each, process in self._started.items():
            if process.poll() is not None:
                raise WorkerLostError(
                    f"Worker {each}, which worker {self._reserves.rank} has started, ended with "
                    f"status {process.returncode} before all had come: see what it printed. The "
                    "program has to leave its place to ar.cluster.resolve().",
                    ranks=(each,),
                )
        for each in sorted(waited_for & set(range(len(self._reserves.addresses)))):
            word = self._questions.word(each)
            if word is not None and (word.is_gone or word.is_shrinking):
                raise WorkerLostError(
                    f"Worker {each} is gone, or has lost another one: it does not come to grow.",
                    ranks=(each,) if word.is_gone else (),
                )

    def end(self) -> None:
        """End what was started."""
        for process in self._started.values():
            process.kill()
            process.wait()


def _failure_to_grow(error: BaseException, rank: int, address: str) -> BaseException:
    if isinstance(error, StoreSilentError):
        text = f"Worker 0, which keeps the store at {address}, has stopped: it does not answer."
        return StallError(text, ranks=(0,))
    if isinstance(error, AioReplicaError) or not isinstance(error, Exception):
        return error
    if isinstance(error, RuntimeError):
        return WorkerLostError(f"Worker 0 is gone: its store at {address} is.", ranks=(0,))
    return WorkerLostError(
        f"Worker {rank} could not start more workers: {error!r}. Call shrink to go on as before."
    )
