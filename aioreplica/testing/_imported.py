"""Names that a module has imported before: `from queue import SimpleQueue` and the like.

What is replaced in a module is replaced under every such name too, wherever a module outside the
standard library has one at its top level, as freezegun does for clocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from ..context import REGISTRY

OWN: Final = "aioreplica.testing"
STANDARD: Final = sys.stdlib_module_names


def imported_names(real: Mapping[int, object]) -> Iterator[tuple[Any, str, Any]]:
    """Yield module, name and value wherever a module knows one of some objects by a name.

    Args:
        real: The objects, by their ids.

    A module is looked at once in a process: what it had imported then counts.
    """
    known: dict[str, tuple[Any, list[tuple[str, object]]]] = REGISTRY.once("testing_imported", dict)
    for module in new_modules(known):
        names = [(name, value) for name, value in vars(module).items() if id(value) in real]
        known[module.__name__] = module, names
    for module, names in known.values():
        for name, value in names:
            if vars(module).get(name) is value and id(value) in real:
                yield module, name, value


def new_modules(known: Mapping[str, object] | None = None) -> list[ModuleType]:
    """Return the modules that may have imported something and that have not been looked at."""
    if known is None:
        known = REGISTRY.once("testing_imported", dict)
    return [
        module
        for name, module in tuple(sys.modules.items())
        if type(module) is ModuleType
        and module.__name__ == name
        and name not in known
        and name.partition(".")[0] not in STANDARD
        and not name.startswith(OWN)
    ]
