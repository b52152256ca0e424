"""Kinds of functions that users pass: plain, asynchronous, and with `yield`, which run nothing."""

from __future__ import annotations

import inspect
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager
from functools import partial
from types import AsyncGeneratorType, FunctionType, GeneratorType
from typing import Final

UNFINISHED: Final[dict[type, str]] = {
    GeneratorType: "a generator",
    AsyncGeneratorType: "an async generator",
    _GeneratorContextManager: "a context manager made of a generator",
    _AsyncGeneratorContextManager: "a context manager made of an async generator",
}
"""Types of results that are the body of a function, waiting to be run."""
YIELDS: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
RETURN: Final = "Return the values, in a list perhaps, instead of yielding them."


def is_async(fn: object) -> bool:
    """Tell whether calling `fn` gives a coroutine: an `async def`, through partials and objects."""
    if type(fn) is FunctionType and fn.__code__.co_flags & inspect.CO_COROUTINE:
        return True
    return any(map(inspect.iscoroutinefunction, _called(fn)))


def has_yield(fn: object) -> bool:
    """Tell whether calling `fn` runs nothing of it: a generator function, through the same."""
    if type(fn) is FunctionType:
        return bool(fn.__code__.co_flags & YIELDS)
    return any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in _called(fn))


def refuse_context_passed(fn: object, what: str) -> None:
    """Check that a function whose caller passes it the context is not given it twice.

    Raises:
        TypeError: If it is marked with `ar.with_context`.
    """
    if any(getattr(f, "passes_context", False) for f in _called(fn)):
        raise TypeError(
            f"{what} passes a context to every step, but {fn!r} is marked with ar.with_context, "
            "which passes another one. Leave out the decorator."
        )


def require_no_yield(fn: object, what: str, instead: str = RETURN) -> None:
    """Check that calling a function runs it.

    Args:
        fn: What the user passed.
        what: Names the call in the error.
        instead: What to do.

    Raises:
        TypeError: If it contains `yield`.
    """
    if has_yield(fn):
        raise TypeError(
            f"{what} runs functions to their end, but {fn!r} contains `yield`: calling it runs "
            f"nothing of it. {instead}"
        )


def require_finished(result: object, fn: object, what: str, instead: str = RETURN) -> None:
    """Check what a function returned, which may be a wrapper of one that contains `yield`.

    Raises:
        TypeError: If it is a generator, of which nothing has run.
    """
    if type(result) in UNFINISHED:
        raise unfinished_error(result, fn, what, instead)


def unfinished_error(result: object, fn: object, what: str, instead: str = RETURN) -> TypeError:
    """Build the error of a function that returned a generator."""
    return TypeError(
        f"{what} runs functions to their end, but {fn!r} returned {UNFINISHED[type(result)]}, of "
        f"which nothing has run. {instead}"
    )


def _called(fn: object) -> tuple[object, object]:
    """Return what a call runs: the function of a partial; and for an object its `__call__`."""
    while isinstance(fn, partial):
        fn = fn.func
    return fn, getattr(type(fn), "__call__", None)  # noqa: B004 - its code is looked at
