"""The store of torch.distributed, called on a thread of its own, and how workers meet in it.

While the process that keeps the store is stopped, its calls ignore every timeout: so it is this
thread that hangs, and who asks waits with a deadline.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic, sleep
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar, cast, final

from ..devices import CompletionQueue, Lane, Op, new_gate
from ..errors import StallError, WorkerLostError
from ._resolver import ClusterResolver
from ._rows import workers_in_words
from ._transport import LOGGER, WARN_S

T = TypeVar("T")

ANSWER_S = 2.0
"""How long a call may take: a thousand times what the store needs."""

SILENT_S = 1.0  # without an answer, and later calls wait no more
STORE_S = 300.0  # to meet in the store, without a timeout
LEAVE_S = 0.7  # that worker 0, which keeps the store, waits for the others to leave
JOIN_PAUSE_S = 0.01


class StoreSilentError(RuntimeError):
    """Raised if the store does not answer in time."""


@final
class Answer(Generic[T]):
    """Result of a call of the store, once it is there.

    Args:
        fn: The call.
    """

    __slots__ = ("_error", "_fn", "_gate", "_result", "asked_at", "is_done")

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._gate = new_gate(None)
        self._result: T | None = None
        self._error: BaseException | None = None
        self.asked_at = monotonic()
        self.is_done = False

    def make(self) -> None:
        """Call the store; on its thread."""
        try:
            self._result = self._fn()
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who asked
            self._error = error
        self.is_done = True
        self._gate.open()

    def wait(self, seconds: float) -> bool:
        """Wait until it is there; False if that takes longer."""
        return self.is_done or self._gate.wait(seconds)

    def result(self) -> T:
        """Return what the call has returned, or raise what it has raised.

        Raises:
            StoreSilentError: If it has not come to its end.
        """
        if not self.is_done:
            raise StoreSilentError("the store does not answer")
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


@final
class Store:
    """A store whose calls keep a deadline.

    Args:
        raw: The store of torch.
        completions: Of the loop that connects; for the thread.
        answer_s: How long a call may take.

    Attributes:
        raw: The same.
    """

    def __init__(self, raw: Any, completions: CompletionQueue, answer_s: float = ANSWER_S) -> None:
        self.raw = raw
        self._answer_s = answer_s
        self._is_closed = False
        self._asked: SimpleQueue[Answer[Any] | None] = SimpleQueue()
        self._oldest: Answer[object] | None = None  # that the thread is at
        self._lane = Lane("torch.store", nice=0)
        self._lane.put(Op(completions, _serve, (self._asked, self._begin), {}))

    @property
    def is_silent(self) -> bool:
        """True if a call has not been answered for a while."""
        oldest = self._oldest
        return (
            oldest is not None and not oldest.is_done and (monotonic() > oldest.asked_at + SILENT_S)
        )

    def ask(self, fn: Callable[[], T]) -> Answer[T]:
        """Queue a call, or several in one function; does not wait."""
        answer = Answer(fn)
        self._asked.put(answer)
        return answer

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Return what a call returns; does not wait for a store that is silent.

        Raises:
            StoreSilentError: If there is no answer in time.
            RuntimeError: If the store is gone.
        """
        if self._is_closed:  # nobody is left to answer
            raise StoreSilentError("the store was given back")
        answer = self.ask(lambda: fn(*args))
        if not self.is_silent:
            answer.wait(self._answer_s)
        return answer.result()

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return it."""
        return int(self.call(self.raw.add, key, amount))

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.call(self.raw.set, key, value)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return bytes(self.call(self.raw.get, key))

    def has(self, key: str) -> bool:
        """Tell whether there is a value."""
        return bool(self.call(self.raw.check, [key]))

    def close(self) -> None:
        """End the thread after the calls that are queued; idempotent."""
        self._is_closed = True
        self._asked.put(None)
        self._lane.stop()

    def _begin(self, answer: Answer[object]) -> None:
        self._oldest = answer


def _serve(
    asked: SimpleQueue[Answer[object] | None], begin: Callable[[Answer[object]], None]
) -> None:
    while (answer := asked.get()) is not None:
        begin(answer)
        answer.make()


def is_kept_by_torchrun() -> bool:
    """Tell whether the store lives in torchrun's agent, and not in worker 0."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def meet(
    store: Store,
    resolver: ClusterResolver,
    timeout: float | None,
    announce: Callable[[], object] = lambda: None,
    look: Callable[[set[int]], object] = lambda _waited_for: None,
) -> None:
    """Wait in the store until all workers have come, and see whether they agree.

    Args:
        store: For this meeting.
        resolver: Which worker this is, of how many.
        timeout: How long to wait for the others, in seconds.
        announce: Called once it is sure that no other process has this worker's place.
        look: Called again and again, with those who are waited for; what it raises ends the wait.

    Raises:
        StallError: If not all came in time; names those that did not.
        ValueError: If they do not agree.
        WorkerLostError: If another worker has said why they cannot meet.
    """
    start, rank, size = monotonic(), resolver.rank, resolver.num_workers
    address = resolver.coordinator_address
    if store.add(f"came/{rank}", 1) > 1:
        raise ValueError(
            f"Worker {rank} was started twice: another process has come to {address} as worker "
            f"{rank} of {size}. Give each process a number of its own."
        )
    announce()
    store.set(f"word/{rank}", "")
    store.set(f"size/{rank}", str(size))
    warn_at = start + WARN_S
    waited_for = set(range(size))
    while True:
        for each in sorted(waited_for):
            if store.has(f"size/{each}"):
                told = int(store.get(f"size/{each}"))
                if told != size:
                    raise ValueError(
                        f"Worker {each} was told of {told} workers, and this one (worker {rank}) "
                        f"of {size}. Start all with the same number."
                    )
                waited_for.discard(each)
        is_late = timeout is not None and monotonic() > start + timeout
        if store.add("stalled", 0) or (is_late and waited_for):
            _give_up(store, resolver, timeout, waited_for)
        if not waited_for:
            return
        look(waited_for)
        if monotonic() > warn_at:
            warn_at = math.inf
            LOGGER.warning(
                "Worker %d has waited %.0f s at %s for %s to come, and goes on waiting.",
                rank, WARN_S, address, workers_in_words(tuple(sorted(waited_for))).lower(),
            )  # fmt: skip
        sleep(JOIN_PAUSE_S)


