"""One step of an optimizer, from the gradients of all replicas to the one write that ends it.

The order is always the same: aggregate, unscale, check, clip, apply. Where no norm is needed the
check goes along with the arithmetic: nothing is published before its outcome is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..collectives import Reducer
from ..values import Variable
from ._aggregate import Aggregation, Column
from ._application import Piece
from ._finite import non_finite_error
from ._total import Total, quiet
from ._update import Update
from ._work import fits_inline, num_bytes, run_here, run_in_threads

if TYPE_CHECKING:
    from ._optimizer import Optimizer


def take_step(
    optimizer: Optimizer,
    reducer: Reducer | None,
    columns: Sequence[Column],
    variables: Sequence[Variable],
    global_step: Variable | None,
    scales: Sequence[Any] | None,
    *,
    is_blocking: bool = False,
) -> Awaitable[None] | None:
    """Aggregate and apply, once for all replicas; return what to await if it takes long.

    Args:
        optimizer: Whose step it is.
        reducer: Sums what cannot be summed as it is read; None for code outside every strategy.
        columns: The gradients of each variable, one per replica.
        variables: Theirs.
        global_step: Counts steps for the user, None if nothing does.
        scales: What losses were multiplied with: one number per replica, or None.
        is_blocking: Whether to do everything in the calling thread, however long it takes.
    """
    is_mean = optimizer.treatment.is_mean
    aggregation = Aggregation(columns, variables, scales, is_mean=is_mean)
    return Step(optimizer, aggregation, global_step).take(reducer, is_blocking=is_blocking)


@final
class Step:
    """Aggregates gradients, judges them, and applies them or not.

    Args:
        optimizer: Whose step it is.
        aggregation: The gradients of all replicas.
        global_step: Counts steps for the user, None if nothing does.
    """

    __slots__ = ("_aggregation", "_global_step", "_optimizer", "_totals", "_treatment")

    def __init__(
        self,
        optimizer: Optimizer,
        aggregation: Aggregation,
        global_step: Variable | None,
    ) -> None:
        self._optimizer = optimizer
        self._treatment = optimizer.treatment
        self._aggregation = aggregation
        self._global_step = global_step
        self._totals: list[Total] = []

    def take(self, reducer: Reducer | None, *, is_blocking: bool = False) -> Awaitable[None] | None:
        """Do everything, or return what to await if it takes long."""
        needs_sums = self._treatment.clipping.needs_norms or not self._optimizer.is_elementwise
        if not needs_sums and self._aggregation.can_wait(reducer):
            return self._take_now(self._aggregation.unsummed(), is_blocking=is_blocking)
        if not is_blocking and self._aggregation.takes_long(reducer):
            return self._take_later(reducer)
        reduced = self._aggregation.reduce(reducer, is_blocking=True)
        assert isinstance(reduced, list)  # it was done here
        return self._take_now(self._aggregation.totals(reduced), is_blocking=is_blocking)

    def _take_now(self, totals: list[Total], *, is_blocking: bool) -> Awaitable[None] | None:
        stages = self._stages(totals)
        first = next(stages, ())
        work = _with_first(first, stages)
        if is_blocking or fits_inline(num_bytes(first)):
            run_here(work)
            return None
        return run_in_threads(work)

    async def _take_later(self, reducer: Reducer | None) -> None:
        # Begun here, not before: a step of a run that is given up is closed unawaited.
        with quiet():  # also in the threads, which run in copies of this context
            reduced = self._aggregation.reduce(reducer)
            if not isinstance(reduced, list):
                reduced = await reduced
        await run_in_threads(self._stages(self._aggregation.totals(reduced)))

    def _stages(self, totals: list[Total]) -> Iterator[Sequence[Piece]]:
        self._totals = totals
        clipping = self._treatment.clipping
        squares = [0.0] * len(totals)
        if clipping.needs_norms:
            yield [
                Piece(total.num_bytes, partial(_measure, total, squares, index))
                for index, total in enumerate(totals)
            ]
        if not self._are_finite():
            yield from self._refuse()
            return
        clipping.apply(totals, squares)
        while True:
            application = self._optimizer.new_application(totals, self._global_step)
            yield application.pieces()
            if not self._are_finite():
                yield from self._refuse()
                return
            if application.commit():  # else another run has written: build on that
                return

    def _are_finite(self) -> bool:
        if self._treatment.on_non_finite == "ignore":
            return True
        return all(total.is_finite for total in self._totals)

    def _refuse(self) -> Iterator[Sequence[Piece]]:
        """Raise, or skip the step: only the loss scale and the count of skipped steps change."""
        treatment = self._treatment
        if treatment.skipped is None:
            found: list[BaseException] = []

            def look() -> None:
                found.append(non_finite_error(self._aggregation, self._totals))

            yield [Piece(self._aggregation.num_bytes, look)]
            raise found[0]
        while True:
            update = Update([treatment.skipped, *treatment.scale_variables])
            changes = treatment.scale_after(is_finite=False)
            update.replace(treatment.skipped, treatment.skipped.components[0] + 1)
            for variable, value in changes.items():
                update.replace(variable, value)
            if update.commit():
                return

    def __repr__(self) -> str:
        return f"<Step of {self._optimizer!r} | {self._aggregation!r}>"


def _measure(total: Total, squares: list[float], index: int) -> None:
    squares[index] = total.squares()


def _with_first(
    first: Sequence[Piece], rest: Iterator[Sequence[Piece]]
) -> Iterator[Sequence[Piece]]:
    yield first
    yield from rest
