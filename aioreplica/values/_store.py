"""The store of a strategy's variables: every write is published by one reference swap.

A write gets the next number. Its new components are put into each variable's cell beside the ones
they replace, and they cannot be seen, because a reader takes what is not newer than the store's
version. Then the version is set, which is the one assignment that publishes the whole write, to
every thread at once.

Invariants:
    * For every cell `previous_number < number`, unless both are the same.
    * A number above `version` exists only while `write` runs, under the lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from .._gil import has_gil
from ..context import LOOP, CurrentStrategy
from ..devices import running_loop
from ..errors import ContextError
from ..telemetry import Observers
from ..tree import Array, DType
from ._step_gate import StepGate

Components = tuple[Array, ...]

# From CPython 3.14 on a reference held by a local variable may not be counted, and without a GIL
# a count means nothing. There every write allocates.
CAN_COUNT_REFERENCES = sys.version_info < (3, 14) and has_gil()
"""Whether this interpreter tells how many references an array has, so that its memory is reused."""


@final
class Cell(NamedTuple):
    """The newest components of a variable, and those before them.

    Attributes:
        number: Which write made the newest components.
        components: One per replica.
        previous_number: Which write made the ones before.
        previous: Those, until their buffers are used again.
        num_writes: How many writes the variable has seen, the newest one included.
        previous_writes: How many it had seen before; what it says until the newest is published.
    """

    number: int
    components: Components
    previous_number: int
    previous: Components
    num_writes: int
    previous_writes: int = 0


class Stored(Protocol):
    """Interface of a variable for its store; compared by identity."""

    _cell: Cell
    store: VariableStore

    @property
    def components(self) -> Components:
        """The published components."""

    @property
    def version(self) -> int:
        """Number of writes so far."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    @property
    def dtype(self) -> DType:
        """Dtype of the value."""


V = TypeVar("V", bound=Stored)


@final
class Done:
    """Awaitable of a write that takes effect at the call; awaiting it gives the new value."""

    __slots__ = ("result",)

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result
        yield


@final
@dataclass(frozen=True, slots=True, eq=False)  # told apart by identity
class _Waiter:
    variable: Stored
    num_writes: int
    future: asyncio.Future[None]


