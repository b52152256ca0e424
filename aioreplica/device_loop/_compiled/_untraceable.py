"""Errors of steps that cannot be compiled: which line it was, and what to do."""

from __future__ import annotations

import io
import linecache
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import array_api_compat  # noqa: F401 - its folder is looked up
import jax
import jaxlib  # noqa: F401
import numpy as np  # noqa: F401

from ...errors import ContextError
from ...replica import add_note_once
from ._narrow import require_32_bits

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


def refusal(what: str) -> ContextError:
    """Return the error of a call that runs Python in every step."""
    return ContextError(
        f"{what} was called in a step that run_steps compiles: it runs Python in each step, "
        "which a compiled one does not. Do it outside the step, or leave out `compile`."
    )


@contextmanager
def only_recorded() -> Iterator[None]:
    """Refuse calls from the user's code that print, read, write, wait or ask the time.

    They would be made once, while the step is recorded, and never again. So are integers of NumPy
    that jax would cut: nothing in the program shows that it did.
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
