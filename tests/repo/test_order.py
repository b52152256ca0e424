"""No test may hang on a duration or on a number of loop cycles: a busy machine changes both.

Time is real outside `aioreplica.testing`. It is simulated in what a plain test hands to `art.run`,
`art.explore` and their like, and in all that only such tests use.
"""

import ast
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
AT_ONCE_S = 1e-6
"""A limit this short ends a wait when it begins, after its first step."""
LONG_S = 10.0
"""A limit of this many seconds only ends a test that hangs; it decides nothing."""

SIMULATES = {
    *(f"art.{fn}" for fn in ("run", "explore", "replay", "exhaustive", "cancel_everywhere")),
    "simulate",
}
RUNS_LOOPS = {"asyncio.run", "anyio.run", "uvloop.run", "asyncio.Runner", "run_script"}
LIMITS = {"timeout", "timeout_at", "wait_for", "fail_after", "move_on_after"}
WAITS = {"wait", "result"}
POLLS = {"sleep", "wait"}

ALLOWED = {
    "checkpoint/test_cut.py::test_a_loop_that_is_held_for_long_is_warned_of_once_and_stays_held":
        "on a loop of its own, in virtual time",
    "device_loop/test_infeed.py::test_a_thread_that_wants_several_is_woken_once":
        "a number of batches, not of seconds",
    "benchmarks/test_real_bugs.py::LOST_UPDATE": "a program that the testing kit runs",
    "cli/test_explore.py::PROGRAM": "a program that the testing kit runs",
    "input/test_read_ahead.py::seconds_of_an_epoch": "on a loop of its own, in virtual time",
    "libraries/": "programs that the testing kit runs, in simulated time",
    "strategies/test_pipeline.py::Model": "stages that the testing kit runs, in virtual time",
    "testing/programs.py": "programs that the testing kit runs, in simulated time",
    "testing/test_exhaustive.py::RandomProgram": "a program that the testing kit runs",
    "testing/test_pytest.py::ASYNC_FIXTURES": "a test file that the testing kit runs",
    "testing/test_pytest.py::CASES": "a test file that the testing kit runs",
    "testing/test_pytest.py::FIXTURES": "a test file that the testing kit runs",
    "testing/test_pytest.py::METHODS": "a test file that the testing kit runs",
    "testing/test_pytest_suite.py::ASYNCIO_TESTS": "a test file that the testing kit runs",
    "testing/test_simulation.py::sleeper": "what the testing kit is given in all its uses",
    "testing/test_started.py::loops_in_threads": "a program that the testing kit runs",
    "examples/hostile.py": "an attack at random moments; nothing is expected at any of them",
    "online/soak.py": "a load at random moments; nothing is expected at any of them",
    "strategies/test_quiet_runs.py": "on a loop of its own, in virtual time",
    "strategies/test_watching.py::test_the_code_that_holds_the_loop_is_named_in_the_log":
        "what holds a loop takes real time; it is repeated until it was seen",
    "cluster_engines/program.py::slow": "longer than others wait for the word of a worker",
    "cluster_engines/program.py::late": "a wait has to take time to show what it costs",
    "fuzz/calls.py::Calls": "random programs: what holds, holds for every pause",
    "parameter_server_engine/closures.py::sleep_async": "closures that take time, and are awaited",
    "parameter_server_engine/test_programs.py::PROGRAM": "closures that are interrupted",
    "parameter_server_engine/test_worker_kills.py::test_kills_at_any_time":
        "kills at random moments: what holds, holds at each",
    "repo/test_order.py": "examples of what is refused",
}  # fmt: skip
"""Files, folders, and functions of files, in which time decides all the same, with the reason."""


def hanging(source: str) -> list[tuple[str, int, str]]:
    """Return what hangs on time in a test file: the outermost name, the line, the code."""
    tree = ast.parse(source)
    numbers = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    simulated = in_simulated_time(tree)
    return [
        (name, node.lineno, ast.unparse(node).split("\n")[0])
        for name, statement in definitions(tree)
        if name not in simulated
        for node in walk(statement)
        if is_on_time(node, numbers)
    ]


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the outermost statements with the names that they define."""
    for node in tree.body:
        name = getattr(node, "name", "")
        yield name or " ".join(dotted(each) for each in getattr(node, "targets", [])), node


def dotted(node: ast.AST) -> str:
    """Return the source of a name with dots; nothing of other expressions but their attribute."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def walk(statement: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement, and programs in its strings; not what polls for a condition."""
    left = [statement]
    while left:
        node = left.pop()
        yield node
        is_loop = isinstance(node, ast.While)
        left += [n for n in ast.iter_child_nodes(node) if not (is_loop and is_polling(n))]
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "\n" in text and "art." not in text:
            with suppress(SyntaxError, ValueError):
                left.append(ast.parse(textwrap.dedent(text)))


