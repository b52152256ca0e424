"""Entries of a state, by key, and a cut of them between two steps.

A key is the way to an entry through the containers of the state, such as `model/0`. What an object
consists of is below its own key: `optimizer/iterations`, `optimizer/slots/model/0/m`.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard, final, runtime_checkable

import numpy as np

from ..context import PLACE
from ..errors import ContextError
from ..input import Stateful
from ..tree import Array, DType, Tree
from ..values import Division, Ranges, StepGate, Variable, between_steps, take_snapshot
from ._format import STORED_AS, EntryRecord, Manifest, StoredArray, TensorRecord, encoded

MAX_VALUES = 250_000
"""All plain data of a state have at most so many values: copying them holds the loop for 10 ms."""
CONTAINER_VALUES = 8
"""A list or dict counts as so many values beside those in it: it takes as long."""
TEXT_CHARS = 64
"""So many characters or bytes count as a value: they are encoded, not copied."""

NUMBERS = frozenset({int, float, bool, type(None)})
TEXTS = frozenset({str, bytes})
PLAIN = NUMBERS | TEXTS
SCALARS = frozenset(np.dtype(code).type for code in "?bBhHiIlLqQefd")
"""Those of NumPy that are numbers of plain data, as which they are written."""
_WITH_SCALARS = NUMBERS | SCALARS
_IN_CONTAINERS = PLAIN | SCALARS
_NAMES = frozenset({str, int, bool})
_IN_A_TUPLE = (
    "{!r} in the state is {!r} in a tuple, where a restore could not put another value. Use a list "
    "or dict."
)


@runtime_checkable
class Composite(Protocol):
    """An object that names its parts: a model."""

    def checkpoint_entries(self) -> Mapping[tuple[Variable | None, str], object]:
        """Return variables, arrays and plain data, by the variable they belong to and a name."""


@runtime_checkable
class Deferring(Protocol):
    """A composite with parts that it makes later, or that are not variables: an optimizer."""

    def awaits_entry(self, owner: Variable | None, name: str) -> bool:
        """Tell whether `load_entries` has a use for a value of that name."""

    def division_of(
        self, owner: Variable | None, shape: tuple[int, ...], dtype: DType
    ) -> Division | None:
        """Return of which division `load_entries` takes a part, flat; None if it takes all."""

    def load_entries(self, entries: Mapping[tuple[Variable | None, str], object]) -> None:
        """Take values of parts that are not variables, or not made yet. Must not fail."""

    def forget_entries(self, owner: Variable) -> None:
        """Let go of the parts of a variable that were not made when the state was saved."""


@runtime_checkable
class HasParts(Protocol):
    """An object whose parts another one names."""

    @property
    def checkpoint_parts(self) -> Composite:
        """The one that does."""


@runtime_checkable
class HasVariables(Protocol):
    """An object that is nothing but variables, always in the same order: a metric."""

    @property
    def variables(self) -> Sequence[Variable]:
        """The variables."""


class Entry(NamedTuple):
    """One entry of a state as the program has it.

    Attributes:
        key: Names it.
        thing: A variable, an object with a state, a random generator, an array or plain data.
        container: What holds it, if it can be replaced there.
        index: Where in the container.
        composite: The object that it is a part of.
        owner: The variable that the part belongs to.
        part: Its name there.
        object: Key of that object.
        owner_key: Key of that variable.
    """

    key: str
    thing: Any
    container: Any = None
    index: Any = None
    composite: Composite | None = None
    owner: Variable | None = None
    part: str = ""
    object: str = ""
    owner_key: str = ""


@final
@dataclass(slots=True)
class State:
    """The entries of a state, and the strategies whose steps write it.

    Attributes:
        entries: By key.
        composites: The objects that name their parts, by key.
        variables: Its variables, by key; one may have several.
        gates: Those of the strategies of its variables, in the order they were met.
        opened: What was looked into, each with a function that tells what it holds.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    composites: dict[str, Composite] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    gates: dict[StepGate, None] = field(default_factory=dict)
    opened: list[tuple[Any, Callable[[Any], Any]]] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        key = entry.key
        if key in self.entries:
            raise ValueError(
                f"Two entries of the state are called {key!r}. Give them names of their own; "
                "keys of dicts must differ as text."
            )
        self.entries[key] = entry
        if Variable in type(entry.thing).__mro__:  # as in is_variable, once per entry
            self.variables[key] = entry.thing
            self.gates[entry.thing.store.gate] = None

    def held(self) -> tuple[list[object], list[object]]:
        """Return what the opened things hold now: what to compare, and what to keep alive."""
        looks = [look(node) for node, look in self.opened]
        return [mark for mark, _ in looks], [things for _, things in looks]

    def elsewhere(self) -> list[Any]:
        """Return what brings variables home that live on parameter servers."""
        strategies = [variable.store.owner for variable in self.variables.values()]
        return list(dict.fromkeys(s.elsewhere for s in strategies if s is not None and s.elsewhere))

    def owners(self) -> dict[str, Variable]:
        """Return the variables that belong to no other one, by key."""
        return {key: v for key, v in self.variables.items() if self.entries[key].owner is None}


