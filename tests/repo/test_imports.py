"""Import circles: none at run time, none between packages, small ones for types in a package."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_MODULES_IN_A_CIRCLE = 3
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One name that a module imports: `from source import name as given`."""

    source: str
    name: str | None
    given: str
    is_at_run_time: bool


@pytest.fixture(scope="module")
def modules() -> "Modules":
    return Modules(ROOT / "aioreplica")


def test_no_modules_import_each_other_at_run_time(modules: "Modules") -> None:
    assert circles(modules.graph(at_run_time=True)) == []


def test_no_packages_import_each_other_not_even_for_types(modules: "Modules") -> None:
    found = circles(modules.graph(at_run_time=False))

    assert [circle for circle in found if len({package_of(name) for name in circle}) > 1] == []


def test_few_modules_of_a_package_depend_on_each_other(modules: "Modules") -> None:
    found = circles(modules.graph(at_run_time=False))

    assert [circle for circle in found if len(circle) > MAX_MODULES_IN_A_CIRCLE] == []


# --- the measurement --------------------------------------------------------------------------


class Modules:
    """The modules under a folder, and what each of them imports from the others."""

    def __init__(self, folder: Path) -> None:
        self.packages: set[str] = set()
        self.imports: dict[str, list[Import]] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            if is_package:
                self.packages.add(name)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.imports[name] = list(imports_of(tree, name, is_package))

    def graph(self, *, at_run_time: bool) -> dict[str, set[str]]:
        """Return which modules each one imports: directly, or by a name that a package hands on.

        Args:
            at_run_time: Leave out imports for types and those inside functions.
        """
        return {
            module: {
                home
                for each in found
                if each.is_at_run_time or not at_run_time
                if (home := self._home(each.source, each.name)) not in {None, module}
                if home not in self.packages
            }
            for module, found in self.imports.items()
            if module not in self.packages
        }

    def _home(self, source: str, name: str | None) -> str | None:
        """Return the module in which `from source import name` was made, None outside."""
        if f"{source}.{name}" in self.imports:
            return f"{source}.{name}"
        if source in self.packages:
            for each in self.imports[source]:
                if each.given == name and (each.source, each.name) != (source, name):
                    return self._home(each.source, each.name)
        return source if source in self.imports else None


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    later = {id(node) for part in parts_run_later(tree) for node in ast.walk(part)}
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        is_at_run_time = id(node) not in later
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, alias.asname or alias.name, is_at_run_time)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                yield Import(source, alias.name, alias.asname or alias.name, is_at_run_time)


def parts_run_later(tree: ast.Module) -> Iterator[ast.AST]:
    """Find functions, and what only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that can all reach each other, largest first."""
    reached = {module: reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in seen if module in reached.get(other, ())))
        for module, seen in reached.items()
    }
    return sorted((list(group) for group in groups if len(group) > 1), key=len, reverse=True)


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for other in graph.get(left.pop(), ()):
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def package_of(module: str) -> str:
    return module.split(".")[1]


# --- is it measured? --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "at_run_time", "for_types"),
    [
        ({"a/_x": "from ._y import y", "a/_y": "y = 1"}, [], []),
        (
            {"a/_x": "from . import _y", "a/_y": "from ._x import x"},
            [["top.a._x", "top.a._y"]],
            [["top.a._x", "top.a._y"]],
        ),
        (
            {
                "a/__init__": "from ._x import x as x",
                "a/_x": "def f():\n    from ..b import y",
                "b/__init__": "from ._y import y as y",
                "b/_y": "import typing\nif typing.TYPE_CHECKING:\n    from ..a import x",
            },
            [],
            [["top.a._x", "top.b._y"]],
        ),
        (
            {
                "a/_x": "from ._y import y",
                "a/_y": "import top.a._z",
                "a/_z": "from top.a._x import x",
            },
            [["top.a._x", "top.a._y", "top.a._z"]],
            [["top.a._x", "top.a._y", "top.a._z"]],
        ),
    ],
    ids=["a chain", "of two", "through packages, for types", "of three, absolute"],
)
def test_circles_are_found(
    tmp_path: Path,
    sources: dict[str, str],
    at_run_time: list[list[str]],
    for_types: list[list[str]],
) -> None:
    for name, source in ({"__init__": "", "a/__init__": "", "b/__init__": ""} | sources).items():
        path = tmp_path / "top" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)

    modules = Modules(tmp_path / "top")

    assert circles(modules.graph(at_run_time=True)) == at_run_time
    assert circles(modules.graph(at_run_time=False)) == for_types