def _give_up(
    store: Store, resolver: ClusterResolver, timeout: float | None, waited_for: set[int]
) -> NoReturn:
    """Say why the workers do not meet: time is up, or another one has told so."""
    if store.has("reason"):
        is_stall, text, ranks = json.loads(store.get("reason"))
        if is_stall:
            raise StallError(text, timeout_s=timeout, ranks=tuple(ranks))
        raise WorkerLostError(text, ranks=tuple(ranks))
    give_up_together(store, resolver.rank, resolver.num_workers - len(waited_for))
    missing = tuple(sorted(waited_for))
    within = "" if timeout is None else f" within {timeout:g} s"
    who = f"{workers_in_words(missing)} did not come" if missing else "The others have not waited"
    raise StallError(
        f"{who} to {resolver.coordinator_address}{within}. Look whether each worker was started, "
        "or raise the timeout.",
        timeout_s=timeout,
        ranks=missing,
    )


def give_up_together(store: Store, rank: int | None, num_present: int) -> None:
    """Tell those who have come that time is up; worker 0 keeps the store until they know."""
    store.add("stalled", 1)
    end = monotonic() + LEAVE_S
    while rank == 0 and store.add("stalled", 0) < num_present and monotonic() < end:
        sleep(JOIN_PAUSE_S)


def open_store(dist: ModuleType, resolver: ClusterResolver, timeout: float | None) -> object:
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