@final
class VariableStore:
    """Numbers and publishes the writes of one strategy's variables.

    Args:
        observers: Who is told of writes; None tells those of all strategies.
        owner: The object behind the strategy; None for the store of plain variables.

    Attributes:
        owner: That object.
        version: Number of the newest published write.
        gate: Holds steps back while a checkpoint reads or replaces the variables.
    """

    __slots__ = ("_lock", "_observers", "_waiters", "gate", "owner", "version")

    def __init__(
        self, observers: Observers | None = None, owner: CurrentStrategy | None = None
    ) -> None:
        self.owner: Any = owner  # Any: variables of replicas know that there is one
        self.version = 0
        self.gate = StepGate()
        self._observers = observers or Observers()
        self._lock = threading.Lock()
        self._waiters: dict[_Waiter, None] = {}  # a set in order

    @property
    def is_observed(self) -> bool:
        """True if an observer is told of writes."""
        return self._observers.write_published is not None

    def write(
        self,
        changes: Mapping[V, Components],
        bases: Mapping[V, Components] | None = None,
        *,
        is_local: bool = False,
        counts: Mapping[V, int] | None = None,
    ) -> int:
        """Publish new components of several variables as one write; from any thread.

        Args:
            changes: Read-only arrays, one per replica, of the variable's shape and dtype.
            bases: What the new components were computed from.
            is_local: Whether one replica writes its own component, without the others.
            counts: How many writes of a variable this one stands for, if it is not one.

        Returns:
            The number of the write; 0, with nothing changed, if a variable is not at its base
            any more.
        """
        with self._lock:
            # Compared and published under one lock, but by identity: whoever lost computes again
            # from the new components, so no write is lost and none waits for another's numbers.
            if bases is not None and any(v.components is not bases[v] for v in changes):
                return 0
            number = self.version + 1
            for variable, components in changes.items():
                old = variable._cell
                before = old.num_writes
                after = before + (1 if counts is None else counts.get(variable, 1))
                variable._cell = Cell(number, components, old.number, old.components, after, before)
            # The publication (decision 6): readers take no cell that is newer than this number, so
            # they see all of the write or nothing, without a lock of their own.
            self.version = number
        step = LOOP.get()
        if step is not None and not is_local:
            step.has_written()
        if self._waiters:
            self._wake()
        tell = self._observers.write_published
        if tell is not None:
            tell(number)
        return number

    def take_previous(self, variable: Stored) -> Cell | None:
        """Take the older components out of a variable, so that no new reader comes to them.

        Returns:
            The cell that held them, None if there are none.
        """
        with self._lock:
            cell = variable._cell
            # There never was one, or it was taken: a second taker would write where the first does.
            if cell.previous is cell.components:
                return None
            newest = (cell.number, cell.components)
            variable._cell = Cell(*newest, *newest, cell.num_writes)
            return cell

    async def wait_for(self, variable: Stored, num_writes: int) -> int:
        """Wait until a variable has seen `num_writes` writes; return how many it has.

        Raises:
            ContextError: If no asyncio event loop is running, or waiting was ended.

        Cancellation:
            Takes the caller off the list.
        """
        future = running_loop("wait_for_version").create_future()
        waiter = _Waiter(variable, num_writes, future)
        self._waiters[waiter] = None
        try:
            # After it is on the list: a write on another thread between a look at the version and
            # the entry would wake nobody.
            self._wake()
            await future
        finally:
            self._waiters.pop(waiter, None)
        return variable.version

    def end_waits(self, reason: str) -> None:
        """Raise a ContextError in everything that waits."""
        for waiter in list(self._waiters):
            self._resolve(waiter, wait_error(waiter.variable, waiter.num_writes, reason))

    def __repr__(self) -> str:
        return f"<VariableStore | version {self.version}, {len(self._waiters)} waiting>"

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if waiter.variable.version >= waiter.num_writes:
                self._resolve(waiter, None)

    def _resolve(self, waiter: _Waiter, error: ContextError | None) -> None:
        try:
            waiter.future.get_loop().call_soon_threadsafe(_resolve, waiter.future, error)
        except RuntimeError:  # its loop is closed, and the wait with it
            self._waiters.pop(waiter, None)


def wait_error(variable: Stored, num_writes: int, reason: str) -> ContextError:
    """Return the error of a wait that cannot end."""
    return ContextError(
        f"Variable {variable.name!r} has seen {variable.version} writes, and the wait for "
        f"{num_writes} was ended: {reason}"
    )


def writable_buffer(variable: Stored) -> Array:
    """Return an array of a component's shape and dtype to build its next value in.

    It is the array before the current one if that is provably unheld: first it is taken out of the
    variable, so that it cannot be read any more; then, if the cell that held it, the tuple in the
    cell and the array have no reference but ours, it is not held elsewhere. Views and buffers of
    an array count as references to it.
    """
    cell = variable.store.take_previous(variable) if CAN_COUNT_REFERENCES else None
    if cell is not None:
        previous, cell_shape = cell.previous, cell.components[0].shape
        is_held = sys.getrefcount(cell) > 2
        del cell
        array = previous[0]
        shares = sum(component is array for component in previous)
        is_held = is_held or sys.getrefcount(previous) > 2 or shares != len(previous)
        is_held = is_held or array.shape != cell_shape  # it was divided anew since
        if not is_held and array.flags.owndata and sys.getrefcount(array) == shares + 2:
            array.flags.writeable = True
            return array
    component = variable.components[0]  # of a divided variable it is a part
    return np.empty(component.shape, component.dtype)


def _resolve(future: asyncio.Future[None], error: ContextError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
