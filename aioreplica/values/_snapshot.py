"""Snapshots: the values of several variables at one version, for readers outside the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, final

from ..errors import ContextError
from ..tree import Array, Leaf
from ._store import Components, VariableStore
from ._variable import Variable


@final
class Snapshot(Leaf, Mapping[Variable, Array]):
    """An immutable, consistent set of values: `snapshot[variable]` is a read-only array.

    Every write is in it as a whole or not at all. Taking one costs a few hundred nanoseconds per
    variable and copies nothing; the arrays stay as they are while they are held. That of an online
    learner also takes the keys of its state, `snapshot["layers/0"]`, as published files have them.

    Example:
        >>> from aioreplica import get_strategy
        >>> w = Variable([1.0, 2.0])
        >>> snapshot = get_strategy().snapshot(w)
        >>> snapshot[w]
        array([1., 2.])
    """

    __slots__ = ("_components", "_keys", "_taken_s", "_version")

    # Two snapshots are equal if they are one: comparing arrays gives no truth value.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a mixin sets None

    def __init__(
        self,
        version: int,
        components: dict[Variable, Components],
        keys: Mapping[str, Variable] | None = None,
    ) -> None:
        self._version = version
        self._components = components
        self._keys = {} if keys is None else keys
        self._taken_s = monotonic()

    @property
    def version(self) -> int:
        """Number of the newest write that is in it."""
        return self._version

    @property
    def age_s(self) -> float:
        """Seconds since the snapshot was taken."""
        return monotonic() - self._taken_s

    def __contains__(self, variable: object) -> bool:
        found = self._keys.get(variable) if isinstance(variable, str) else variable
        try:
            return found in self._components  # without the value, which not every variable has here
        except TypeError:
            return False  # it has no hash

    def __getitem__(self, variable: Variable | str) -> Array:
        found = self._keys.get(variable) if isinstance(variable, str) else variable
        try:
            components = self._components[found]  # type: ignore[index]  # None is no key of it
        except (KeyError, TypeError):
            names = [*self._keys] or [known.name for known in self._components]
            held = ", ".join(map(repr, names[:8]))
            raise KeyError(f"{variable!r} is not in this snapshot, which holds {held}.") from None
        return found._primary_of(components)  # type: ignore[union-attr]  # as above

    @property
    def components(self) -> Mapping[Variable, Components]:
        """All components of each variable."""
        return self._components

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the state; none if it is not of an online learner."""
        return tuple(self._keys)

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    def __repr__(self) -> str:
        return f"<Snapshot | version {self.version}, {len(self)} variables, {self.age_s:.3f} s old>"


def take_snapshot(store: VariableStore, variables: Sequence[Any]) -> Snapshot:
    """Take a snapshot of variables of one store; from any thread.

    A write that is published meanwhile is left out. Only if one variable was written twice in that
    time is its older value gone, and the snapshot is taken anew.

    Raises:
        TypeError: If something else than variables was given.
        ContextError: If a variable belongs to another store.
    """
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"snapshot takes variables, got {variable!r} ({type(variable).__name__})."
            )
        if variable.store is not store:
            raise ContextError(
                f"{variable!r} belongs to another strategy. A snapshot is consistent within one "
                "strategy only: take one from each."
            )
    while True:
        version = store.version
        components = {variable: _at(variable, version) for variable in variables}
        if None not in components.values():
            return Snapshot(version, components)  # type: ignore[arg-type]  # none is None


def _at(variable: Variable, version: int) -> Components | None:
    cell = variable._cell
    if cell.number <= version:
        return cell.components
    return cell.previous if cell.previous_number <= version else None
