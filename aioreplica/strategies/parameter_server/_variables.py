"""Variables whose values live on parameter servers.

One class for both sides: in the program it belongs to a strategy and asks the servers itself; in a
closure it is the same name and shape, and the closure asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, final
from uuid import uuid4

import numpy as np

from ...context import CLOSURE, PLACE, Place
from ...errors import ContextError
from ...values import IndexedSlices, Variable, VariableOptions, VariableStore, fitting
from ._messages import FROM_COORDINATOR, Array, Key, Pull, Spec, Stamp, Write
from ._partition import ServedRows
from ._server import frozen

if TYPE_CHECKING:
    from ._servers import Servers


class ServedVariable(Variable):
    """A variable of a `ParameterServerStrategy`: read with `await v.read()`, or in a closure.

    In a closure `v.value` pulls it, once per closure and version, and `assign_add` and the like
    push: they take effect at the call, and what they return may be awaited, which gives None.

    Invariants:
        * In the program `cell` holds a placeholder without memory of its own, but before the
          variable is placed on its servers and while a checkpoint reads or replaces it.
    """

    __slots__ = ("_is_home", "_servers", "_spec")

    def __init__(
        self,
        spec: Spec,
        options: VariableOptions,
        store: VariableStore | None = None,
        servers: Servers | None = None,
        value: Array | None = None,
    ) -> None:
        self._spec = spec
        self._servers = servers
        self._is_home = value is not None
        home = _placeholder(spec) if value is None else value
        self._set_up((home,), options, VariableStore() if store is None else store)

    # ---- what it is ------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """Description for closures."""
        return self._spec

    @property
    def is_mirrored(self) -> bool:
        """True: there is one value."""
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole value."""
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self._spec.dtype

    @property
    def num_copies(self) -> int:
        """One."""
        return 1

    @property
    def shards(self) -> tuple[ServedRows, ...]:
        """Shards of its rows, in order."""
        return self._spec.shards

    @property
    def num_shards(self) -> int:
        """Number of its shards."""
        return len(self._spec.shards)

    # ---- reading ---------------------------------------------------------------------------

    async def read(self, rows: Any = None) -> Array:
        """Return the value, or some of its rows, from the parameter servers.

        Args:
            rows: Indices of the rows, an int or an array of ints; only these travel. None takes
                all.

        Raises:
            ContextError: If called in a closure (use `value` or `rows`), or if the strategy is
                closed.
            ValueError: If an index is out of range.
            TypeError: If the indices are not integers.
            WorkerLostError: If a parameter server is gone.

        Shapes:
            Result: that of the variable, or `(*rows.shape, *row)`.

        Cancellation:
            Changes nothing.
        """
        if CLOSURE.get() is not None:
            raise ContextError(
                f"read() of variable {self.name!r} was called in a closure. Use `variable.value` "
                "there, or `variable.rows(indices)`."
            )
        servers = self._home()
        return await read_from(servers, self, None if rows is None else checked_rows(self, rows))

    def rows(
        self, indices: Any, ahead: Sequence[Variable | tuple[Variable, object]] = ()
    ) -> Array:  # fmt: skip
        """Return some rows, in a closure; only these travel.

        Args:
            indices: Which ones.
            ahead: What is read later, to come with the same messages, one to each server: variables
                for their whole value, and pairs of a variable and indices. `v.value`, `v.rows` and
                lookups of rows that were all among these, or those of an `ahead` before, then find
                them here, until this closure writes the variable. What workers have for themselves
                is skipped.

        Raises:
            ContextError: If called outside a closure (use `await variable.read(indices)`).
            ValueError: If an index is out of range.
            TypeError: If the indices are not integers, or something in `ahead` is neither.
            WorkerLostError: If a parameter server is gone.

        Shapes:
            indices: any. Result: `(*indices.shape, *row)`.
        """
        rows = checked_rows(self, indices)
        if ahead:
            self._closure("rows(indices)", "read(indices)").pull([(self, rows), *ahead])
        return self.local_rows(rows)

    def local_rows(self, indices: Array) -> Array:
        """Pull rows whose indices were checked."""
        found: Array = self._closure("rows(indices)", "read(indices)").rows(self, indices)
        return found

    def _value_at(self, place: Place) -> Array:
        """Pull the value, in a closure; another place has none."""
        found: Array = self._closure("value", "read()").value(self)
        return found

    @property
    def components(self) -> tuple[Array, ...]:
        """In a closure what has the variable's shape and dtype, and no value; elsewhere an error.

        Raises:
            ContextError: In the program, where the value is not.
        """
        if self._servers is not None:
            raise self._not_here("value", "read()")
        return self._cell.components

    def __len__(self) -> int:
        return self.shape[0] if self.shape else len(self.value)

    # ---- writing ---------------------------------------------------------------------------

    def _write(self, verb: str, value: Any, frame: FrameType) -> Awaitable[Array]:
        """Push a write in a closure; outside closures return the coroutine of one."""
        closure = CLOSURE.get()
        if closure is not None:
            pushed: Awaitable[Array] = closure.write(self, verb, value)
            return pushed
        self._require_owner_in_charge(PLACE.get())
        return self._write_from_home(verb, value)

    def _write_from_home(self, verb: str, value: Any) -> Coroutine[Any, Any, Array]:
        return write_to(self._home(), self, verb, fitting_push(self, verb, value))

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> NoReturn:
        """Refuse: replicas of other strategies do not write it.

        Raises:
            ContextError: Always.
        """
        raise self._not_here(verb, f"{verb}(value)")

    # ---- between the program and the servers -------------------------------------------------

    @property
    def is_home(self) -> bool:
        """True if `cell` holds the value."""
        return self._is_home

    def come_home(self, value: Array) -> None:
        """Hold the value here, for a checkpoint."""
        self._hold(value, is_home=True)

    def leave_home(self) -> None:
        """Let go of the value: the servers have it."""
        self._hold(_placeholder(self._spec), is_home=False)

    def _hold(self, value: Array, *, is_home: bool) -> None:
        value.flags.writeable = False
        old = self._cell
        self._cell = old._replace(
            number=0, components=(value,), previous_number=0, previous=(value,)
        )
        self._is_home = is_home

    def move(self, spec: Spec) -> None:
        """Live on other servers from now on."""
        self._spec = spec

    def _home(self) -> Servers:
        if self._servers is None:
            raise ContextError(
                f"Variable {self.name!r} was brought out of its closure: that is over, and so is "
                "what it knew. Pass the variable to the next closure."
            )
        return self._servers

    def _closure(self, here: str, there: str) -> Any:
        closure = CLOSURE.get()
        if closure is None:
            raise self._not_here(here, there)
        return closure

    def _not_here(self, here: str, there: str) -> ContextError:
        return ContextError(
            f"variable.{here} of {self.name!r} was used outside a closure, but its value lives on "
            f"parameter servers. Use `await variable.{there}` here, or pass the variable to "
            "`await coordinator.schedule(fn, args)`."
        )

    def __repr__(self) -> str:
        cut = f", {self.num_shards} shards" if self.num_shards > 1 else ""
        return f"<{type(self).__name__} {self.name} | {self.dtype} {self.shape}{cut}>"


