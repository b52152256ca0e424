"""The wall: a name is exported for users, not so that another package of the library can import it.

Public is what a page for users or an example names in code, what stands at the top level, what
users implement, and the types in the signatures of these. Other packages import inner names from
the package all the same; `__all__` does not list them.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioreplica as ar

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "aioreplica"
MAX_EXPORTED = 240
NO_PAGES = {"api_index.md", "architecture.md", "reference.md"}
IMPLEMENTED = {  # chosen by an entry point or by a connection, or written by users
    "Backend", "DaskClosureEngine", "FsspecStorage", "LocalStorage", "MpiCommunicator",
    "TorchCommunicator",
}  # fmt: skip
CALLED = {  # special methods whose signatures users see
    "__aenter__", "__aiter__", "__anext__", "__await__", "__call__", "__enter__", "__getitem__",
    "__init__", "__iter__",
}  # fmt: skip
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The packages that export each name."""
    found: dict[str, set[str]] = {}
    for info in pkgutil.walk_packages(ar.__path__, "aioreplica."):
        if "._" not in info.name:
            for name in getattr(importlib.import_module(info.name), "__all__", ()):
                found.setdefault(name, set()).add(info.name)
    return found


@pytest.fixture(scope="module")
def words_on_pages() -> set[str]:
    """Every word of code on pages for users and in examples."""
    pages = [ROOT / "README.md", *(p for p in ROOT.glob("docs/*.md") if p.name not in NO_PAGES)]
    pages += ROOT.glob("examples/**/*.md")
    found: set[str] = set()
    for page in pages:
        blocks = re.findall(r"```.*?```|`[^`]+`", page.read_text(encoding="utf-8"), re.DOTALL)
        found.update(re.findall(r"\w+", " ".join(blocks)))
    for pattern in ("examples/**/*.py", "examples/**/*.ipynb"):
        for path in ROOT.glob(pattern):
            found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


@pytest.fixture(scope="module")
def definitions() -> dict[str, list[Definition]]:
    """Classes, functions and assignments of all modules, by name."""
    found: dict[str, list[Definition]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.setdefault(node.name, []).append(node)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    found.setdefault(name, []).append(node)
    return found


def names_in(*nodes: ast.AST | None) -> Iterator[str]:
    for outer in nodes:
        for node in ast.walk(outer) if outer is not None else ():
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"\w+", node.value)


def signature(node: ast.AST) -> Iterator[str]:
    """Names in what users see of a definition; for a class in its bases and public members."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            given = ast.walk(node.args)
            yield from names_in(*(a.annotation for a in given if isinstance(a, ast.arg)))
            yield from names_in(node.returns)
        case ast.ClassDef():
            yield from names_in(*node.bases)
            for member in node.body:
                if isinstance(member, ast.AnnAssign):
                    yield from names_in(member.annotation)
                elif not getattr(member, "name", "_").startswith("_") or is_called(member):
                    yield from signature(member)
        case _:
            yield from names_in(node)


def is_called(node: ast.stmt) -> bool:
    return getattr(node, "name", "") in CALLED


@pytest.mark.slow
def test_every_exported_name_is_for_users(
    exported: dict[str, set[str]],
    definitions: dict[str, list[Definition]],
    words_on_pages: set[str],
) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    types = {name for name, nodes in definitions.items() if not isinstance(nodes[0], functions)}
    documented = words_on_pages | IMPLEMENTED
    todo = {name for name in exported if name in documented or hasattr(ar, name)}
    public: set[str] = set()
    while todo:
        name = todo.pop()
        public.add(name)
        seen = {word for node in definitions.get(name, ()) for word in signature(node)}
        todo |= {word for word in seen & types if word not in public}

    unused = {name: sorted(homes) for name, homes in exported.items() if name not in public}
    assert unused == {}


@pytest.mark.parametrize(
    ("name", "at_most"), [("Strategy", 30), ("Variable", 25), ("ReplicaContext", 27)]
)
def test_facades_have_few_public_members(name: str, at_most: int) -> None:
    members = [member for member in dir(getattr(ar, name)) if not member.startswith("_")]

    assert len(members) <= at_most, members


@pytest.mark.slow
def test_a_name_has_one_public_path(exported: dict[str, set[str]]) -> None:
    several = {
        name: sorted(homes)
        for name, homes in exported.items()
        if len({id(getattr(importlib.import_module(home), name)) for home in homes}) < len(homes)
    }

    assert several == {}


@pytest.mark.slow
def test_the_wall_is_low_enough_to_look_over(exported: dict[str, set[str]]) -> None:
    of_packages = [
        (name, home)
        for name, homes in exported.items()
        for home in homes
        if not home.startswith("aioreplica.integrations.")  # modules, imported one at a time
    ]

    assert len(of_packages) <= MAX_EXPORTED


@pytest.mark.slow
def test_every_exported_function_is_on_a_page(
    exported: dict[str, set[str]],
    definitions: dict[str, list[Definition]],
    words_on_pages: set[str],
) -> None:
    functions = {
        name
        for name, nodes in definitions.items()
        if isinstance(nodes[0], (ast.FunctionDef, ast.AsyncFunctionDef))
    }

    assert exported.keys() & functions - words_on_pages == set()
