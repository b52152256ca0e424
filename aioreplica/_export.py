"""Public-path fix for package tables of contents: names show where users import them from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import FunctionType


def export_public(module_name: str, names: Iterable[str], namespace: Mapping[str, object]) -> None:
    """Make `repr`, pickles, docs and tracebacks show the package path of every exported name."""
    for name in names:
        exported = namespace[name]
        if isinstance(exported, (type, FunctionType)):
            exported.__module__ = module_name


def export_lazily(
    module_name: str,
    names: Mapping[str, Sequence[str]],
    *,
    packages: Sequence[str] = (),
    unlisted: Sequence[str] = (),
    loaded: Sequence[str] = (),
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names at first use.

    What they are is written down for type checkers in the stub beside the package.

    Args:
        module_name: The package.
        names: The names that it exports, by the package or module that each comes from.
        packages: Packages inside it that it exports too.
        unlisted: Packages inside it that are found but not listed.
        loaded: Names that it has imported and exports too. All names then show its path, as by
            `export_public`.

    Source:
        PEP 562, and SPEC 1 of the scientific Python projects.
    """
    homes = {name: home for home, listed in names.items() for name in listed}
    inside = {*packages, *unlisted}
    exported = sorted([*homes, *packages, *loaded])
    export_public(module_name, loaded, vars(sys.modules[module_name]))

    def load(name: str) -> object:
        if name in inside:  # importing it makes it an attribute
            return import_module(f"{module_name}.{name}")
        if name not in homes:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        found: object = getattr(import_module(f"{module_name}.{homes[name]}"), name)
        if loaded:
            export_public(module_name, (name,), {name: found})
        setattr(sys.modules[module_name], name, found)
        return found

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *exported})

    return load, listing, exported