@final
class ParameterServerVariable(ServedVariable):
    """A variable that lives on one parameter server as a whole."""

    __slots__ = ()


@final
class ShardedVariable(ServedVariable):
    """A variable whose rows are spread over parameter servers; read and written as one.

    A partitioner of the strategy makes it of what `ar.Variable` is given. Gradients that are
    `IndexedSlices` go to the shards they touch, and lookups fetch only their rows.

    Source:
        tf.distribute's ShardedVariable.
    """

    __slots__ = ()


def new_served(
    spec: Spec,
    options: VariableOptions,
    store: VariableStore | None = None,
    servers: Servers | None = None,
    value: Array | None = None,
) -> ServedVariable:
    """Return a variable of the kind that fits its shards."""
    kind: Callable[..., ServedVariable] = (
        ShardedVariable if len(spec.shards) > 1 else ParameterServerVariable
    )
    return kind(spec, options, store, servers, value)


def checked_rows(variable: Variable, rows: object) -> Array:
    """Return indices of rows as an array of ints in range.

    Raises:
        ValueError: If one is out of range, or the variable has no rows.
        TypeError: If they are not integers.
    """
    found = np.asarray(rows)
    if found.size == 0 and isinstance(rows, (list, tuple)):
        found = found.astype(np.intp)
    if found.dtype.kind not in "iu":
        raise TypeError(
            f"Rows of {variable.name!r} are chosen with integers, got dtype {found.dtype}."
        )
    if not variable.shape:
        raise ValueError(f"Variable {variable.name!r} is a scalar and has no rows.")
    if found.size:
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= variable.shape[0]:
            raise ValueError(
                f"Row {low if low < 0 else high} is out of range: variable {variable.name!r} has "
                f"rows 0 to {variable.shape[0] - 1}."
            )
    return found.astype(np.intp)


