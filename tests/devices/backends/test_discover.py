"""Finding backends by entry point, and the backend of an array."""

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioreplica.context import Registry
from aioreplica.devices.backends import NumpyBackend, _discover, backend_of, find_backends


class FakePoint:
    """An entry point that loads whatever it was given."""

    def __init__(self, name: str, loaded: Any) -> None:
        self.name = name
        self._loaded = loaded

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


def fake_backend(name: str) -> Any:
    return lambda: SimpleNamespace(name=name)


def discover(monkeypatch: pytest.MonkeyPatch, *points: FakePoint) -> list[str]:
    asked: list[str] = []

    def entry_points(*, group: str) -> tuple[FakePoint, ...]:
        asked.append(group)
        return points

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(_discover, "REGISTRY", Registry())
    found = find_backends()
    assert asked == ["aioreplica.backends"]
    return [backend.name for backend in found]


def test_numpy_comes_first_and_the_others_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = discover(
        monkeypatch,
        FakePoint("torch", fake_backend("torch")),
        FakePoint("numpy", NumpyBackend),
        FakePoint("jax", fake_backend("jax")),
    )

    assert names == ["numpy", "jax", "torch"]


def test_numpy_is_there_without_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover(monkeypatch) == ["numpy"]


def test_a_backend_whose_library_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = discover(
        monkeypatch,
        FakePoint("cupy", ModuleNotFoundError("No module named 'cupy'")),
        FakePoint("jax", fake_backend("jax")),
    )

    assert names == ["numpy", "jax"]


def test_a_backend_that_is_broken_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        discover(monkeypatch, FakePoint("odd", ZeroDivisionError("broken")))


def test_this_process_has_the_numpy_backend() -> None:
    assert isinstance(find_backends()[0], NumpyBackend)
    assert find_backends() is find_backends()


@pytest.mark.parametrize("value", [np.zeros(2), np.float32(1), 3, 2.5, True, [1.0, 2.0]])
def test_numbers_and_sequences_belong_to_numpy(value: Any) -> None:
    assert isinstance(backend_of(value), NumpyBackend)