def is_polling(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and any(f"{fn}(" in ast.unparse(node) for fn in POLLS)


def in_simulated_time(tree: ast.Module) -> set[str]:
    """Return the names of which simulated tests, and no others, make use."""
    uses = {
        name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {name}
        for name, node in definitions(tree)
    }
    simulators = {name for name, node in definitions(tree) if is_simulator(node)}
    users = {name: {user for user in uses if name in uses[user]} for name in uses}
    real = {name for name, node in definitions(tree) if is_real(node)}
    simulated = simulators | {
        name for name in uses.keys() - real if name.startswith("test_") and uses[name] & simulators
    }
    while True:
        more = {
            name
            for name in uses.keys() - simulated - real
            if users[name] and users[name] <= simulated
        }
        if not more:
            return simulated
        simulated |= more


def is_simulator(node: ast.stmt) -> bool:
    """Whether this is a plain function that runs something under the testing kit."""
    if "mark.explore" in "".join(map(ast.unparse, getattr(node, "decorator_list", []))):
        return True
    if not isinstance(node, ast.FunctionDef) or is_real(node):
        return False
    return any(dotted(call.func) in SIMULATES for call in calls_in(node))


def is_real(node: ast.stmt) -> bool:
    """Whether a test, a fixture or a program runs on an event loop of asyncio."""
    decorators = "".join(map(ast.unparse, getattr(node, "decorator_list", [])))
    if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
        return "mark.explore" not in decorators
    if "pytest_asyncio" in decorators:
        return True
    return any(dotted(call.func) in RUNS_LOOPS for call in calls_in(node))


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def is_on_time(node: ast.AST, numbers: dict[str, object]) -> bool:
    """Whether a statement or a call lets a duration, or a number of cycles, decide."""
    if isinstance(node, ast.For | ast.AsyncFor):
        is_cycling = all(is_cycle(each) for each in node.body)
        return is_cycling and is_counted(node.iter, numbers)
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func).rpartition(".")[2]
    if name == "cycles":
        return seconds(node.args, numbers) < float("inf")
    if name in {"call_later", "call_at"}:
        return True
    given = [each.value for each in node.keywords if each.arg in {"timeout", "delay"}]
    if name == "sleep":
        return decides(seconds([*node.args, *given], numbers, default=1.0))
    if name in LIMITS:
        return decides(seconds([*given, *node.args[::-1]], numbers))
    if name in WAITS and isinstance(node.func, ast.Attribute):
        return decides(seconds([*given, *node.args[::-1]], numbers))
    return False


def is_counted(items: ast.expr, numbers: dict[str, object]) -> bool:
    """Whether there are so many, and not each number in turn or a random one."""
    if not isinstance(items, ast.Call) or dotted(items.func) != "range":
        return False
    return seconds(items.args[-1:], numbers) < float("inf")


def decides(duration_s: float) -> bool:
    return AT_ONCE_S < duration_s < LONG_S


def is_cycle(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(
        ("sleep(0)", "checkpoint()", "yield_()")
    )


def seconds(
    arguments: list[ast.expr], numbers: dict[str, object], default: float = float("inf")
) -> float:
    """Return the number that the first argument is; the default if nobody knows."""
    for each in arguments[:1]:
        value = numbers.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return default


@pytest.mark.slow
def test_no_test_hangs_on_time() -> None:
    found: list[str] = []
    used: set[str] = set()
    for file in sorted(TESTS.rglob("*.py")):
        path = file.relative_to(TESTS).as_posix()
        for name, line, code in hanging(file.read_text(encoding="utf-8")):
            allowed = {path, f"{path}::{name}", f"{path.partition('/')[0]}/"} & ALLOWED.keys()
            used |= allowed
            if not allowed:
                found.append(f"{path}:{line} {name}: {code}")

    assert found == [], "Force the order: events, tests.sequencer, aioreplica.testing."
    assert used == ALLOWED.keys()


@pytest.mark.parametrize(
    "statement",
    [
        "await asyncio.sleep(0.01)",
        "time.sleep(delay)",
        "for _ in range(20):\n        await asyncio.sleep(0)",
        "loop.call_later(1, event.set)",
        "await asyncio.wait_for(task, timeout=5)",
        "async with asyncio.timeout(SHORT_S):\n        await task",
        "with anyio.move_on_after(0.1):\n        await task",
        "assert gate.wait(5)",
        "await cycles(3)",
        'run_script("""\n    import time\n    time.sleep(1)\n    """)',
    ],
)
def test_waits_decided_by_time_are_found(statement: str) -> None:
    source = f"SHORT_S = 0.5\n\nasync def test_it():\n    {statement}\n"

    assert [name for name, _, _ in hanging(source)] == ["test_it"]


@pytest.mark.parametrize(
    "source",
    [
        "async def test_it():\n    await asyncio.sleep(0)",
        "async def test_it():\n    while not done:\n        await asyncio.sleep(0.01)",
        "async def test_it():\n    async with asyncio.timeout(60):\n        await task",
        "async def test_it(n):\n    for _ in range(n):\n        await asyncio.sleep(0)",
        "def test_it():\n    async def main():\n        await asyncio.sleep(5)\n    art.run(main)",
        "async def main():\n    await asyncio.sleep(5)\ndef test_it():\n    art.explore(main)",
        "@pytest.mark.explore(schedules=9)\nasync def test_it():\n    await asyncio.sleep(5)",
    ],
)
def test_polling_long_limits_and_simulated_time_are_allowed(source: str) -> None:
    assert hanging(source) == []


def test_helpers_shared_with_real_tests_count_as_real_time() -> None:
    source = """
async def late():
    await asyncio.sleep(5)

def test_simulated():
    art.run(late)

async def test_real():
    await late()
"""

    assert [name for name, _, _ in hanging(source)] == ["late"]
