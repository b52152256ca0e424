"""Progress of closures beside that of checkpoints: what is undone when a checkpoint comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from ._splits import Leases

MAX_NAMED = 16_384
"""So many finished closures are known by name."""

MAX_CUTS = 8
"""So many looks of checkpoints are remembered, the newest ones."""


class Numbered(Protocol):
    """Interface of a closure.

    Attributes:
        number: Its number in the strategy.
        fn_name: Name of its function.
    """

    number: int
    fn_name: str


@final
@dataclass(frozen=True, slots=True)
class Reopened:
    """Result of `ParameterServerStrategy.reopen`: what has to be done again.

    Closures are named as `learn #17`, in the order in which they were scheduled.

    Attributes:
        step: The step that was restored; None without a checkpoint.
        unfinished: Closures that were not over when the cluster was lost.
        undone: Closures that had finished, and whose updates the checkpoint does not have: the last
            16,384 of them. All of this program's, if the checkpoint is not one of its last eight.
        num_undone: How many of these there are.
        iterators: Whether iterators of per-worker datasets have gone back with the checkpoint;
            else they have ended, and `next` says so.
    """

    step: int | None
    unfinished: tuple[str, ...]
    undone: tuple[str, ...]
    num_undone: int
    iterators: bool


@final
class IteratorCut(NamedTuple):
    """State of closures and iterators when a checkpoint looked at the variables.

    Attributes:
        contents: Closures whose updates were in the variables, as ranges of those that have
            finished, in the order in which they did.
        leases: What was left of each iterator.
    """

    contents: tuple[range, ...]
    leases: dict[int, Leases]


@final
class ClosureProgress:
    """Knows what finished since the last checkpoints, what was lost, and what to tell servers."""

    def __init__(self) -> None:
        self._finished: deque[tuple[int, int, str]] = deque(maxlen=MAX_NAMED)
        self._num_finished = 0
        self._contents: list[range] = []  # which of them are in the variables
        self._unfinished: dict[int, str] = {}
        self._cuts: dict[int, IteratorCut] = {}
        self._untold: dict[int, bool] = {}  # closures that are over, and whether they failed

    def finished(self, closure: Numbered) -> None:
        """Learn that a closure has ended well."""
        self._untold[closure.number] = False
        index = self._num_finished
        self._num_finished += 1
        self._finished.append((index, closure.number, closure.fn_name))
        contents = self._contents
        begin = contents.pop().start if contents and contents[-1].stop == index else index
        contents.append(range(begin, index + 1))

    def failed(self, closures: Iterable[Numbered]) -> None:
        """Learn that closures that were under way have ended badly."""
        self._untold.update((each.number, True) for each in closures)

    def untold(self, oldest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the closures whose end servers do not know: those that failed, those that did not.

        Each report has them until one has come to all servers: if it overtakes another one, what a
        failed closure has taken is not for learned. Below `oldest` all others have finished.
        """
        failed = tuple(number for number, has_failed in self._untold.items() if has_failed)
        others = [number for number, has_failed in self._untold.items() if not has_failed]
        self.told(number for number in others if number < oldest)
        return failed, tuple(number for number in others if number >= oldest)

    def told(self, numbers: Iterable[int]) -> None:
        """Learn that all servers know of the end of closures."""
        for number in numbers:
            self._untold.pop(number, None)

    def lost(self, closures: Iterable[Numbered]) -> None:
        """Learn that closures were lost with the cluster."""
        self._unfinished.update((each.number, each.fn_name) for each in closures)

    def cut(self, number: int, leases: Mapping[int, Leases]) -> int:
        """Learn that a checkpoint looks at the variables, while no closure is under way.

        Returns:
            The number of the next closure, by which the cut is known again: that which was given,
            or a later one, if another cut has that.
        """
        contents = tuple(self._contents)
        while number in self._cuts and self._cuts[number].contents != contents:
            number += 1
        self._cuts.pop(number, None)
        self._cuts[number] = IteratorCut(contents, dict(leases))
        for old in [*self._cuts][:-MAX_CUTS]:
            del self._cuts[old]
        return number

    def found(self, number: int) -> IteratorCut | None:
        """Return the cut that a restored checkpoint is of; None if it is of no known one."""
        return self._cuts.get(number)

    def forget_iterators(self, numbers: Iterable[int]) -> None:
        """Learn that the program has no use for iterators any more."""
        for number in numbers:
            for each in self._cuts.values():
                each.leases.pop(number, None)

    def go_back(self, step: int | None, cut: IteratorCut | None) -> Reopened:
        """Go back to a cut, or to the beginning; return what that undoes."""
        kept = () if cut is None else cut.contents
        held, self._contents = self._contents, [*kept]
        num_undone = sum(len(each) - sum(_num_both(each, one) for one in kept) for each in held)
        undone = [
            (number, name)
            for index, number, name in self._finished
            if any(index in each for each in held) and not any(index in each for each in kept)
        ]
        unfinished, self._unfinished = sorted(self._unfinished.items()), {}
        return Reopened(
            step, _named(unfinished), _named(sorted(undone)), num_undone, cut is not None
        )

    def __repr__(self) -> str:
        return f"<ClosureProgress | {self._num_finished} finished, {len(self._cuts)} cuts>"


def _num_both(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def _named(closures: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(f"{name} #{number}" for number, name in closures)
