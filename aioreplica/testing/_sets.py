"""Sets of a program's own objects: found in a run, and given an order that every run repeats.

Objects without a `__hash__` of their own hash by their address, so a set of them is walked in an
order that no two runs share. Tasks, futures of the network and scopes of anyio hash by number
from the start. Classes of a program do only once schedules have been seen to differ, because
objects that are older than the run must keep the hash that they had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, Final, final
from weakref import KeyedRef, ref

from ._cancel import Canceller
from ._forbidden import is_foreign
from ._loop import SimLoop
from ._participants import Participant, SimTask, who_went
from ._points import attributes_in, frames_of
from ._pools import PoolTable

if TYPE_CHECKING:
    from ._simulation import Simulation

MAX_LOOKED_AT: Final = 500
"""How many objects of a frame are looked into, for the sets in their attributes."""
MAX_STEPS: Final = 2_000
MAX_CLASSES: Final = 1_000
DEPTH: Final = 2


@final
@dataclass(frozen=True, slots=True)
class PlainSet:
    """A set whose order is that of addresses.

    Attributes:
        name: What the program calls it: a variable, or a class and an attribute.
        classes: Those of its members that hash by address.
    """

    name: str
    classes: tuple[type, ...]

    def describe(self) -> str:
        """Return such as "Scheduler._jobs, a set of Job"."""
        return f"{self.name}, a set of {', '.join(each.__qualname__ for each in self.classes)}"


@final
class SetFinder:
    """Observes a run, and finds the sets that tasks can see between their steps.

    Args:
        canceller: Told of every step too; None where nothing is cancelled.

    Attributes:
        found: Those with two members or more that hash by address, by name.
    """

    def __init__(self, canceller: Canceller | None) -> None:
        self.found: dict[str, PlainSet] = {}
        self._canceller = canceller
        self._num_steps = 0

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""
        if self._canceller is not None:
            self._canceller.begin(loop, pools, main)

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Look at what the task that went can see."""
        if self._canceller is not None:
            self._canceller.after(chosen)
        self._num_steps += 1
        went = who_went(chosen)
        if isinstance(went, SimTask) and self._num_steps <= MAX_STEPS:
            for frame in frames_of(went):
                if not is_foreign(frame.f_code.co_filename):
                    known = frame.f_globals
                    shared = {name: known[name] for name in frame.f_code.co_names if name in known}
                    for name, held in _sets_in({**shared, **frame.f_locals}):
                        self._note(name, held)

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def _note(self, name: str, held: Any) -> None:
        base = set if issubclass(type(held), set) else frozenset  # whose methods cannot fail
        members = tuple(map(_referent, base.__iter__(held)))
        classes = {type(each): None for each in members if _hashes_by_address(type(each))}
        if len(members) > 1 and classes:
            self.found[name] = PlainSet(name, tuple(classes))


def _referent(member: Any) -> object:
    """Return what a weak reference refers to, whose hash is its own; anything else as it is."""
    return ref.__call__(member) if type(member) in (ref, KeyedRef) else member


def _hashes_by_address(cls: type) -> bool:
    real: object = object.__hash__
    return cls.__hash__ is real and cls is not type


def _sets_in(variables: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the sets among some variables, and in the attributes of what they hold, with names."""
    todo = [(name, value, 0) for name, value in variables.items()]
    seen: set[int] = set()
    while todo and len(seen) < MAX_LOOKED_AT:
        name, value, depth = todo.pop(0)
        if issubclass(type(value), (set, frozenset)):
            yield name, value
        elif depth < DEPTH and id(value) not in seen:
            seen.add(id(value))
            owner = type(value).__qualname__.rpartition(".")[2]
            todo += [(f"{owner}.{key}", held, depth + 1) for key, held in _attributes_of(value)]


def _attributes_of(value: object) -> Iterator[tuple[str, object]]:
    if issubclass(type(value), (ModuleType, FunctionType, type)):
        return
    yield from attributes_in(value).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{cls.__name__}{name}" if name[:2] == "__" != name[-2:] else name
            descriptor = vars(cls).get(mangled)
            if type(descriptor) is MemberDescriptorType:  # one of another type runs code
                with suppress(AttributeError):  # it was not set
                    yield mangled, descriptor.__get__(value, cls)


def program_classes() -> list[type]:
    """Return the classes of the program's own modules whose objects hash by address."""
    found: dict[type, None] = {}
    todo: list[type] = [object]
    while todo and len(found) < MAX_CLASSES:
        subclasses: list[type] = type.__subclasses__(todo.pop())
        for cls in subclasses:
            if cls in found or issubclass(cls, (type, BaseException)):
                continue
            todo.append(cls)
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or "<frozen"
            is_own = not is_foreign(file) and "-packages" not in file
            if is_own and _hashes_by_address(cls) and not getattr(cls, "_is_protocol", False):
                found[cls] = None
    return list(found)


def numbered(
    cls: Any, simulation: Simulation, hashed: dict[str, None] | None = None
) -> list[tuple[object, str, Callable[..., object]]]:
    """Return what to replace in a class, so that those that a run makes hash by a number.

    Args:
        cls: The class.
        simulation: The run.
        hashed: Takes the name of the class when one of its objects is hashed in a run.
    """
    real_init, numbers = cls.__init__, simulation.numbers

    @wraps(real_init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807 - it replaces one
        if simulation.is_here():
            simulation.number(self)
        if real_init is not object.__init__:  # it may refuse what is for a `__new__`
            real_init(self, *args, **kwargs)

    def __hash__(self: Any) -> int:  # noqa: N807 - it replaces one
        number = numbers.get(id(self)) if simulation.is_here() else None
        if hashed is not None and number is not None:
            hashed[cls.__qualname__] = None
        return object.__hash__(self) if number is None else number

    return [(cls, "__init__", __init__), (cls, "__hash__", __hash__)]