Adapt = Callable[[Manifest], tuple[Manifest, Collection[str]]]
"""See `DescribedState`."""


@final
class DescribedState:
    """A state that is walked again only when what it consists of has changed.

    Args:
        state: The state. It is kept alive, and so is what it consisted of when last read.
        adapt: Called with the manifest of a checkpoint that is to be restored; returns one that
            fits the state, and keys, or first parts of some, that it may lack.

    Attributes:
        adapt: As above.
    """

    __slots__ = ("_found", "_held", "_state", "_things", "adapt")

    def __init__(self, state: object, adapt: Adapt | None = None) -> None:
        self.adapt = adapt
        self._state = state
        self._found: State | None = None
        self._held: list[object] = []
        self._things: list[object] = []

    def read(self) -> State:
        """Return its entries; as `read_state`."""
        found = self._found
        if found is None or found.held()[0] != self._held:
            self._found = None
            found = read_state(self._state)
            self._held, self._things = found.held()
            self._found = found
        return found


def read_state(state: object) -> State:
    """Find the entries of a state.

    Raises:
        TypeError: If something in it cannot be saved.
        ValueError: If the state is not a container, or two entries have one key.
    """
    if type(state) is DescribedState:
        return state.read()
    if not isinstance(state, (Mapping, list, tuple)):
        raise ValueError(
            f"A state is a dict or list of what is to be saved, got {state!r}. Write "
            '{"model": variables, "optimizer": optimizer}.'
        )
    found = State()
    _walk(found, "", state, None, None)
    owned = []
    for key, composite in found.composites.items():
        found.opened.append((composite, _look_at_entries))
        for (owner, name), thing in composite.checkpoint_entries().items():
            if owner is None:
                found.add(
                    Entry(below(key, name), thing, composite=composite, part=name, object=key)
                )
            else:
                owned.append((key, composite, owner, name, thing))
    owners = found.owners() if owned else {}
    keys = {id(variable): key for key, variable in reversed(owners.items())}
    for key, composite, owner, name, thing in owned:
        owner_key = keys.get(id(owner), owner.name)
        own_key = f"{below(key, 'slots')}/{owner_key}/{name}"
        found.add(Entry(own_key, thing, None, None, composite, owner, name, key, owner_key))
    return found


