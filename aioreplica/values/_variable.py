"""Variables: what outlives a step, made by the strategy in whose scope they are created."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..context import CARRIER, CREATORS, OVERRIDES, PLACE, TRACE, CurrentStrategy, Place
from ..devices import Publication, run_on_host
from ..errors import ContextError
from ..tree import Array, DType
from ..typing import (
    AggregationName,
    SynchronizationName,
    VariableAggregation,
    VariableSynchronization,
)
from ._array_like import ArrayLike
from ._creation import RowsFn, create_through, initial_array, initial_part, initial_rows
from ._distributed import Mirrored, PerReplica
from ._division import Division, Shard
from ._indexed_slices import IndexedSlices, scatter
from ._store import Cell, Components, Done, VariableStore, writable_buffer
from ._writes import Writes, fitting_array

INLINE_WRITE_BYTES = 4 * 1024 * 1024
"""Writes of more than this go to the host: adding 4 MiB holds the event loop for half a ms."""


if TYPE_CHECKING:
    Method = TypeVar("Method")

    def abstractmethod(method: Method) -> Method:
        """Let type checkers accept `Variable(...)`, which gives an instance of a subclass."""
        return method
else:
    from abc import abstractmethod


Constraint = Callable[[Array], object]

_UFUNCS = {
    "assign_add": np.add,
    "assign_sub": np.subtract,
    "scatter_update": None,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
}
"""How a write combines the old value with what is written."""


@final
@dataclass(frozen=True, slots=True)
class VariableOptions:
    """Everything about a new variable except its value."""

    name: str
    trainable: bool
    aggregation: VariableAggregation
    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    constraint: Constraint | None = None
    division: Division | None = None
    rows_from: RowsFn | None = None  # makes the value where it will live, if that is not here


class _VariableType(ABCMeta):
    """Lets `Variable(...)` give what the current strategy makes."""

    if not TYPE_CHECKING:  # checkers take the signature of `Variable.__init__`

        def __call__(cls, *args: Any, **kwargs: object) -> object:
            if cls is Variable:
                creators = CREATORS.get()
                if creators and len(args) + ("initial_value" in kwargs) == 1:
                    options = {"initial_value": args[0], **kwargs} if args else kwargs
                    return create_through(creators, _create_variable, options)
                return _create_variable(*args, **kwargs)
            return super().__call__(*args, **kwargs)


class Variable(ArrayLike, Writes[Awaitable[Array]], metaclass=_VariableType):
    """A named array that outlives steps and is kept equal on all replicas.

    `ar.Variable(initial_value)` in a strategy's scope gives what the strategy makes, such as a
    `MirroredVariable`; outside every scope it gives a plain one.

    Args:
        initial_value: An array (copied), or a callable that gives one; it is called once, so all
            replicas start equal.
        trainable: Whether optimizers update it when no list of variables is given.
        name: Unique within the strategy; None takes a free one.
        dtype: Converts the initial value.
        synchronization: "auto" or "on_write" for a variable whose writes are merged; "on_read" for
            one that every replica writes for itself and that is combined where it is read (then it
            is not trainable). "none" is for the default strategy only.
        aggregation: How values that several replicas assign (on_read: hold) are combined: "none"
            (an error there), "sum", "mean" or "only_first_replica".
        constraint: A function of the new value that optimizers apply after each update, such as
            one that clips it; writes of your own do not call it.
        shape: With it `initial_value` is a function of two row numbers that gives the rows from the
            first up to the second. Parameter servers call it for each shard, so that a table may be
            larger than the memory of the program; it has to be deterministic. Others call it here.
        sharding: `ar.Shard()` divides the rows among the workers of a strategy; with `shape` each
            makes its own rows only. None has all of them on every worker.

    Variables take part in NumPy expressions (`v + 1`, `v @ m`, `np.exp(v)`) with their value, and
    compare with it: `v == w` is an array. As keys and in sets they are told apart by identity;
    `v in a_list` is of little use, see `ArrayLike`. The strategy does not keep them alive: one that
    the program has dropped is gone, and its name is free.

    Raises:
        ContextError: If called inside a replica.
        ValueError: If `synchronization` or `aggregation` is unknown or not supported, the
            strategy has a variable of that name, or `sharding` cannot be.
        TypeError: If the initial value is not numeric, `constraint` not callable, there is a
            `shape` and the initial value is no function of rows, or `sharding` is no Shard.

    Example:
        >>> w = Variable([1.0, 2.0], name="w")
        >>> w.value
        array([1., 2.])
        >>> w * 2
        array([2., 4.])
    """

    __slots__ = ("__weakref__", "_cell", "_options", "store")

    if TYPE_CHECKING:  # the signature of the factory, for type checkers

        def __init__(
            self,
            initial_value: object,
            *,
            trainable: bool = True,
            name: str | None = None,
            dtype: npt.DTypeLike | None = None,
            synchronization: VariableSynchronization | SynchronizationName = "auto",
            aggregation: VariableAggregation | AggregationName = "none",
            constraint: Constraint | None = None,
            shape: Sequence[int] | None = None,
            sharding: Shard | None = None,
        ) -> None: ...

    def _set_up(
        self,
        components: Components,
        options: VariableOptions,
        store: VariableStore,
    ) -> None:
        self._options = options
        self.store = store
        self._cell = Cell(0, components, 0, components, 0)

    @property
    def name(self) -> str:
        """Name, unique within the strategy."""
        return self._options.name

    @property
    def trainable(self) -> bool:
        """True if optimizers update it by default."""
        return self._options.trainable

    @property
    def aggregation(self) -> VariableAggregation:
        """Rule that combines values assigned by several replicas."""
        return self._options.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """Time at which the components are synchronized."""
        return self._options.synchronization

    @property
    def constraint(self) -> Constraint | None:
        """Function that optimizers apply to a new value; None for no constraint."""
        return self._options.constraint

    @property
    @abstractmethod
    def is_mirrored(self) -> bool:  # type: ignore[empty-body]  # abstract
        """True if the components are meant to be equal."""

    @property
    def strategy(self) -> Any:
        """The strategy that made it, or None for a plain variable."""
        return None if self.store.owner is None else self.store.owner.facade

    @property
    def version(self) -> int:
        """Number of writes so far."""
        cell = self._cell
        return cell.num_writes if cell.number <= self.store.version else cell.previous_writes

    @property
    def num_copies(self) -> int:
        """Number of components that can differ and are updated separately."""
        return len(self._cell.components)

    @property
    def component_names(self) -> tuple[str, ...]:
        """A name per copy: that of the variable, then `name/replica_1` and so on."""
        return (self.name, *(f"{self.name}/replica_{i}" for i in range(1, self.num_copies)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.components[0].shape

    @property
    def dtype(self) -> DType:
        """Dtype of the value."""
        return self.components[0].dtype

    @property
    def value(self) -> Array:
        """The local component in a replica, the first one elsewhere; a read-only array.

        The array never changes: a write builds a new one and swaps it in.
        """
        overrides = OVERRIDES.get()
        if overrides is not None:
            return overrides.read(self)  # type: ignore[no-any-return]  # set by autodiff
        return self._value_at(PLACE.get())

    @property
    def components(self) -> Components:
        """The published value on each replica; entries may be one shared array."""
        cell = self._cell
        return cell.components if cell.number <= self.store.version else cell.previous

    def _primary_of(self, components: Components) -> Array:
        """Return what a reader outside every replica sees of some components."""
        return components[0]

    @abstractmethod
    def _write_in_replica(  # type: ignore[empty-body]  # abstract
        self, verb: str, array: Array, replica: object, frame: FrameType
    ) -> Awaitable[Array]:
        """Carry out a write of one replica, called at `frame`."""

    def _shares(self, verb: str, array: object) -> Sequence[Any]:
        """Split a value that is written outside the replicas into one per component."""
        return (array,) * len(self._cell.components)

    def _value_at(self, place: Place) -> Array:
        """Return what code that runs at a place reads, whichever thread asks."""
        if place.strategy is self.store.owner:
            if place.replica is not None:
                return self.components[place.replica.local_replica_id]
            if place.staging is not None:
                staged: Array = place.staging.read(self, place.update_replica_id)
                return staged
        elif place.staging is not None and self.store.owner is None:
            return place.staging.read(self, 0)  # type: ignore[no-any-return]
        return self._primary_of(self.components)

    def _combine(self, verb: str, value: object) -> Components | Awaitable[Components]:
        """Carry out one write with a value that is the same for all components.

        Returns:
            The new components; for large variables what to await for them, as the work goes to
            the host.
        """
        array = fitting(self, value)
        if self.components[0].nbytes > INLINE_WRITE_BYTES:
            return self._combine_on_host(verb, array)
        while True:
            old = self.components
            new = self._new_components(verb, old, array)
            if self.store.write({self: new}, {self: old}):
                return new

    async def _combine_on_host(self, verb: str, array: Array) -> Components:
        while True:
            old = self.components
            new = await run_on_host(self._new_components, verb, old, array)
            if self.store.write({self: new}, {self: old}):
                return new  # else it was written meanwhile: build on that

    def _new_components(self, verb: str, old: Components, array: Array) -> Components:
        made: dict[tuple[int, int], Array] = {}
        new = []
        for component, share in zip(old, self._shares(verb, array), strict=True):
            key = (id(component), id(share))
            if key not in made:
                made[key] = combined(self, verb, component, share)
            new.append(made[key])
        return tuple(new)

    @property
    def blocking(self) -> BlockingVariable:
        """The writes for plain step functions: they wait on the device thread."""
        return BlockingVariable(self)

    def _require_owner_in_charge(self, place: Place) -> None:
        """Check that the variable may be written at a place.

        Raises:
            ContextError: If another strategy is in charge there.
        """
        other = place.strategy
        if other is not None and other is not self.store.owner and not self._is_default(other):
            mine = "no strategy" if self.store.owner is None else repr(self.store.owner)
            raise ContextError(
                f"Variable {self.name!r} belongs to {mine} but was written in "
                f"{place.describe()}. Write it where its own strategy is in charge."
            )

    def _write(self, verb: str, value: object, frame: FrameType) -> Awaitable[Array]:
        """Carry out a write, called at `frame`."""
        place = PLACE.get()
        self._require_owner_in_charge(place)
        if place.staging is not None:
            new = combined(self, verb, local_value(self), fitting(self, value))
            place.staging.write(self, place.update_replica_id, new)
            return Done(new)
        if place.replica is None:
            if place.lacks_workers:
                raise some_workers_error(place, f"{verb} of variable {self.name!r}")
            return self._write_everywhere(verb, value)
        return self._write_in_replica(verb, fitting(self, value), place.replica, frame)

    def _is_default(self, strategy: CurrentStrategy) -> bool:
        """Tell whether this is a plain variable and `strategy` the default one, its owner."""
        return self.store.owner is None and strategy.has_plain_values

    async def _write_everywhere(self, verb: str, value: object) -> Array:
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable {self.name!r} got a PerReplica in cross-replica context. Reduce it "
                "first (await strategy.reduce(...)), or pass a Mirrored."
            )
        if isinstance(value, Mirrored):
            if len(value) != len(self.components):
                raise ValueError(
                    f"Variable {self.name!r} has {len(self.components)} components but got a "
                    f"Mirrored of {len(value)} values. It belongs to another strategy."
                )
            value = value[0]
        new = self._combine(verb, value)
        return self._written(new if isinstance(new, tuple) else await new)

    def _written(self, components: Components) -> Array:
        """Return what a write outside the replicas gives to its caller."""
        return components[0]

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be shallow-copied: two objects would share one value. "
            "copy.deepcopy gives a new variable of the same strategy."
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        """Make a variable of the same strategy with the same components and a name of its own."""
        _require_creation_allowed(PLACE.get())
        components = self.components
        create = _new_plain if self.store.owner is None else self.store.owner.create_variable
        twin: Variable = create(components[0], self._options)
        twin._cell = Cell(0, components, 0, components, 0)
        memo[id(self)] = twin
        return twin

    def _stand_in(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what ops in a device process get in its place: a call, and its arguments."""
        from ._plain import PublishedVariable  # it is a variable

        return PublishedVariable, (replace(self._options, constraint=None), self.is_mirrored)

    def _publication(self, place: Place) -> Publication:
        """Return the value that an op made at `place` reads, and what tells it from others.

        Replicas whose components are one array read one value.
        """
        cell = self._cell
        if cell.number <= self.store.version:
            number, components, num_writes = cell.number, cell.components, cell.num_writes
        else:
            number, components = cell.previous_number, cell.previous
            num_writes = cell.previous_writes
        if place.replica is not None and place.strategy is self.store.owner:
            array = components[place.replica.local_replica_id]
        else:
            array = self._primary_of(components)
        same = (i for i, component in enumerate(components) if component is array)
        return Publication((number, next(same, -1)), num_writes, array)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        carrier = CARRIER.get()
        if carrier is not None:  # on its way to an op in a device process, or back
            return carrier.refer(self)
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: it belongs to a strategy of this process. "
            "Pickle its name and np.asarray(variable), and write them back with `await "
            "variable.assign(value)`."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} | {self.dtype} {self.shape}, v{self.version}>"


