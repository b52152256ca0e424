"""Fixtures of pytest inside a simulated run: made anew for every schedule, where that is possible.

A fixture of function scope belongs to one test, hence to one schedule: its function is called again
in each, in the program itself, so that its locks, queues and connections are simulated too, and
nothing of it is made outside. Those of a wider scope stay as they are, and so do those of pytest
itself but for a few. `tmp_path` is emptied, and what was captured dropped, before each schedule.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn, final
from unittest import IsolatedAsyncioTestCase, TestCase

if TYPE_CHECKING:
    import pytest

OWN_TO_PYTEST: Final = ("_pytest.", "pytest_asyncio.", "anyio.", "xdist.")
REMADE_THOUGH_OWN: Final = (
    "monkeypatch", "recwarn", "_xunit_setup_method_fixture", "_xunit_setup_function_fixture",
)  # fmt: skip
"""Beginnings of the names of pytest's own fixtures that a schedule must not leave to the next."""
BACKEND: Final = "anyio_backend"
"""A fixture that says what the test runs on; it is asked before any schedule."""
CAPTURES: Final = ("capsys", "capsysbinary", "capfd", "capfdbinary")
REQUEST: Final = "request"
SHARED_CLASS: Final = (
    "unittest called {0}.setUpClass once, before the run: what it made is real, and all schedules "
    "share it. Make it in asyncSetUp, which each schedule calls."
)
LATER: Final = object()
"""Value, outside of schedules, of a fixture that is made in each of them."""


@final
class Fixtures:
    """The fixtures of one test.

    Args:
        item: The test, which pytest has set up, or sets up.
        test: Its async function, not bound to an instance.
    """

    def __init__(self, item: pytest.Function, test: Callable[..., object]) -> None:
        self.item = item
        self.test = test
        self._definitions: dict[str, tuple[object, ...]] = {}
        self._own: set[int] = set()  # of pytest; other plugins replace functions in set-up
        for name in item._fixtureinfo.name2fixturedefs:
            self._definitions_of(name)

    async def call(self) -> None:
        """Make the fixtures and the instance, call the test, and end the fixtures in reverse."""
        item = self.item
        self._forget()
        async with AsyncExitStack() as stack:
            made = Made(self, _instance_like(item), stack)
            for name in item.fixturenames:  # autouse fixtures and used ones are among them
                if self.is_remade(name):
                    await made.value(name)
            values = {name: await made.value(name) for name in item._fixtureinfo.argnames}
            await made.function()(**values)

    def shared(self) -> list[str]:
        """Name what the test uses and all schedules share, with its scope."""
        seen: dict[str, None] = {}
        todo = list(self.item._fixtureinfo.argnames)
        while todo:
            name = todo.pop(0)
            definitions = self._definitions_of(name)
            if name in seen or not definitions:
                continue
            seen[name] = None
            todo += definitions[-1].argnames
        return [
            f"{name} ({self.definition(name).scope} scope)"
            for name in seen
            if not self.is_remade(name) and id(self.definition(name)) not in self._own
        ]

    def wide_async(self) -> tuple[str, str] | None:
        """Return name and scope of an async fixture that outlives schedules; None without one.

        What it has made belongs to another event loop.
        """
        for name in self.item.fixturenames:
            for definition in reversed(self._definitions_of(name)):
                function = inspect.unwrap(definition.func)
                if definition.scope != "function" and is_async(function):
                    return name, definition.scope
                if name not in definition.argnames:
                    break  # it does not use the one that it overrides
        return None

    def definition(self, name: str, level: int = -1) -> Any:
        """Return the definition of a fixture, or of the one that it overrides; None without."""
        definitions = self._definitions_of(name)
        return definitions[level] if len(definitions) >= -level else None

    def is_remade(self, name: str, level: int = -1) -> bool:
        """Tell whether a fixture is made anew in each schedule."""
        definition = self.definition(name, level)
        if definition is None or definition.scope != "function" or name == BACKEND:
            return False
        return name.startswith(REMADE_THOUGH_OWN) or id(definition) not in self._own

    def _definitions_of(self, name: str) -> tuple[Any, ...]:
        """Return the definitions of a fixture, the one that is used last."""
        if name not in self._definitions:
            item = self.item
            found = item._fixtureinfo.name2fixturedefs.get(name)
            if found is None:  # one that only `getfixturevalue` asks for
                found = item.session._fixturemanager.getfixturedefs(name, item)
            self._definitions[name] = definitions = tuple(found or ())
            self._own |= {id(each) for each in definitions if _is_of_pytest(each)}
        return self._definitions[name]

    def _forget(self) -> None:
        """Take away what an earlier schedule has left with pytest's own fixtures."""
        values: dict[str, Any] = self.item.funcargs
        if "tmp_path" in values:
            for each in values["tmp_path"].iterdir():
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        if "caplog" in values:
            values["caplog"].clear()
        for name in CAPTURES:
            if name in values:
                values[name].readouterr()