def _walk(found: State, key: str, node: object, container: object, index: object) -> None:
    if is_variable(node):
        found.add(Entry(key, node))
    elif key and is_plain(node) and not isinstance(node, np.generic):
        if container is None and not isinstance(node, (list, dict)):
            raise TypeError(_IN_A_TUPLE.format(key, node))
        if type(node) not in PLAIN:  # a container, which may hold something else one day
            found.opened.append((node, _look_at_plain))
        found.add(Entry(key, node, container, index))
    elif isinstance(node, (np.ndarray, np.generic, np.random.Generator)):
        is_written = isinstance(node, np.random.Generator) or node.flags.writeable
        if container is None and not is_written:
            raise TypeError(_IN_A_TUPLE.format(key, node))
        found.add(Entry(key, node, container, index))
    elif isinstance(node, Mapping):
        found.opened.append((node, _look_at_mapping))
        for name, child in node.items():
            if not isinstance(name, (str, int)):
                raise TypeError(
                    f"The state has the key {name!r} in {key or 'its root'!r}. Keys are str or int."
                )
            own: object = node if isinstance(node, MutableMapping) else None
            _walk(found, below(key, str(name)), child, own, name)
    elif isinstance(node, (list, tuple)):
        found.opened.append((node, _look_at_items))
        for number, child in enumerate(node):
            own = node if isinstance(node, MutableSequence) else None
            _walk(found, below(key, str(number)), child, own, number)
    elif isinstance(node, HasParts):
        found.opened.append((node, _look_at_parts))
        found.composites[key] = node.checkpoint_parts
    elif isinstance(node, Composite):
        found.composites[key] = node
    elif isinstance(node, HasVariables):
        found.opened.append((node, _look_at_variables))
        for number, variable in enumerate(node.variables):
            found.add(Entry(below(key, str(number)), variable))
    elif isinstance(node, Stateful):
        found.add(Entry(key, node))
    else:
        raise TypeError(
            f"{key!r} in the state is {node!r} ({type(node).__name__}), which cannot be saved. A "
            "state holds variables, optimizers, metrics, datasets, random generators, arrays, "
            "plain numbers and text, and objects with state_dict and load_state_dict."
        )


# Each returns what to compare, and the things whose identities are in it: as long as somebody keeps
# them alive, no other thing can have one of these.


def _look_at_items(nodes: Iterable[object]) -> tuple[object, object]:
    things = [*nodes]
    return [*map(id, things)], things


def _look_at_mapping(node: Mapping[object, object]) -> tuple[object, object]:
    things = [*node.values()]
    return [*node, *map(id, things)], things


def _look_at_parts(node: HasParts) -> tuple[object, object]:
    return _look_at_items([node.checkpoint_parts])


def _look_at_variables(node: HasVariables) -> tuple[object, object]:
    return _look_at_items(node.variables)


def _look_at_entries(node: Composite) -> tuple[object, object]:
    entries = node.checkpoint_entries()
    return [(id(owner), name, id(each)) for (owner, name), each in entries.items()], entries


def _look_at_plain(node: object) -> tuple[object, object]:
    return is_plain(node), None


def is_variable(node: object) -> TypeGuard[Variable]:
    """Tell what isinstance does, in a third of the time: it is slow for abstract classes."""
    return Variable in type(node).__mro__


def is_plain(node: Any) -> bool:
    """Tell whether it is plain data through and through: one value of a state, which may grow."""
    if type(node) in {list, tuple}:
        return _IN_CONTAINERS.issuperset(map(type, node)) or all(map(is_plain, node))
    if type(node) is dict:
        return _NAMES.issuperset(map(type, node)) and is_plain([*node.values()])
    return type(node) in _IN_CONTAINERS


def below(key: str, name: str) -> str:
    if "%" in name or "/" in name:
        name = name.replace("%", "%25").replace("/", "%2F")
    return f"{key}/{name}" if key else name


