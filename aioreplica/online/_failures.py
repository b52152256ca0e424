"""Blame for failed steps, on examples or on the step itself, and times to try again.

Plain decision code. An example that fails alone is set aside. But a step function that always
fails would set everything aside, so several in a row without a step that was kept between them are
the step's fault: they are no dead letters then, and the learner stops.

Invariants:
    * The variables are those before the first failure: steps that failed were undone.
    * Numbers between two failures in a row are dead letters of before, so `before` and `failed`
      say all about how far a learner has come for good.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import final

from ._intake import Taken

MAX_ERROR = 2000
"""How many characters of an error are kept with a dead letter."""


@final
class FailuresInARow:
    """Examples that failed alone since the last step that was kept.

    Args:
        limit: So many are the step's fault; None for no number.

    Attributes:
        failed: The examples, in order; all of them are set aside. Empty without a limit.
        before: What was the learned number before the first.
    """

    def __init__(self, limit: int | None) -> None:
        self.failed: list[Taken] = []
        self._limit = limit
        self._is_lifted = False
        self.before = 0

    @property
    def is_last_straw(self) -> bool:
        """True if one more failure would be the step's fault."""
        return self._limits and len(self.failed) + 1 >= (self._limit or 0)

    @property
    def _limits(self) -> bool:
        return self._limit is not None and not self._is_lifted

    def add(self, taken: Taken, learned_number: int) -> None:
        """Note an example that is set aside; `learned_number` is that before it."""
        if self._limits:
            if not self.failed:
                self.before = learned_number
            self.failed.append(taken)

    def lift(self) -> None:
        """Blame examples, however many they are, until a step is kept."""
        self.failed, self._is_lifted = [], True

    def kept(self) -> None:
        """Note a step that was kept."""
        self.failed, self._is_lifted = [], False

    def take_back(self, numbers: Collection[int]) -> list[Taken]:
        """Return those of some numbers, which are to be learned again; forget all."""
        found = [taken for taken in self.failed if taken.number in numbers]
        self.failed = []
        return found


def blame_of_step(count: int, first: int, last: int, error: str) -> str:
    """Return why a learner stops after so many failures, from a number to another one."""
    return (
        f"{count} examples in a row, {first} to {last}, failed by themselves, so the step is to "
        "blame, or what it needs. They are learned after `resume()` or a restart; "
        f"`resume(set_aside=True)` blames them instead. The last error: {error}"
    )


@final
class Backoff:
    """Times to try again something that failed: later from time to time.

    Args:
        first_s: Seconds to wait after the first failure; doubled after each further one.
        most_s: Most seconds to wait.

    Attributes:
        until: When to try again, by the clock of the caller; before all times if nothing failed.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self.until = -math.inf
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def failed(self, now: float) -> None:
        """Note a failure."""
        self.until = now + self._next_s
        self._next_s = min(2 * self._next_s, self._most_s)

    def succeeded(self) -> None:
        """Forget the failures."""
        self.until, self._next_s = -math.inf, self._first_s


def has_any(error: BaseException, kinds: tuple[type[Exception], ...]) -> bool:
    """Tell whether an error, or one in a group of them, is of some kinds."""
    if isinstance(error, kinds):
        return True
    group = error if isinstance(error, BaseExceptionGroup) else None
    return group is not None and group.split(kinds)[0] is not None


def described(error: BaseException) -> str:
    group = ""
    while isinstance(error, BaseExceptionGroup):
        group = group or f" ({error.message})"
        error = error.exceptions[0]
    try:
        text = f"{type(error).__name__}: {error}{group}"
    except Exception:  # noqa: BLE001 - its `__str__` is not ours
        text = f"{type(error).__name__}, whose text cannot be shown{group}"
    text = text.encode(errors="backslashreplace").decode()  # SQLite takes no lone surrogates
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."
