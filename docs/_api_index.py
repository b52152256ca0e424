"""The directive `api-index`: every public name with the first line of what its docstring says.

Names come from `__all__` of the packages, so the list is complete whatever is added to them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

ROOT = "aioreplica"


@dataclass(frozen=True)
class Entry:
    """A public name: the path of its description, "" for a constant, and its first line."""

    name: str
    path: str
    line: str


def modules() -> list[ModuleType]:
    """Return the public packages and modules, the root first."""
    root = importlib.import_module(ROOT)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{ROOT}.")]
    public = [name for name in names if not any(p.startswith("_") for p in name.split("."))]
    return [root, *map(importlib.import_module, public)]


def entries(module: ModuleType) -> Iterator[Entry]:
    """Yield what a module exports, in the order of the alphabet."""
    for name in sorted(exported(module), key=str.lower):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield Entry(name, value.__name__, first_line(value))
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield Entry(name, f"{value.__module__}.{name}", first_line(value))
        else:
            yield Entry(name, "", line_of_constant(module, name))


def exported(module: ModuleType) -> list[str]:
    """Return the public names of a module; one without `__all__` exports what it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def first_line(value: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def line_of_constant(module: ModuleType, name: str) -> str:
    """Return the first line of the text below a constant, where that is defined."""
    for candidate in (module.__name__, *defining_modules(module, name)):
        try:
            docs = ModuleAnalyzer.for_module(candidate).find_attr_docs()
        except PycodeError:
            continue
        if ("", name) in docs:
            return docs["", name][0]
    return ""


def defining_modules(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the private modules of a package that have the name."""
    for other in list(vars(module).values()):
        if inspect.ismodule(other) and other.__name__.startswith(ROOT) and name in vars(other):
            yield other.__name__


class ApiIndex(Directive):
    """A list of all public names, a section for each module."""

    def run(self) -> list[Any]:
        """Return the sections."""
        self.state.document.settings.env.note_reread()  # the names may have changed
        nodes: list[Any] = []
        for module in modules():
            listed = list(entries(module))
            if not listed:
                continue
            lines = [f"## `{module.__name__}`", ""]
            for entry in listed:
                text = entry.line.replace("``", "`")
                role = f"{{py:obj}}`{entry.name} <{entry.path}>`"
                lines.append(f"- {role if entry.path else f'`{entry.name}`'}: {text}")
            holder = importlib.import_module("docutils.nodes").section()
            self.state.nested_parse(StringList(lines, source="api-index"), 0, holder)
            nodes += holder.children
        return nodes


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("api-index", ApiIndex)
    return {"parallel_read_safe": True}