@final
class Made:
    """Fixtures of one schedule, as they are made.

    Args:
        fixtures: All there are.
        instance: That of the test's class; None for a function.
        stack: Ends the fixtures.
    """

    def __init__(self, fixtures: Fixtures, instance: object, stack: AsyncExitStack) -> None:
        self.fixtures = fixtures
        self.instance = instance
        self.stack = stack
        self._values: dict[tuple[str, int], object] = {}

    def function(self) -> Callable[..., Any]:
        """Return the test, a method of this schedule's instance if it is one."""
        item, test = self.fixtures.item, self.fixtures.test
        if not inspect.ismethod(item.obj):
            return test
        owner = item.obj.__self__
        bound: Callable[..., object] = test.__get__(
            self.instance if owner is item.instance else owner
        )
        return bound

    async def value(self, name: str, level: int = -1) -> Any:
        """Return what a fixture is in this schedule.

        Args:
            name: The fixture.
            level: -1, or which of those that it overrides, counted from the last.
        """
        if (name, level) in self._values:
            return self._values[name, level]
        fixtures = self.fixtures
        definition = fixtures.definition(name, level)
        if name == REQUEST:
            return Request(self, None, level)
        if not fixtures.is_remade(name, level):
            return self._shared(name, level)
        arguments = {}
        for each in definition.argnames:
            if each == REQUEST:
                arguments[each] = Request(self, name, level)
            else:
                arguments[each] = await self.value(each, level - 1 if each == name else -1)
        value = await _enter(self._bound(definition), arguments, self.stack)
        self._values[name, level] = value
        return value

    def value_now(self, name: str) -> object:
        """Return what a fixture is, to a plain function.

        Raises:
            RuntimeError: If the fixture awaits.
        """
        coroutine: Coroutine[object, None, object] = self.value(name)
        try:
            coroutine.send(None)
        except StopIteration as ended:
            return ended.value
        coroutine.close()
        raise RuntimeError(
            f"request.getfixturevalue({name!r}) is not awaited, and the fixture awaits something. "
            "Name it among the arguments instead."
        )

    def _shared(self, name: str, level: int) -> object:
        item = self.fixtures.item
        if level != -1:  # of a wider scope, and overridden: pytest has made it for the override
            cached = self.fixtures.definition(name, level).cached_result
            return item._request.getfixturevalue(name) if cached is None else cached[0]
        return item.funcargs[name] if name in item.funcargs else item._request.getfixturevalue(name)

    def _bound(self, definition: Any) -> Callable[..., object]:
        function: Any = inspect.unwrap(definition.func)
        is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        bound: Callable[..., object] = function
        if is_method and self.instance is not None:
            bound = function.__get__(self.instance)
        return bound


@final
class Request:
    """Request of a fixture that is made in a schedule, like that of pytest.

    Args:
        made: Fixtures of the schedule.
        name: The fixture that asks; None for the test.
        level: Which of its definitions asks.

    Attributes:
        param: The fixture's parameter; absent without one.
    """

    scope: Final = "function"

    def __init__(self, made: Made, name: str | None, level: int) -> None:
        item = made.fixtures.item
        self._made = made
        self._level = level
        self.fixturename = name
        self.fixturenames = list(item.fixturenames)
        self.node = item
        self.keywords = item.keywords
        self.config = item.config
        self.session = item.session
        self.path = item.path
        self.module = item.module
        self.cls = item.cls
        self.instance = made.instance
        self.function = made.function()
        callspec = getattr(item, "callspec", None)
        if callspec is not None and name in callspec.params:
            self.param = callspec.params[name]

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """Call a function at the end of the schedule."""
        self._made.stack.callback(finalizer)

    def getfixturevalue(self, argname: str) -> Any:
        """Return what a fixture is in this schedule."""
        return self._made.value_now(argname)

    def applymarker(self, marker: str | pytest.MarkDecorator) -> None:
        """Mark the test."""
        self.node.add_marker(marker)

    def raiseerror(self, msg: str | None) -> NoReturn:
        """Fail for want of a fixture.

        Raises:
            LookupError: Always.
        """
        raise LookupError(msg)


def is_async(function: object) -> bool:
    """Tell whether a fixture's function is async."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _instance_like(item: pytest.Function) -> object:
    return None if item.instance is None else type(item.instance)()


def _is_of_pytest(definition: Any) -> bool:
    module = getattr(definition.func, "__module__", "") or ""
    return f"{module}.".startswith(OWN_TO_PYTEST)


async def _enter(
    function: Callable[..., object], arguments: dict[str, Any], stack: AsyncExitStack
) -> object:
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


async def run_case(cls: type[TestCase], name: str, test: Callable[..., object]) -> None:
    """Run a method of a new test case as unittest does, but in the loop that runs.

    Args:
        cls: Class of the case; its `setUpClass` was called.
        name: The method.
        test: Its async function, not bound.
    """
    case = cls(name)
    if getattr(cls.setUpClass, "__func__", None) is not vars(TestCase)["setUpClass"].__func__:
        notes: dict[str, None] = vars(asyncio.get_running_loop())["notes"]
        notes[SHARED_CLASS.format(cls.__qualname__)] = None
    async with AsyncExitStack() as cleanups:
        cleanups.push_async_callback(_clean_up, case)
        case.setUp()
        if isinstance(case, IsolatedAsyncioTestCase):
            await case.asyncSetUp()
        cleanups.callback(case.tearDown)
        if isinstance(case, IsolatedAsyncioTestCase):
            cleanups.push_async_callback(case.asyncTearDown)
        await test.__get__(case)()


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
