"""The index of names: it has every public name, and each has a line."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sphinx")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

index: ModuleType = importlib.import_module("_api_index")


def test_every_public_module_is_there() -> None:
    root = Path(index.importlib.import_module("aioreplica").__file__).parent
    packages = {
        ".".join(["aioreplica", *path.parent.relative_to(root).parts])
        for path in root.rglob("__init__.py")
        if not path.parent.name.startswith("_")
    }

    assert packages <= {module.__name__ for module in index.modules()}


def test_every_name_of_all_is_there_once_with_a_line() -> None:
    for module in index.modules():
        found = {entry.name: entry for entry in index.entries(module)}
        assert set(found) >= set(getattr(module, "__all__", ())), module.__name__
        assert {name for name, entry in found.items() if not entry.line} == set(), module.__name__
        assert {entry.path for entry in found.values() if "._" in entry.path} == set()
