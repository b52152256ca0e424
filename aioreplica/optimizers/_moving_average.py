"""Exponential moving averages of variables, for evaluation with smoother weights."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, final

import numpy as np

from ..collectives import Job
from ..context import CLOSURE, PLACE
from ..errors import ContextError
from ..replica import CallSite, Once, RunningReplica, SyncGroup
from ..tree import Array, DType
from ..values import DividedVariable, Variable, is_floating
from ._checks import (
    checked_decay,
    replica_on_device,
    require_cross_replica_context,
    require_outside_replicas,
    require_owner,
)
from ._slots import new_variable, working_dtype
from ._staged_write import StagedWrite
from ._step import run_stages

Components: TypeAlias = tuple[Array, ...]


@final
class ExponentialMovingAverage:
    """Keeps a variable beside each of some variables that follows it slowly.

    Make it in `strategy.scope()`; call `update` after each step. An average starts at the value
    its variable has then, and moves by `1 - decay` of the way at each update. That of a variable of
    half precision is in float32: in float16 it would stop where a step is less than a rounding.

    Args:
        var_list: The variables.
        decay: How much of the old average stays.
        warm_up: Whether the decay starts smaller: at update n it is at most (1 + n) / (10 + n), so
            that the first averages are not those of the initial values.

    Raises:
        TypeError: If `var_list` holds something else than floating-point variables, or the decay
            is not a number.
        ValueError: If there are no variables, or the decay is not in [0, 1).
        ContextError: If made inside a replica, the variables belong to another strategy, or they
            live on parameter servers.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable(0.0)
        >>> ema = ExponentialMovingAverage([w], decay=0.75)
        >>> async def main():
        ...     await w.assign(4.0)
        ...     await ema.update()
        ...     async with ema.swapped():
        ...         return w.value
        >>> print(asyncio.run(main()), w.value)
        1.0 4.0

    Source:
        tf.train.ExponentialMovingAverage, warm-up included.
    """

    def __init__(
        self, var_list: Sequence[Variable], decay: float = 0.999, *, warm_up: bool = False
    ) -> None:
        require_outside_replicas(type(self).__name__)
        self._decay = checked_decay("decay", decay)
        self._warm_up = bool(warm_up)
        if not isinstance(var_list, (list, tuple)) or not var_list:
            raise ValueError(f"var_list must be a list of variables, got {var_list!r}.")
        for variable in var_list:
            if not isinstance(variable, Variable) or not is_floating(variable.dtype):
                raise TypeError(f"Averages are of floating-point variables, got {variable!r}.")
        closure = CLOSURE.get()
        for variable in var_list:
            if closure is not None and closure.takes([(None, variable)]):
                raise ContextError(
                    f"An average of {variable.name!r} cannot be made in a closure, as its value "
                    "lives on parameter servers. Make a variable for the average in the scope of "
                    "the strategy, and assign it in the closure."
                )
        strategy = PLACE.get().strategy
        require_owner(var_list, strategy or var_list[0].store.owner)
        owner = var_list[0].store.owner
        self._averages = {
            variable: new_variable(
                owner,
                variable.components[0].astype(working_dtype(variable.dtype)),
                f"{variable.name}/average",
                variable.division if isinstance(variable, DividedVariable) else None,
            )
            for variable in var_list
        }
        self._num_updates = new_variable(owner, np.int64(0), "num_averages")

    def average(self, variable: Variable) -> Variable:
        """Return the average of a variable.

        Raises:
            ValueError: If it has none.
        """
        if variable not in self._averages:
            raise ValueError(f"There is no average of {variable!r}. Name it in var_list.")
        return self._averages[variable]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Everything it remembers: the averages, and the number of updates."""
        return (*self._averages.values(), self._num_updates)

    def update(self) -> Coroutine[object, None, None]:
        """Move all averages towards their variables; in a replica a collective.

        Raises:
            ContextError: If called in an update, or in a plain function (use `blocking.update`).

        Cancellation:
            Leaves all averages as they were, or moves all.
        """
        replica = PLACE.get().replica
        if isinstance(replica, RunningReplica):
            return replica.meet(UPDATE_AVERAGES, self, (), sys._getframe(1))
        require_cross_replica_context("ExponentialMovingAverage.update")
        return self._update()

    @property
    def blocking(self) -> BlockingMovingAverage:
        """The same method for plain step functions: it waits on the device thread."""
        return BlockingMovingAverage(self)

    @asynccontextmanager
    async def swapped(self) -> AsyncIterator[None]:
        """Give variables and averages each other's values for the length of an `async with` block.

        For evaluation: nothing should be trained in the block.

        Raises:
            ContextError: If called inside a replica.
        """
        require_cross_replica_context("ExponentialMovingAverage.swapped")
        exact = {v: v.components for v in self._averages.values()}  # a variable may round them
        self._swap({})
        try:
            yield
        finally:
            self._swap(exact)

    async def _update(self) -> None:
        pending = run_stages(self.stages(), is_blocking=False)
        if pending is not None:
            await pending

    def stages(self) -> Iterator[Sequence[Job]]:
        """Yield the arithmetic of one update, then publish it; for the library."""
        while True:
            pairs = self._averages.items()
            write = StagedWrite([*self._averages, *self.variables])
            count = int(self._num_updates.components[0])
            decay = self._decay
            if self._warm_up:
                decay = min(decay, (1 + count) / (10 + count))
            move = partial(_move, 1 - decay)
            yield [
                (3 * old.components[0].nbytes, job)
                for variable, old in pairs
                for job in write.follow(old, variable, move)
            ]
            write.replace(self._num_updates, count + 1)
            if write.publish():
                return  # else another run has written: build on that

    def _swap(self, exact: Mapping[Variable, Components]) -> None:
        """Swap; `exact` has the averages that variables of half precision have rounded."""
        changes = {}
        for variable, average in self._averages.items():
            changes[variable], changes[average] = average.components, variable.components
            if variable.dtype != average.dtype:
                changes[variable] = _cast(average.components, variable.dtype)
                changes[average] = exact.get(average, _cast(variable.components, average.dtype))
        self._num_updates.store.write(changes)

    def __repr__(self) -> str:
        count = int(self._num_updates.components[0])
        return (
            f"<ExponentialMovingAverage | decay {self._decay:g}, {len(self._averages)} variables, "
            f"{count} updates>"
        )