def fitting_push(variable: ServedVariable, verb: str, value: Any) -> Any:
    """Return what is written in the variable's shape and dtype.

    Raises:
        ValueError: If it does not fit, or a whole is assigned by rows.
    """
    fitted = fitting(variable, value)
    if verb == "assign" and isinstance(fitted, IndexedSlices):
        raise ValueError(
            f"Variable {variable.name!r} cannot be assigned IndexedSlices, which say nothing about "
            "the other rows. Use assign_add, assign_sub or scatter_update, or assign "
            "slices.to_dense()."
        )
    return fitted


def split_value(spec: Spec, value: Any) -> list[tuple[int, Any]]:
    """Return the part of an array, or of IndexedSlices, for each shard that it touches."""
    if len(spec.shards) == 1:
        return [(0, value)]
    if not isinstance(value, IndexedSlices):
        return [(i, value[shard.begin : shard.end]) for i, shard in enumerate(spec.shards)]
    found = []
    for index, shard in enumerate(spec.shards):
        mine = np.flatnonzero((value.indices >= shard.begin) & (value.indices < shard.end))
        if mine.size:
            shape = spec.shape_of(index)
            part = IndexedSlices(value.values[mine], value.indices[mine] - shard.begin, shape)
            found.append((index, part))
    return found


async def read_from(servers: Servers, variable: ServedVariable, rows: Array | None) -> Array:
    """Return a value, or rows whose indices were checked."""
    await servers.ready()
    spec = variable.spec
    flat: Array | None = None
    inverse: Array | None = None
    if rows is not None:
        flat, inverse = np.unique(rows.reshape(-1), return_inverse=True)
    requests = pulls_of(spec, flat)
    answers = await servers.all({s: (pulls,) for s, pulls in requests.items()}, "pull")
    found: dict[Key, Array] = {}
    for server, pulls in requests.items():
        for pull, (_, value) in zip(pulls, answers[server], strict=True):
            found[pull.key] = value
    parts = [found[key] for key in sorted(found)]
    if inverse is None or rows is None:
        whole: Array = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
    else:
        empty = np.empty((0, *spec.shape[1:]), spec.dtype)
        whole = np.concatenate([empty, *parts])[inverse]
        whole = whole.reshape(*rows.shape, *spec.shape[1:])
    whole.flags.writeable = False
    return whole


async def write_to(servers: Servers, variable: ServedVariable, verb: str, value: Any) -> Array:
    """Write from the program; return the new value."""
    if verb == "assign" and variable.spec.variable_id in servers.missing:
        return await servers.make_anew(variable, value)
    await servers.ready()
    spec = variable.spec
    if spec.slot is not None:
        raise ContextError(
            f"{variable.name!r} is a slot of an optimizer, which only updates write. Restore a "
            "checkpoint to replace it."
        )
    items: dict[int, list[Write]] = {}
    for i, part in split_value(spec, value):
        write = Write((spec.variable_id, i), 0, verb, part)
        items.setdefault(spec.shards[i].server, []).append(write)
    stamp = Stamp(servers.epoch, FROM_COORDINATOR, servers.oldest, uuid4().hex)
    await servers.all({s: (stamp, each) for s, each in items.items()}, "push")
    if verb == "assign" and not isinstance(value, IndexedSlices):
        return frozen(value)
    return await read_from(servers, variable, None)


def pulls_of(spec: Spec, rows: Array | None) -> dict[int, list[Pull]]:
    """Return how to ask each server for a variable, or for rows of it."""
    requests: dict[int, list[Pull]] = {}
    for i, shard in enumerate(spec.shards):
        pull = Pull((spec.variable_id, i), slot=spec.slot)
        if rows is not None:
            mine = rows[(rows >= shard.begin) & (rows < shard.end)] - shard.begin
            if not mine.size:
                continue
            pull = pull._replace(rows=mine)
        requests.setdefault(shard.server, []).append(pull)
    return requests


def _placeholder(spec: Spec) -> Array:
    zero = np.zeros((), spec.dtype)
    return np.broadcast_to(zero, spec.shape)
