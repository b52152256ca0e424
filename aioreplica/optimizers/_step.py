"""One step of an optimizer, from the gradients of all replicas to the one write that ends it.

The order is always the same: aggregate, unscale, check, clip, apply. Where no norm is needed the
check goes along with the arithmetic: nothing is published before its outcome is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..collectives import Reducer
from ..values import PerReplica, Variable
from ._aggregate import Aggregation
from ._application import Application, Piece
from ._finite import non_finite_error
from ._total import Total
from ._update import Update
from ._work import fits_inline, num_bytes, run_here, run_in_threads

if TYPE_CHECKING:
    from ._optimizer import Optimizer


def take_step(
    optimizer: Optimizer,
    strategy: Any,  # Any: the strategies layer lies above this one
    gradients: Sequence[Any],
    variables: Sequence[Variable],
    global_step: Variable | None,
    scale: Any,
) -> Awaitable[None] | None:
    """Aggregate and apply, once for all replicas; return what to await if it takes long.

    Args:
        optimizer: Whose step it is.
        strategy: Whose replicas brought the gradients, None for code outside every strategy.
        gradients: One per variable, as a merge regroups them.
        variables: Theirs.
        global_step: Counts steps for the user, None if nothing does.
        scale: What losses were multiplied with: a PerReplica, a number, or None.
    """
    treatment = optimizer.treatment
    scales = None if scale is None else (scale,)
    if isinstance(scale, PerReplica):
        scales = scale.values
    aggregation = Aggregation(gradients, variables, scales, is_mean=treatment.is_mean)
    step = Step(optimizer, aggregation, global_step)
    return step.take(None if strategy is None else strategy.reducer)


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

    def take(self, reducer: Reducer | None) -> Awaitable[None] | None:
        """Do everything, or return what to await if it takes long."""
        reduced = self._aggregation.reduce(reducer)
        if isinstance(reduced, list) and fits_inline(self._aggregation.num_bytes):
            stages = self._stages(reduced)
            first = next(stages, ())
            if fits_inline(num_bytes(first)):
                run_here(_with_first(first, stages))
                return None
            return run_in_threads(_with_first(first, stages))
        return self._take_later(reduced)

    async def _take_later(self, reduced: list[Any] | Awaitable[list[Any]]) -> None:
        sums = reduced if isinstance(reduced, list) else await reduced
        await run_in_threads(self._stages(sums))

    def _stages(self, reduced: Sequence[Any]) -> Iterator[Sequence[Piece]]:
        self._totals = totals = self._aggregation.totals(reduced)
        clipping = self._treatment.clipping
        squares = [0.0] * len(totals)
        if clipping.needs_norms:
            yield [
                Piece(total.values.nbytes, partial(_measure, total, squares, index))
                for index, total in enumerate(totals)
            ]
        if not self._are_finite():
            yield from self._refuse()
            return
        clipping.apply(totals, squares)
        while True:
            application = self._application()
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

    def _application(self) -> Application:
        scaling = self._treatment.loss_scaling
        return self._optimizer.new_application(
            self._totals,
            self._global_step,
            {} if scaling is None else scaling.after(is_finite=True),
        )

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
            scaling = treatment.loss_scaling
            changes = {} if scaling is None else dict(scaling.after(is_finite=False))
            update = Update([treatment.skipped, *changes])
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
