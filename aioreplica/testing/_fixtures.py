"""Fixtures of pytest inside a simulated run: made anew for every schedule, where that is possible.

A fixture of function scope belongs to one test, hence to one schedule: its function is called again
in each, in the program itself, so that its locks, queues and connections are simulated too. Those
of a wider scope, of pytest itself, with parameters, or that look at the request, stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from unittest import IsolatedAsyncioTestCase

    import pytest

OWN_TO_PYTEST: Final = ("_pytest.", "pytest_asyncio.", "anyio.", "xdist.")
REQUEST: Final = "request"
LATER: Final = object()
"""Value, outside of schedules, of an async fixture that is made in each of them."""


@final
class Fixtures:
    """The fixtures of one test.

    Args:
        item: The test, which pytest has set up.
    """

    def __init__(self, item: pytest.Function) -> None:
        self._item = item
        self._definitions: dict[str, Any] = item._fixtureinfo.name2fixturedefs
        self._names: tuple[str, ...] = tuple(item._fixtureinfo.argnames)

    async def call(self, function: Callable[..., Any]) -> None:
        """Make the fixtures, call the test, and end them in reverse."""
        async with AsyncExitStack() as stack:
            made: dict[str, Any] = {}
            values = {name: await self._value(name, made, stack) for name in self._names}
            await function(**values)

    def shared(self) -> list[str]:
        """Name what the test uses and all schedules share, with its scope."""
        seen: dict[str, None] = {}
        todo = list(self._names)
        while todo:
            name = todo.pop(0)
            definitions = self._definitions.get(name)
            if name in seen or not definitions:
                continue
            seen[name] = None
            todo += definitions[-1].argnames
        return [
            f"{name} ({self._definitions[name][-1].scope} scope)"
            for name in seen
            if not self.is_remade(name) and not self._is_of_pytest(name)
        ]

    async def _value(self, name: str, made: dict[str, Any], stack: AsyncExitStack) -> Any:
        if name in made:
            return made[name]
        if not self.is_remade(name):
            if name in self._item.funcargs:
                return self._item.funcargs[name]
            return self._item._request.getfixturevalue(name)
        definition = self._definitions[name][-1]
        arguments = {
            each: await self._value(each, made, stack)
            for each in definition.argnames
            if each != REQUEST
        }
        value = made[name] = await _enter(self._function(name), arguments, stack)
        return value

    def _function(self, name: str) -> Callable[..., Any]:
        function: Any = inspect.unwrap(self._definitions[name][-1].func)
        owner = getattr(self._item, "instance", None)
        is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        bound: Callable[..., Any] = function
        if is_method and owner is not None:
            bound = function.__get__(owner)
        return bound

    def is_remade(self, name: str) -> bool:
        """Tell whether a fixture is made anew in each schedule."""
        definitions = self._definitions.get(name)
        if not definitions:
            return False
        (*overridden, definition) = definitions
        return bool(
            definition.scope == "function"
            and not definition.params
            and REQUEST not in definition.argnames
            and not (overridden and name in definition.argnames)
            and not self._is_of_pytest(name)
        )

    def _is_of_pytest(self, name: str) -> bool:
        module = getattr(self._definitions[name][-1].func, "__module__", "") or ""
        return f"{module}.".startswith(OWN_TO_PYTEST)


async def _enter(
    function: Callable[..., Any], arguments: dict[str, Any], stack: AsyncExitStack
) -> Any:
    """Call the function of a fixture, of any of the four kinds."""
    made = function(**arguments)
    if inspect.iscoroutine(made):
        return await made
    if inspect.isasyncgen(made):
        stack.push_async_callback(_end_async, made)
        return await anext(made)
    if inspect.isgenerator(made):
        stack.callback(_end, made)
        return next(made)
    return made


async def run_case(cls: type[IsolatedAsyncioTestCase], name: str) -> None:
    """Run a method of a new test case as unittest does, but in the loop that runs.

    Args:
        cls: Class of the case; its `setUpClass` was called.
        name: The method.
    """
    case = cls(name)
    async with AsyncExitStack() as cleanups:
        cleanups.push_async_callback(_clean_up, case)
        case.setUp()
        await case.asyncSetUp()
        cleanups.callback(case.tearDown)
        cleanups.push_async_callback(case.asyncTearDown)
        await getattr(case, name)()


async def _clean_up(case: Any) -> None:
    """Call what was given to `addCleanup` and `addAsyncCleanup`, the last first."""
    async with AsyncExitStack() as cleanups:
        for function, args, kwargs in case._cleanups:  # `doCleanups` wants a loop of its own
            is_async = inspect.iscoroutinefunction(function)
            push = cleanups.push_async_callback if is_async else cleanups.callback
            push(function, *args, **kwargs)
        case._cleanups.clear()


def _end(generator: Any) -> None:
    for _ in generator:
        raise RuntimeError("A fixture yielded more than once.")


async def _end_async(generator: Any) -> None:
    async for _ in generator:
        raise RuntimeError("A fixture yielded more than once.")