@final
class BlockingMovingAverage:
    """A moving average as plain step functions use it; got as `ema.blocking`.

    ContextError elsewhere than on the device thread of a replica.
    """

    __slots__ = ("_average",)

    def __init__(self, average: ExponentialMovingAverage) -> None:
        self._average = average

    def update(self) -> None:
        """Move all averages towards their variables; a collective.

        Raises:
            Exception: As `ExponentialMovingAverage.update`.
        """
        frame = sys._getframe(1)
        replica = replica_on_device("ema.blocking.update")
        site = CallSite(frame.f_code, frame.f_lasti)
        replica.blocking.meet(UPDATE_AVERAGES, self._average, (), site)

    def __repr__(self) -> str:
        return f"<BlockingMovingAverage of {self._average!r}>"


def _move_all(average: ExponentialMovingAverage, group: SyncGroup) -> Awaitable[None] | None:
    moved: Awaitable[None] | None = run_stages(average.stages(), is_blocking=group.is_blocking)
    return moved


def _names(average: ExponentialMovingAverage) -> str:
    return ", ".join(variable.name for variable in average.variables)


UPDATE_AVERAGES = Once("update_averages", _move_all, _names)


def _cast(components: Components, dtype: DType) -> Components:
    """Return components in another dtype, read-only; one array for those that share one."""
    with np.errstate(over="ignore"):
        made = {id(each): each.astype(dtype, copy=False) for each in components}
    for each in made.values():
        each.flags.writeable = False
    return tuple(made[id(each)] for each in components)


def _move(share: float, average: Array, value: Array, new: Array) -> None:
    np.subtract(value, average, out=new)
    np.multiply(new, share, out=new)
    np.add(average, new, out=new)
