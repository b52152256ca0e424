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
import jax.numpy as jnp
import jaxlib  # noqa: F401
import numpy as np

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # before jax 0.8
    from jax.core import get_opaque_trace_state

from ...errors import ContextError
from ...replica import add_note_once
from ._narrow import is_cut, require_32_bits

FOLDERS = {
    name: f"{Path(sys.modules[name].__file__ or '').parent}{os.sep}"
    for name in ("os", "jax", "jaxlib", "numpy", "optree", "array_api_compat", "aioreplica")
}
LIBRARIES = tuple(FOLDERS.values())
"""Folders whose lines are not the user's; that of `os` is the standard library's."""
COMPUTING = (FOLDERS["jax"], FOLDERS["aioreplica"])
"""Those whose functions put numbers into the program."""
TREES = (f"{os.sep}tree_util.py", f"{os.sep}tree.py", f"{os.sep}tree{os.sep}__init__.py")
"""Ends of the paths of functions that only arrange what they are given."""
FLATTEN = ("tree_flatten", "tree_flatten_with_keys")
"""Methods that take a node of a tree apart: into its children, and what is only compared."""
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
    (
        jax.errors.UnexpectedTracerError,
        "uses what a function that jax transforms has kept. Return it from that function",
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


def require_own_values(num_inputs: int, args: object, fn: object, lines: Iterable[str]) -> None:
    """Check that a program takes nothing but what it is given.

    Args:
        num_inputs: How many arrays it takes.
        args: What it is given.
        fn: The step function.
        lines: Where variables are read in functions that jax transforms.

    Raises:
        TypeError: If it takes more: values of an earlier recording.
    """
    if num_inputs == len(jax.tree.leaves(args)):
        return
    where = ", ".join(lines)
    raise TypeError(
        f"The step {getattr(fn, '__qualname__', fn)} cannot be compiled: it uses a value that was "
        "kept when it was recorded before. A function that jax transforms (jax.jit, "
        "jax.checkpoint, a body or branch) and that is made outside of the step keeps the "
        "variables that it reads, and the keys of jax_key: pass it their values as arguments"
        f"{f' (they are read at {where})' if where else ''}. Functions made in the "
        "step have to return what is used outside of them. Or leave out `compile`."
    )


def refusal(what: str) -> ContextError:
    """Return the error of a call that runs Python in every step."""
    return ContextError(
        f"{what} was called in a step that run_steps compiles: it runs Python in each step, "
        "which a compiled one does not. Do it outside the step, or leave out `compile`."
    )


def recording() -> object:
    """Return what is equal where jax records into the same function."""
    return get_opaque_trace_state()


def require_recorded_in(own: object, what: str) -> None:
    """Check that a call is part of the step itself, so that each step makes it.

    Args:
        own: What `recording` gave in the step.
        what: The call, for the error.

    Raises:
        ContextError: If it is in a function that jax transforms.
    """
    if recording() != own:
        raise ContextError(
            f"{what} was called in a function that jax transforms, such as a branch of "
            "jax.lax.cond, the body of a loop, a function under jax.jit or jax.vmap, or a loss "
            "that is differentiated. jax calls it once to record it, whether or not a step "
            "needs it. Return the value from that function (from a loss with has_aux=True), and "
            "do this with it outside."
        )


@contextmanager
def only_recorded(fn: object = None) -> Iterator[None]:
    """Refuse calls from the user's code that print, read, write, wait or ask the time.

    They would be made once, while the step is recorded, and never again. So are integers of NumPy
    that jax would cut: nothing in the program shows that it did. Nor is it enough that the user's
    code catches what is raised: Python asks a profile function that has raised no more.

    Args:
        fn: The step function, whose file is the user's wherever it lies.

    Raises:
        ContextError: At such a call, and once more at the end if it was caught.
        OverflowError: For such a number, in the same way.
    """
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    own = None if code is None else code.co_filename  # of a prompt, or of an installed package
    refused: list[Exception] = []

    def is_users(frame: FrameType) -> bool:
        return frame.f_code.co_filename == own or _is_users(frame)

    def look(frame: FrameType, event: str, called: Any) -> None:
        try:
            judge(frame, event, called)
        except Exception as error:
            refused.append(error)
            raise

    def judge(frame: FrameType, event: str, called: Any) -> None:
        back = frame.f_back
        if event == "call" and back is not None and is_users(back):
            if _takes_numbers(frame):
                try:
                    require_32_bits(frame.f_locals.values(), "The step")
                except OverflowError:
                    if not _converts(frame):
                        raise
            return
        if event == "return" and back is not None and is_users(frame) and _is_of_jax(back):
            if frame.f_code.co_name in FLATTEN and isinstance(called, tuple):
                called = called[:1]  # the rest is no array: it is compared
            require_32_bits([called], "The step")  # such as the branches of jax.lax.cond
        if event != "c_call" or not is_users(frame):
            return
        owner = getattr(called, "__self__", None)
        if called in ONCE or isinstance(owner, io.IOBase):
            raise refusal(f"{called.__name__}()")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
        if refused:
            raise refused[0]
    finally:
        sys.setprofile(before)
        refused.clear()  # its traceback leads here


def _is_of_jax(frame: FrameType) -> bool:
    """Tell whether it is a function of jax that puts numbers into the program."""
    return _takes_numbers(frame) and frame.f_code.co_filename.startswith(FOLDERS["jax"])


def _takes_numbers(frame: FrameType) -> bool:
    """Tell whether a function of jax or of this library puts numbers into the program."""
    path = frame.f_code.co_filename
    return path.startswith(COMPUTING) and not path.endswith(TREES)


def _converts(frame: FrameType) -> bool:
    """Tell whether a call converts its numbers first, as NumPy does: none of them is cut."""
    name, given = frame.f_code.co_name, frame.f_locals
    if name == "record":
        return True  # as float32
    if name in ("asarray", "array", "full", "full_like"):
        dtype = given.get("dtype")
        if dtype is None and name == "full_like":
            dtype = getattr(given.get("a"), "dtype", None)
        if dtype is None or is_cut(dtype):
            return False
        with jax.ensure_compile_time_eval():  # that of jax 0.7 cuts before it converts
            return name in ("asarray", "array") or jnp.full((), np.int64(2**32), float) != 0
    made = given.get("self")  # jax.numpy.float32, say
    return name == "__call__" and isinstance(made, type) and not is_cut(made)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith((*LIBRARIES, "<")) and INSTALLED not in path


def line_here() -> str:
    """Return the innermost line of the user's that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return "the step" if frame is None else _shown(frame.f_code.co_filename, frame.f_lineno)


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line that is of no library: where the user can do something."""
    found = "the step"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((*LIBRARIES, "<")):
            found = _shown(path, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _shown(path: str, number: int) -> str:
    line = linecache.getline(path, number).strip()
    return f"{path}:{number}" + (f" `{line}`" if line else "")
