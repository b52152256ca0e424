"""Rules compiled to one pass over memory, by numba where it is installed (the extra `fast`).

A step goes over its arrays up to a dozen times in NumPy; compiled, it goes over them once, and over
those of the gradients' parts. Results have the same bits, and the interpreter's lock is free
meanwhile, so that several threads are worth waking sooner. A kernel is compiled in the first step
that can use it, never on the event loop, and kept on disk for the next program.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import FunctionType
from typing import Any, TypeAlias, final

import numpy as np

from ..context import REGISTRY
from ._kernels import Kernel, gather

Compiled: TypeAlias = Callable[..., int]
DType: TypeAlias = np.dtype[Any]

FUSED_RULES = "fused_rules"
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@final
class FusedRules:
    """Compiles kernels, each once for a dtype, and finds the one for a block.

    Where numba is installed, `SGD`, `Adam`, `AdamW`, `Adagrad` and `RMSprop` find the process's
    by themselves.
    NUMBA_DISABLE_JIT=1 in the environment leaves every rule in NumPy.

    Args:
        is_on: Whether to compile; by default where numba is installed.
    """

    def __init__(self, is_on: bool | None = None) -> None:
        self._lock = threading.Lock()
        self._is_on = find_spec("numba") is not None if is_on is None else is_on
        self._compiled: dict[tuple[Kernel, DType], Compiled | None] = {}

    def find(self, kernel: Kernel | None, dtype: DType, parts: Iterable[Any]) -> Compiled | None:
        """Return what runs a kernel on variables of a dtype; None if NumPy has to.

        Args:
            kernel: The kernel, if there is one.
            dtype: Of the variables.
            parts: Of the gradient: arrays.
        """
        found = None if kernel is None else self._compiled.get((kernel, dtype))
        if found is not None:
            for part in parts:
                if part.dtype is not dtype or not part.flags.aligned:
                    return None
        return found

    def has(self, kernel: Kernel | None, dtype: DType) -> bool:
        """Tell whether a kernel is compiled for a dtype."""
        return kernel is not None and self._compiled.get((kernel, dtype)) is not None

    def missing(self, kernel: Kernel, dtypes: Iterable[DType]) -> list[DType]:
        """Return the dtypes for which a kernel has to be compiled."""
        if not self._is_on:
            return []
        return [each for each in dict.fromkeys(dtypes) if (kernel, each) not in self._compiled]

    def compile(self, kernel: Kernel, dtypes: Iterable[DType]) -> None:
        """Compile a kernel: takes some seconds, or a tenth of one where it is on disk.

        If it fails, the rule stays in NumPy, and a RuntimeWarning says why.
        """
        with self._lock:
            for dtype in self.missing(kernel, dtypes):
                made = None
                if dtype in FLOATS:
                    try:
                        made = _compiled(kernel, dtype)
                    except Exception as error:  # noqa: BLE001 - NumPy may be too new for it
                        self._give_up(error)
                self._compiled[kernel, dtype] = made

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        warnings.warn(
            f"numba cannot compile the update rules ({type(error).__name__}: {error}), so they run "
            "in NumPy, with the same results. Update numba, or uninstall it.",
            RuntimeWarning,
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return f"<FusedRules | {'on' if self._is_on else 'off'}, {len(self._compiled)} compiled>"


def fused_rules() -> FusedRules:
    """Return those of the process."""
    return REGISTRY.once(FUSED_RULES, FusedRules)


def _compiled(kernel: Kernel, dtype: DType) -> Compiled | None:
    from numba import config, from_dtype, njit, types

    if config.DISABLE_JIT:
        return None
    number = from_dtype(dtype)
    read = types.Array(number, 1, "C", readonly=True)
    written = types.Array(number, 1, "C")
    how = types.UniTuple(number, 5)
    old, new = [read] * (kernel.num_slots + 1), [written] * (kernel.num_slots + 1)
    signature = types.int64(read, read, how, *old, *new, *[number] * kernel.num_numbers)
    options = {"nogil": True, "error_model": "numpy"}
    gathers = njit(types.boolean(written, types.intp, read, read, how), **options)(gather)
    # The kernel finds it under the name of what it calls in plain Python.
    names = {**kernel.function.__globals__, gather.__name__: gathers}
    function = FunctionType(kernel.function.__code__, names)
    try:
        made: Compiled = njit(signature, cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        made = njit(signature, **options)(function)
    return made