@final
class BlockingVariable(Writes[Array]):
    """A variable as functions on a device write it; got as `variable.blocking`.

    Every write returns when it has taken effect. ContextError elsewhere than on a device thread.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self._variable.name

    def _write(self, verb: str, value: object, frame: FrameType) -> Array:
        """Carry out a write, called at `frame`."""
        variable, place = self._variable, PLACE.get()
        if (trace := TRACE.get()) is not None:
            written_here: Array = trace.assign(variable, verb, value)
            return written_here
        if place.replica is None:
            raise ContextError(
                f"variable.blocking.{verb} of {variable.name!r} was called in {place.describe()}. "
                f"It is for functions on a device; use `await variable.{verb}(value)` here."
            )
        variable._require_owner_in_charge(place)
        blocking = place.replica.blocking
        blocking.require_device_thread(verb)
        written: Any = variable._write_in_replica(verb, fitting(variable, value), blocking, frame)
        new: Array = written.result if isinstance(written, Done) else written  # it has waited
        return new

    def __repr__(self) -> str:
        return f"<BlockingVariable of {self._variable!r}>"


def some_workers_error(place: Place, what: str) -> ContextError:
    """Build the error of a write in the merge function of a group that some workers are not in."""
    return ContextError(
        f"{what} was called in {place.describe()} that runs on some of the workers only, as the "
        "others have no replica in the group: they would keep another value. Return the value, and "
        "write it in the step, or in a merge function of all replicas."
    )


def rename(variable: Variable, name: str) -> None:
    """Give a variable another name; for the strategy, which keeps names unique."""
    variable._options = replace(variable._options, name=name)


def local_value(variable: Variable) -> Array:
    """Return what `value` is when no gradient is being taken."""
    return variable._value_at(PLACE.get())


def fitting(variable: Variable, value: Any) -> Any:
    """Return `value` in the variable's shape and dtype; ValueError if it does not fit.

    IndexedSlices of that shape stay what they are.
    """
    if isinstance(value, IndexedSlices):
        fits = value.dense_shape == variable.shape
        if fits and np.can_cast(value.values.dtype, variable.dtype, "same_kind"):
            return value
        raise ValueError(
            f"Variable {variable.name!r} has shape {variable.shape} and dtype {variable.dtype}, "
            f"cannot take IndexedSlices of dense shape {value.dense_shape} and dtype "
            f"{value.values.dtype}."
        )
    given = value.value if isinstance(value, Variable) else value
    return fitting_array(given, variable.name, variable.shape, variable.dtype)


def combined(variable: Variable, verb: str, old: Array, array: Array) -> Array:
    """Return the read-only array that a write makes of one component."""
    if isinstance(array, IndexedSlices):
        return _scattered(variable, verb, old, array)
    new = writable_buffer(variable)
    ufunc = _UFUNCS.get(verb)
    if ufunc is None:
        np.copyto(new, array)
    else:
        ufunc(old, array, out=new)
    new.flags.writeable = False
    return new


def _scattered(variable: Variable, verb: str, old: Array, slices: IndexedSlices) -> Array:
    if verb == "assign":
        raise ValueError(
            f"Variable {variable.name!r} cannot be assigned IndexedSlices, which say nothing about "
            "the other rows. Use assign_add, assign_sub or scatter_update, or assign "
            "slices.to_dense()."
        )
    new = scatter(old, slices, _UFUNCS[verb])
    new.flags.writeable = False
    return new


def workers_of(variable: Variable) -> Any:  # Any: the cluster layer lies above this one
    """Return the other workers that have components of a variable; None if there are none."""
    owner = variable.store.owner
    return None if owner is None else owner.workers


def _create_variable(
    initial_value: object,
    *,
    trainable: bool = True,
    name: str | None = None,
    dtype: npt.DTypeLike | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
    constraint: Constraint | None = None,
    shape: Sequence[int] | None = None,
    sharding: Shard | None = None,
) -> Variable:
    place = PLACE.get()
    _require_creation_allowed(place)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"The name of a variable must be a str, got {name!r}.")
    if constraint is not None and not callable(constraint):
        raise TypeError(f"The constraint of a variable must be a function, got {constraint!r}.")
    label = name or "variable"
    options = VariableOptions(
        label,
        trainable,
        VariableAggregation.parse(aggregation, label),
        VariableSynchronization.parse(synchronization, label),
        constraint,
    )
    strategy = place.strategy
    if name is not None and strategy is not None:
        strategy.variable_table.require_free(name, strategy)
    if sharding is not None:
        is_whole = options.synchronization is VariableSynchronization.ON_READ or constraint
        value, division = initial_part(
            strategy, initial_value, label, dtype, shape, sharding, is_whole=bool(is_whole)
        )
        options = replace(options, division=division)
    elif shape is not None:
        is_here = strategy is None or strategy.elsewhere is None
        value, rows_from = initial_rows(initial_value, label, dtype, shape, is_here=is_here)
        options = replace(options, rows_from=rows_from)
    else:
        value = initial_array(initial_value, label, dtype)
    create = _new_plain if strategy is None else strategy.create_variable
    variable: Variable = create(value, options)
    return variable


_create_variable.__qualname__ = "ar.Variable"  # as a TypeError of its arguments should name it


def _new_plain(value: Array, options: VariableOptions) -> Variable:
    from ._plain import PlainVariable  # the factory and its product need each other

    return PlainVariable(value, options)


def _require_creation_allowed(place: Place) -> None:
    if place.is_in_step:
        raise ContextError(
            f"ar.Variable(...) was called in {place.describe()}. Create variables in "
            "strategy.scope() before the run, or inside it with `await ctx.variable(...)`, in a "
            "plain function ctx.blocking.variable(...)."
        )
