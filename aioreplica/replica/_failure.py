"""End of a run: its causes, the exception it raises, and the notes of that exception."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, final

from ..errors import MergeMismatchError, WorkerLostError

if TYPE_CHECKING:
    pass


@final
class Failures:
    """Collects what went wrong in a run and decides which exception it raises.

    Args:
        device_names: Device of each replica of the run.
        step: Number of the run.
        fn_name: Name of the step function.
        first: What to add to ids, for their numbers among the replicas of all workers.

    Attributes:
        cause: Why the run was ended, if not because replicas failed: a mismatch, say.
    """

    def __init__(
        self, device_names: Sequence[str], step: int, fn_name: str, first: int = 0
    ) -> None:
        self.cause: BaseException | None = None
        self._device_names = device_names
        self._step = step
        self._fn_name = fn_name
        self._first = first
        self._failures: list[tuple[int, BaseException]] = []
        self._unwinding: list[tuple[int, BaseException]] = []

    def failed(self, replica_id: int, error: BaseException) -> None:
        """Record a replica that failed on its own."""
        self._failures.append((self._first + replica_id, error))

    def unwound(self, replica_id: int, error: BaseException) -> None:
        """Record what a replica raised while it was being cancelled."""
        self._unwinding.append((self._first + replica_id, error))

    def error(self) -> BaseException | None:
        """Return what the run raises, with its notes; None if nothing went wrong."""
        error = self.cause
        if self._failures and (error is None or isinstance(error, MergeMismatchError)):
            names = dict(enumerate(self._device_names, self._first))
            error = resolve_failures(self._failures, names, self._step, self._fn_name)
            if isinstance(self.cause, MergeMismatchError):  # which follows from the failure
                add_note_once(error, f"It ended the run for the others: {self.cause}")
        elif error is not None:
            self._unwinding += self._failures
        if error is not None:
            self.note_unwinding(error)
        return error

    def note_everything(self, error: BaseException) -> None:
        """Mention in notes what replicas raised, before the cancellation of the run or after it."""
        for replica_id, raised in sorted(self._failures, key=lambda failure: failure[0]):
            add_note_once(error, f"Replica {replica_id} had failed with {shown(raised)}.")
        self.note_unwinding(error)

    def note_unwinding(self, error: BaseException) -> None:
        """Mention in notes what replicas raised while they were being cancelled."""
        for replica_id, raised in sorted(self._unwinding, key=lambda failure: failure[0]):
            if raised is not error:
                add_note_once(
                    error, f"While being cancelled, replica {replica_id} raised {shown(raised)}."
                )


def error_of(ended: asyncio.Future[object]) -> BaseException | None:
    """Return what a task ended with; its own CancelledError if it was cancelled."""
    try:
        return ended.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled


def add_note_once(error: BaseException, note: str) -> None:
    """Attach a PEP 678 note unless the exception has it already or refuses notes."""
    with suppress(Exception):  # an exception of the user may define `add_note` in its own way
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def shown(error: BaseException) -> str:
    """Return the repr of an exception; its type where that fails."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - a broken repr must not hide the exception
        return f"a {type(error).__qualname__}"


def cause_of_unwinding(error: BaseException | None) -> BaseException | None:
    """Return why a replica withdrew that ended with `error`; None if nothing had failed.

    That is the exception itself, or for a CancelledError the one that was handled when it was
    raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if not isinstance(error, asyncio.CancelledError):
            return error
        seen.add(id(error))
        error = error.__context__
    return None


def resolve_failures(
    failures: Sequence[tuple[int, BaseException]],
    device_names: Mapping[int, str] | Sequence[str],
    step: int,
    fn_name: str,
) -> BaseException:
    """Choose what `run` raises after replicas failed on their own.

    One failure, or several of the same type and text, or of the same lost workers, gives the
    lowest replica's own exception object; a note names the replicas. Different failures give an
    ExceptionGroup in replica order.

    Args:
        failures: Replica id and exception, in any order.
        device_names: Device of each replica of the run, by id.
        step: Number of the run.
        fn_name: Name of the step function.
    """
    ordered = sorted(failures, key=lambda failure: failure[0])
    ids = [replica_id for replica_id, _ in ordered]
    first = ordered[0][1]
    if all(_alike(first, error) for _, error in ordered):
        where = ", ".join(f"{i} ({device_names[i]})" for i in ids[:8])
        where += f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        plural = "s" if len(ids) > 1 else ""
        add_note_once(first, f"Raised in replica{plural} {where} at step {step} of {fn_name}.")
        return first
    for replica_id, error in ordered:
        add_note_once(
            error, f"Raised in replica {replica_id} ({device_names[replica_id]}) at step {step}."
        )
    message = f"{len(ordered)} of {len(device_names)} replicas failed at step {step} of {fn_name}"
    return BaseExceptionGroup(message, [error for _, error in ordered])


def _alike(first: BaseException, other: BaseException) -> bool:
    if first is other:
        return True
    # Each may have met them in a group of its own.
    if isinstance(first, WorkerLostError) and isinstance(other, WorkerLostError):
        return first.ranks == other.ranks
    try:
        return type(first) is type(other) and str(first) == str(other)
    except Exception:  # noqa: BLE001 - a broken str makes two of them different, no more
        return False
