"""Divided variables: each worker has some elements of the whole, in its order, and no worker all.

What is as large as a model and is only written element by element, as the state of an optimizer
is, need not be on every worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import FrameType
from typing import Any, NoReturn, final

import numpy as np

from ..errors import ContextError
from ..tree import Array
from ._division import Division
from ._store import Components, VariableStore
from ._variable import Variable, VariableOptions


@final
class DividedVariable(Variable):
    """A variable of which every worker has a part; `shape` is that of the whole.

    Optimizers with `shard_state=True` make their slots so. `local` is this worker's part, a flat
    array; `await variable.read()` brings the whole together.
    """

    __slots__ = ("division",)

    def __init__(
        self,
        value: Array,
        options: VariableOptions,
        num_components: int,
        store: VariableStore,
    ) -> None:
        assert options.division is not None
        self.division = options.division
        self._set_up((value,) * num_components, options, store)

    @property
    def is_mirrored(self) -> bool:
        """False: workers have different elements."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.division.shape

    @property
    def local(self) -> Array:
        """The elements that this worker has, of the whole as a row; read-only."""
        return self.components[0]

    async def read(self) -> Array:
        """Bring the parts of all workers together; every worker has to call it, outside steps.

        Returns:
            The whole, read-only.

        Raises:
            ContextError: If the number of workers has changed since it was divided.
            Exception: What ends an operation between workers.

        Cancellation:
            Changes nothing.
        """
        workers = self.store.owner.workers
        self.require_current(workers.num_workers)
        async with workers.operation("read", f"{self.name!r}: {self.dtype}{self.shape}") as turn:
            found: Array = await turn.exchange(b"", self._gathered)
        return found

    async def _gathered(self, wire: object, _slots: Sequence[bytes]) -> Array:
        whole = np.empty(self.division.shape, self.dtype)
        row = whole.reshape(-1)
        for rank, (begin, end) in enumerate(self.division.ranges):
            row[begin:end] = await self.part_from(wire, rank, self.local)
        whole.flags.writeable = False
        return whole

    async def part_from(self, wire: Any, rank: int, own: Array) -> Array:
        """Send the part of one worker to all; every worker calls it in the same exchange.

        Args:
            wire: Carries it.
            rank: Whose part.
            own: The part of this worker.
        """
        begin, end = self.division.ranges[rank]
        if begin == end:
            return np.empty(0, self.dtype)
        sent = own if rank == self.division.rank else np.empty(end - begin, self.dtype)
        found: Array = (await wire.broadcast(sent.view(np.uint8), rank)).view(self.dtype)
        return found

    def division_now(self) -> Division:
        """Return how it is divided among the workers that there are now."""
        workers = self.store.owner.workers
        return self.division.among(workers.rank, workers.num_workers)

    def require_current(self, num_workers: int) -> None:
        """Check that it is divided among the workers there are.

        Raises:
            ContextError: If it is not: some were lost, and their parts with them.
        """
        count = len(self.division.ranges)
        if count != num_workers:
            raise ContextError(
                f"Variable {self.name!r} was divided among {count} workers, and now there are "
                f"{num_workers}: the parts of the others are lost. Restore a checkpoint (`await "
                "manager.restore(state)`), which divides it anew."
            )

    def _primary_of(self, components: Components) -> NoReturn:
        """Refuse: a property cannot wait for other workers.

        Raises:
            ContextError: Always.
        """
        raise ContextError(
            f"Variable {self.name!r} is divided among {len(self.division.ranges)} workers, so its "
            "value cannot be read without waiting. Use `await variable.read()` on all workers, or "
            "`variable.local` for the elements that this one has."
        )

    def _value_at(self, place: object) -> NoReturn:
        """Refuse, as everywhere."""
        self._primary_of(())

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> Awaitable[Array]:
        """Refuse: its optimizer writes it.

        Raises:
            ContextError: Always.
        """
        raise self._no_writes(verb)

    def _combine(self, verb: str, value: object) -> NoReturn:
        """Refuse, as in a replica.

        Raises:
            ContextError: Always.
        """
        raise self._no_writes(verb)

    def _no_writes(self, verb: str) -> ContextError:
        return ContextError(
            f"Variable {self.name!r} is divided among workers and written by its optimizer only, "
            f"so it has no {verb}. Restore a checkpoint to give it other values."
        )
