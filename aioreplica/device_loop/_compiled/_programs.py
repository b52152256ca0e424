"""The compiled programs of a strategy: found by step function and look of the elements."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, final

import jax
import numpy as np

from ...context import CurrentStrategy
from ...errors import OutOfSyncError
from ...tree import Array, DType, flatten
from ...values import Variable, WeakVariableDict
from ._devices import jax_devices
from ._narrow import require_32_bits
from ._program import StepProgram

MAX_PROGRAMS = 32
"""How many programs a strategy keeps; the one that was not used for longest goes first."""

MANY = 5
"""From how many programs of one step function on that is warned of."""


@final
class CompiledSteps:
    """Finds and keeps the programs of a strategy.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: CurrentStrategy) -> None:
        self._strategy = strategy
        self._devices = jax_devices(strategy.device_names)
        self._found: dict[Any, StepProgram] = {}
        self._kept: WeakVariableDict[tuple[tuple[Array, ...], Any]] = WeakVariableDict()
        self._num_gone = 0
        self._counts: dict[object, int] = {}

    @property
    def num_compiled(self) -> int:
        """Number of programs compiled so far."""
        return self._num_gone + sum(each.num_compiled for each in list(self._found.values()))

    def arrays(self, part: object) -> list[Array]:
        """Return the arrays of one replica's part of an element.

        Raises:
            TypeError: If a leaf is not a number or an array of numbers.
        """
        found = []
        for leaf in flatten(part)[0]:
            array = np.asarray(leaf)
            if array.dtype.kind not in "fiubc" and array.dtype.name != "bfloat16":
                raise TypeError(
                    f"A compiled step takes arrays of numbers, but an element holds {leaf!r} "
                    f"({type(leaf).__name__})."
                )
            found.append(array)
        return found

    def find(
        self,
        fn: Callable[..., object],
        part: object,
        element: Sequence[Sequence[Array]],
        initial: Mapping[str, object],
    ) -> StepProgram:
        """Return the program for a step function and elements like this one.

        Args:
            fn: The step function.
            part: The element's part of replica 0.
            element: The arrays of each replica's part.
            initial: Outputs to begin with.

        Raises:
            ValueError: If parts of the replicas differ in shape or dtype.
            Exception: What the step raises while it is recorded.
        """
        spec = flatten(part)[1]
        looks = [[(a.shape, a.dtype) for a in own] for own in element]
        for replica_id, of_one in enumerate(looks):
            if of_one != looks[0]:
                raise ValueError(
                    f"The element has {_shown(of_one)} for replica {replica_id}, but "
                    f"{_shown(looks[0])} for replica 0. A compiled step is one program for all "
                    "replicas: bring parts of one size (drop_remainder=True, and a global batch "
                    "that the number of replicas divides)."
                )
        begun = [(name, *_look_of(value)) for name, value in initial.items()]
        own: object = fn if type(fn) is MethodType else id(fn)  # methods are made anew, and equal
        is_wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        key = (own, spec, tuple(looks[0]), tuple(begun), is_wide)
        found = self._found.pop(key, None)
        if found is None:
            self._count(fn)
        elif not found.is_current:
            self._num_gone += found.num_compiled
            found = None
        if found is None:
            reference = _reference_to(fn, lambda _: self._forget(own))
            found = StepProgram(reference, self._strategy, self._devices, element[0], spec, initial)
            if len(self._found) == MAX_PROGRAMS:
                self._drop(next(iter(list(self._found))))
        self._found[key] = found
        return found

    def clear(self) -> None:
        """Let go of all programs and arrays."""
        self._num_gone = self.num_compiled
        self._found.clear()
        self._kept = WeakVariableDict()

    def _forget(self, own: object) -> None:
        """Let go of the programs of a step function that is gone, and with it its variables."""
        for key in [key for key in list(self._found) if key[0] == own]:
            self._drop(key)

    def _drop(self, key: tuple[object, ...]) -> None:
        """Let go of the programs under a key, unless another thread has."""
        found = self._found.pop(key, None)
        if found is not None:
            self._num_gone += found.num_compiled

    def load(
        self, program: StepProgram, components: Mapping[Variable, tuple[Array, ...]]
    ) -> list[object]:
        """Return the values of a program's variables as arrays of jax.

        Those that the last program has left are taken as they are.

        Raises:
            OutOfSyncError: If components of a mirrored variable differ.
        """
        state = []
        for variable, is_mirrored in zip(program.state, program.is_mirrored, strict=True):
            parts = components[variable]
            kept = self._kept.pop(variable)  # not held beside what this run makes of it
            dtype = jax.dtypes.canonicalize_dtype(variable.dtype)  # it may have changed since
            if kept is not None and kept[0] is parts and kept[1].dtype == dtype:
                array = kept[1]
            else:
                narrow = [_narrowed(variable, part) for part in parts]
                if is_mirrored:
                    _require_equal(variable, parts)
                    array = program.put(narrow[0])
                else:
                    array = program.put_each(narrow)
            state.append(array)
        return state

    def keep(
        self,
        program: StepProgram,
        components: Mapping[Variable, tuple[Array, ...]],
        state: Sequence[object],
    ) -> None:
        """Remember the arrays behind what was published."""
        for variable, array in zip(program.state, state, strict=True):
            self._kept[variable] = components[variable], array

    def _count(self, fn: Callable[..., object]) -> None:
        code = getattr(_plain(fn), "__code__", type(fn))
        count = self._counts[code] = self._counts.get(code, 0) + 1
        if count == MANY + 1:
            warnings.warn(
                f"{_name_of(fn)} was compiled {count} times: for a new function object, or for "
                "elements of another shape or dtype, each time. Define the step once, outside the "
                "loop, and bring elements of few shapes.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<CompiledSteps | {len(self._found)} step functions, {self.num_compiled} compiled>"


def _reference_to(
    fn: Callable[..., object], gone: Callable[[object], None]
) -> Callable[[], Callable[..., object] | None]:
    """Return what gives a step function as long as it lives; methods and the like are kept.

    Args:
        fn: The step function.
        gone: Called when it is not there any more.
    """
    if type(fn) is not MethodType:
        with suppress(TypeError):
            return weakref.ref(fn, gone)
    return lambda: fn


def _plain(fn: Any) -> Any:  # Any: whatever can be called
    """Return the function that is called in the end, as far as that can be told."""
    while isinstance(fn, partial):
        fn = fn.func
    return type(fn).__call__ if getattr(fn, "__code__", None) is None else fn


def _name_of(fn: Any) -> str:
    name: str | None = getattr(fn, "__qualname__", None)
    return name or str(getattr(_plain(fn), "__qualname__", fn))


def _look_of(value: object) -> tuple[object, ...]:
    found, spec = flatten(value)
    arrays = [np.asarray(leaf) for leaf in found]
    return spec, tuple((array.shape, array.dtype) for array in arrays)


def _shown(looks: Sequence[tuple[tuple[int, ...], DType]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in looks) or "nothing"


def _narrowed(variable: Variable, part: Array) -> Array:
    """Return a component in the dtype that jax computes in."""
    dtype = jax.dtypes.canonicalize_dtype(part.dtype)
    if dtype == part.dtype:
        return part
    require_32_bits([part], f"Variable {variable.name!r}")
    return part.astype(dtype)


def _require_equal(variable: Variable, parts: Sequence[Array]) -> None:
    for replica_id, part in enumerate(parts):
        if part is not parts[0] and not np.array_equal(part, parts[0], equal_nan=True):
            raise OutOfSyncError(
                f"Variable {variable.name!r} differs between replica 0 and {replica_id}, but a "
                "compiled step has one value of a mirrored variable.",
            )
