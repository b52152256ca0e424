"""Errors of steps that cannot be compiled: which line it was, and what to do."""

from __future__ import annotations

import io
import linecache
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import array_api_compat  # noqa: F401 - its folder is looked up
import jax
import jaxlib  # noqa: F401
import numpy as np

from ...errors import ContextError
from ...replica import add_note_once
from ...values import Variable

FOLDERS = {
    name: f"{Path(sys.modules[name].__file__ or '').parent}{os.sep}"
    for name in ("os", "jax", "jaxlib", "numpy", "optree", "array_api_compat", "aioreplica")
}
LIBRARIES = tuple(FOLDERS.values())
"""Folders whose lines are not the user's; that of `os` is the standard library's."""
COMPUTING = (FOLDERS["jax"], FOLDERS["aioreplica"])
"""Those whose functions put numbers into the program."""
INSTALLED = f"{os.sep}site-packages{os.sep}"
"""Part of the paths of packages, which may read files when they are imported."""

_CURES: tuple[tuple[type[Exception], str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "branches on a value that is not known while the step is recorded. Use jax.numpy.where",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "gives a value that is not known yet to a function of NumPy. Use those of jax.numpy",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "uses a value that is not known while the step is recorded as a count. Use a fixed one",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "needs a number that is not known yet. Report it with ctx.set_last_step_output",
    ),
)


WIDEN = 'Call jax.config.update("jax_enable_x64", True) at program start.'
"""What to do about numbers that need 64 bits."""

ONCE = (print, open, input, time.sleep, time.time, time.monotonic, time.perf_counter, random.random)
"""Calls that are made once, while a step is recorded, and that it makes no more then."""


def explained(error: Exception, fn: Callable[..., object]) -> Exception:
    """Return what to raise for an error of a step that is recorded: with the user's line.

    Args:
        error: What the step has raised.
        fn: The step function.
    """
    where = _line_of(error.__traceback__)
    name = getattr(fn, "__qualname__", None) or repr(fn)
    for kind, cure in _CURES:
        if isinstance(error, kind):
            found = TypeError(
                f"The step {name} cannot be compiled: {where} {cure}, or leave out `compile`."
            )
            found.__cause__ = error
            return found
    add_note_once(error, f"Raised while the step {name} was recorded to be compiled, at {where}.")
    return error


@contextmanager
def only_recorded(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Refuse calls from the user's code that print, read, write, wait or ask the time.

    They would be made once, while the step is recorded, and never again. So are integers of NumPy
    that jax would cut: nothing in the program shows that it did.

    Args:
        refusal: Returns the error of a call of that name.
    """

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_back is not None and _is_users(frame.f_back):
            if frame.f_code.co_filename.startswith(COMPUTING):
                require_32_bits(frame.f_locals.values(), "The step")
            return
        if event != "c_call" or not _is_users(frame):
            return
        owner = getattr(called, "__self__", None)
        if called in ONCE or isinstance(owner, io.IOBase):
            raise refusal(f"{called.__name__}()")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith((*LIBRARIES, "<")) and INSTALLED not in path


def may_wrap(variable: Variable) -> bool:
    """Tell whether a variable is of integers that jax computes in fewer bits."""
    dtype = variable.dtype
    return dtype.kind in "iu" and bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def require_own_dtype(variable: Variable) -> None:
    """Check that jax trains a variable in its own dtype.

    Raises:
        ContextError: If it is of 64 bits, and jax may not use 64.
    """
    dtype = variable.dtype
    if variable.trainable and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ContextError(
            f"Variable {variable.name!r} has dtype {dtype}, which jax computes in 32 bits. "
            f"{WIDEN} Or make it of float32."
        )


def require_32_bits(values: Iterable[object], holder: str) -> None:
    """Check that integers of NumPy are none that jax would cut, as it may not use 64 bits.

    Args:
        values: What to look at, also inside tuples, lists and dicts; others are left alone.
        holder: Who holds them, for the error.

    Raises:
        OverflowError: If one would be cut.
    """
    for value in values:
        if isinstance(value, (tuple, list)):
            require_32_bits(value, holder)
        elif isinstance(value, dict):
            require_32_bits(value.values(), holder)
        elif isinstance(value, (np.ndarray, np.integer)) and value.dtype.kind in "iu":
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            if dtype == value.dtype or not value.size:
                continue
            limits, least, most = np.iinfo(dtype), value.min(), value.max()
            if least < limits.min or most > limits.max:
                raise OverflowError(
                    f"{holder} holds {most if most > limits.max else least}, which {dtype} does "
                    f"not, in which jax computes. {WIDEN}"
                )


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line that is of no library: where the user can do something."""
    found = "the step"
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES) and not code.co_filename.startswith("<"):
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = f"{code.co_filename}:{trace.tb_lineno}" + (f" `{line}`" if line else "")
        trace = trace.tb_next
    return found
