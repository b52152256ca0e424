"""Context variables that ops in a device process see: how they are found there, and what travels.

A `ContextVar` cannot be pickled. One that is a global of an importable module is the same global in
the device process; of any other one the device process has a twin, known by number.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, final

import cloudpickle
import numpy as np

from ...context import (
    AWAITED_BY,
    BESIDE,
    CARRIER,
    CLOSURE,
    CLUSTER,
    CREATORS,
    DEVICE,
    DIFFERENTIATING,
    INLINE_STEP,
    LOOP,
    OVERRIDES,
    PLACE,
    REGISTRY,
    TRACE,
)

AnyVar: TypeAlias = "ContextVar[Any]"

MAINS = {"__main__", "__mp_main__"}
OWN: frozenset[AnyVar] = frozenset({
    AWAITED_BY, BESIDE, CARRIER, CLOSURE, CLUSTER, CREATORS, DEVICE, DIFFERENTIATING, INLINE_STEP,
    LOOP, OVERRIDES, PLACE, TRACE,
})  # fmt: skip
MAX_DEFAULT = 4096
IMMUTABLE = frozenset({bool, bytes, float, int, str, type(None)})
NUMPY_ERRORS = "numpy.ufunc.extobj"  # travels as what `np.geterr` gives
DECIMAL = "decimal_context"  # no module has the variable, only functions that read and set it


@final
class VarName(NamedTuple):
    """Name by which another process finds a context variable.

    Attributes:
        module: The module that it is a global of; None if there is none.
        name: Its name there, or what it was made with.
        number: Tells twins apart.
        default: Pickled, for a twin; None if it has none, one that cannot be, or a large one of a
            global, which goes with every op.
    """

    module: str | None
    name: str
    number: int
    default: bytes | None


@final
class VarNames:
    """The names of context variables, each searched for once; for the threads of all lanes."""

    def __init__(self) -> None:
        self._names: dict[AnyVar, VarName] = {}
        self._lock = threading.Lock()

    def name_of(self, var: AnyVar) -> VarName:
        """Return how a device process finds a variable."""
        found = self._names.get(var)
        if found is None:
            with self._lock:  # or two would get the number of one
                found = self._names.get(var)
                if found is None:
                    found = self._names[var] = self._new_name(var)
        return found

    def _new_name(self, var: AnyVar) -> VarName:
        try:
            default: bytes | None = cloudpickle.dumps(Context().run(var.get))
        except Exception:  # noqa: BLE001 - it has none, or one whose `__reduce__` raises
            default = None
        module, name = _search(var) or (None, var.name)
        if module is not None and default is not None and len(default) > MAX_DEFAULT:
            default = None
        return VarName(module, name, len(self._names) + 1, default)


def var_names() -> VarNames:
    """Return the names of the process."""
    return REGISTRY.once("context_variable_names", VarNames)


def find_var(name: VarName) -> AnyVar:
    """Return the variable of a name, in the device process.

    A twin is made once. It stands for a global of a module that cannot be imported there, too.
    """
    twins = REGISTRY.once("context_variable_twins", dict[VarName, AnyVar])
    if name in twins:
        return twins[name]
    if name.module is not None:
        with contextlib.suppress(Exception):  # whatever an import raises
            found = getattr(import_module(name.module), name.name)
            if isinstance(found, ContextVar):
                return found
    default = name.default
    options = {} if default is None else {"default": cloudpickle.loads(default)}
    twins[name] = ContextVar(name.name, **options)
    return twins[name]


@final
class ContextSender:
    """Sends the context variables of ops; says once of each that it cannot.

    Args:
        device_name: Names the device in warnings.
    """

    def __init__(self, device_name: str) -> None:
        self._device_name = device_name
        self._sent: dict[AnyVar, tuple[object, bytes]] = {}
        self._refused: set[VarName] = set()

    def pack(self, context: Context) -> list[tuple[VarName, bytes]]:
        """Return the variables of a context that can be pickled, with their values.

        Warns:
            RuntimeWarning: For each of the others, at its first op.
        """
        packed = []
        for var, value in context.items():
            if var in OWN or var.name == NUMPY_ERRORS:
                continue
            before = self._sent.get(var)
            if before is not None and before[0] is value:
                packed.append((var_names().name_of(var), before[1]))
                continue
            try:
                data = cloudpickle.dumps(value)
            except Exception as error:  # noqa: BLE001 - whatever a `__reduce__` raises
                kind = type(value).__qualname__
                why = f"its value (a {kind}) cannot be pickled: {error}"
                self.refuse(var_names().name_of(var), why)
                continue
            if type(value) in IMMUTABLE:
                self._sent[var] = value, data
            packed.append((var_names().name_of(var), data))
        return packed

    def refuse(self, name: VarName, why: str) -> None:
        """Warn of a variable that does not reach ops, once."""
        if name in self._refused:
            return
        self._refused.add(name)
        warnings.warn(
            f"Context variable {name.name!r} does not reach ops on {self._device_name}, whose lane "
            f"is a device process: {why}. There it has its default.",
            RuntimeWarning,
            stacklevel=2,
        )


def set_vars(packed: Sequence[tuple[VarName, bytes]]) -> list[tuple[VarName, str]]:
    """Set what `ContextSender.pack` gave, in the current context of the device process.

    Returns:
        The variables that cannot be set there, and why.
    """
    refused = []
    for name, data in packed:
        try:
            value = cloudpickle.loads(data)
            if name.module is None and name.name == DECIMAL:
                import_module("decimal").setcontext(value)
            else:
                find_var(name).set(value)
        except Exception as error:  # noqa: BLE001 - whatever building it raises
            why = f"its value cannot be built there: {type(error).__name__}: {error}"
            refused.append((name, why))
    return refused


def numpy_errors(context: Context) -> bytes | None:
    """Return how NumPy treats floating-point errors in a context, pickled; None for its default."""
    found: dict[str, object] = dict(context.run(np.geterr))
    if found == _DEFAULT_ERRORS:
        return None
    if {"call", "log"} & set(found.values()):
        found["call"] = context.run(np.geterrcall)
    data: bytes = cloudpickle.dumps(found)
    return data


_DEFAULT_ERRORS: object = Context().run(np.geterr)


def _search(var: AnyVar) -> tuple[str, str] | None:
    for module_name, module in list(sys.modules.items()):
        if module_name in MAINS:
            continue
        for name, thing in list(getattr(module, "__dict__", {}).items()):
            if thing is var:
                return module_name, name
    return None


def reduce_var(var: AnyVar) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return what a pickler does with a context variable that an op refers to."""
    return find_var, (var_names().name_of(var),)