# ---- the cut -----------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """A state as it was between two steps: references and copies, described when written.

    Attributes:
        next_steps: The numbers of the next steps.
        entries: What it was made of.
        arrays: The tensors of each entry. The writer takes each out when it is written, so that
            its memory is free.
        values: Copies of plain data, of the entries that are neither variables nor arrays.
        divisions: Those of divided variables, of which `arrays` has the part of this worker.
    """

    next_steps: tuple[int, ...]
    entries: dict[str, Entry]
    arrays: dict[str, list[Array]]
    values: dict[str, Tree]
    divisions: dict[str, Division] = field(default_factory=dict)

    def check(self) -> None:
        """Check that a checkpoint can hold it.

        Raises:
            TypeError: If an array has another dtype than those.
        """
        known: set[object] = set()
        for key, arrays in self.arrays.items():
            for array in arrays:
                if array.dtype not in known:
                    dtype_name(array.dtype, key)
                    known.add(array.dtype)

    def record_of(self, key: str, tensors: Mapping[int, StoredTensor]) -> EntryRecord:
        """Describe an entry whose tensors were written."""
        entry = self.entries[key]
        names = (entry.owner_key, entry.object, entry.part)
        stored = map(tensors.__getitem__, range(len(tensors)))
        columns: Any = zip(*stored, strict=True) if tensors else ((), ())  # Any: mypy loses them
        records, forms = columns
        if key in self.values:
            value = encoded(self.values[key])
            return EntryRecord("value", *names, value=value, tensors=records, forms=forms)
        (shape, dtype), thing = forms[0], entry.thing
        if not isinstance(thing, Variable):
            return EntryRecord("array", *names, shape, dtype, tensors=records)
        kinds = (thing.synchronization.value, thing.aggregation.value)
        parts: Ranges = ()
        if key in self.divisions:
            division = self.divisions[key]
            shape, dtype = division.shape, dtype_name(thing.dtype, key)
            parts = division.held if len(division.held) > 1 else ()
        return EntryRecord("variable", *names, shape, dtype, *kinds, tensors=records, parts=parts)


def dtype_name(dtype: DType, key: str) -> str:
    """Return the name of a dtype that can be stored.

    Raises:
        TypeError: If it cannot.
    """
    name = _name_of(dtype)
    if name not in STORED_AS:
        raise TypeError(
            f"{key!r} in the state has dtype {dtype}, which a checkpoint cannot hold. It holds "
            f"{', '.join(STORED_AS)}."
        )
    return name


@lru_cache(maxsize=256)
def _name_of(dtype: DType) -> str:
    return dtype.newbyteorder("=").name


class StoredTensor(NamedTuple):
    """Location, shape and dtype of a stored tensor."""

    record: TensorRecord
    form: tuple[tuple[int, ...], str]


def require_outside_steps(what: str) -> None:
    """Check that the caller is not part of a step, whose end it would wait for.

    Raises:
        ContextError: If it is.
    """
    place = PLACE.get()
    if (
        place.replica is not None
        or place.in_merge
        or place.is_outside
        or place.update_replica_id is not None
    ):
        raise ContextError(
            f"{what} was called in {place.describe()}, and waits for steps under way: it would "
            "wait for itself. Call it between steps, or from another task."
        )


async def take_cut(state: object) -> Cut:
    """Wait for steps under way, and read the state while new ones are held back.

    Raises:
        TypeError: If something in it cannot be saved.
        ValueError: As `read_state`, or if there are too much plain data.

    Cancellation:
        Lets the steps go on.
    """
    found, cut = read_state(state), None
    while cut is None:
        gates = found.gates
        is_new = any(gate.running for gate in gates)
        async with between_steps(gates):
            if is_new:  # steps may have made slots meanwhile
                found = read_state(state)
            if found.gates.keys() <= gates.keys():
                cut = await look_at_home(found, state)
    cut.check()
    return cut


async def look_at_home(found: State, state: object) -> Cut:
    """Read a state whose variables may live on parameter servers; waits for those only."""
    elsewhere = found.elsewhere()
    if not elsewhere:
        return look(found)
    try:
        for each in elsewhere:
            await each.bring_home(found.variables.values())
        return look(read_state(state))  # with the slots that the servers have
    finally:
        for each in elsewhere:
            each.leave_home()


def look(found: State) -> Cut:
    """Read a state; for who holds the steps back, so it does as little as possible."""
    by_gate: dict[StepGate, list[Variable]] = {gate: [] for gate in found.gates}
    for variable in found.variables.values():
        by_gate[variable.store.gate].append(variable)
    taken: dict[Variable, Any] = {}
    for variables in by_gate.values():
        taken.update(take_snapshot(variables[0].store, variables).components)
    arrays: dict[str, list[Array]] = {}
    values: dict[str, Tree] = {}
    copies = PlainCopies()
    for key, entry in found.entries.items():
        if key in found.variables:
            components = taken[entry.thing]
            arrays[key] = [components[0]] if entry.thing.is_mirrored else [*components]
        elif isinstance(entry.thing, (np.ndarray, np.generic)):
            arrays[key] = [frozen(entry.thing)]
        else:
            arrays[key] = []
            is_own = entry.composite is None and type(entry.thing) in {list, tuple, dict}
            copies.numbers = _WITH_SCALARS if is_own else NUMBERS
            values[key] = copies.take(_plain_state(entry.thing), key, arrays[key])
    next_steps = tuple([gate.next_step for gate in found.gates])
    return Cut(next_steps, found.entries, arrays, values)


def _plain_state(thing: object) -> object:
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    return thing.state_dict() if isinstance(thing, Stateful) else thing


# ---- plain data: copied at the cut at a bounded cost, encoded on the writer's thread -----------


@final
class PlainCopies:
    """Copies of plain data, of bounded size together.

    Attributes:
        numbers: Types of what is taken as it is; other scalars of NumPy are taken as arrays.
    """

    __slots__ = ("_left", "numbers")

    def __init__(self) -> None:
        self._left = MAX_VALUES
        self.numbers = NUMBERS

    def take(self, value: Any, key: str, arrays: list[Array]) -> Any:
        """Copy plain data; arrays go to `arrays` and leave their number.

        Raises:
            TypeError: If something is not plain data.
            ValueError: If all together are too many.
        """
        kind = type(value)
        if kind in self.numbers:
            self._spend(1, key)
            return value
        if kind in TEXTS:
            self._spend(1 + len(value) // TEXT_CHARS, key)
            return value
        if kind is list or kind is tuple:
            self._spend(CONTAINER_VALUES, key)
            if self.numbers.issuperset(map(type, value)):
                self._spend(len(value), key)
                return kind(value)
            return kind([self.take(child, key, arrays) for child in value])
        if kind is dict:
            self._spend(CONTAINER_VALUES, key)
            if self.numbers.issuperset(map(type, value.values())) and _NAMES.issuperset(
                map(type, value)
            ):
                self._spend(2 * len(value), key)
                return value.copy()
            return {
                self.take(name, key, arrays): self.take(child, key, arrays)
                for name, child in value.items()
            }
        return self._take_other(value, key, arrays)

    def _take_other(self, value: object, key: str, arrays: list[Array]) -> object:
        if isinstance(value, (np.ndarray, np.generic)):
            arrays.append(frozen(value))
            return StoredArray(len(arrays) - 1, isinstance(value, np.generic))
        for kind, plain in _KINDS.items():  # what `state_dict` gives may be an OrderedDict
            if isinstance(value, kind):
                return self.take(plain(value), key, arrays)
        raise TypeError(
            f"{key!r} in the state holds {value!r} ({type(value).__name__}), which is not plain "
            "data: numbers, text, bytes, arrays, and lists, tuples and dicts of these."
        )

    def _spend(self, count: int, key: str) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(
                f"The plain data of the state are more than {MAX_VALUES:,} values, with those of "
                f"{key!r}: copying and encoding them would hold the event loop up at every save. "
                "Put long lists of numbers into arrays (`np.array(history)`), long texts into "
                "arrays of bytes."
            )


def frozen(array: object) -> Array:
    """Return an array that nobody writes any more: itself if it is read-only, else a copy."""
    if isinstance(array, np.ndarray) and array.flags.owndata and not array.flags.writeable:
        return array
    return np.array(array)


_KINDS: dict[type[Any], Callable[[Any], Any]] = {
    bytes: bytes, list: list, tuple: tuple, Mapping: dict
}  # fmt: skip
