"""Finding backends by entry point or array, and accelerators without importing a library."""

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


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Linux machine without device files."""
    monkeypatch.setattr(_discover.sys, "platform", "linux")
    monkeypatch.setattr(_discover, "_exists", lambda node: False)
    for name in _discover.TPU_NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_bare_machine_has_none(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TPU_ML_PLATFORM", "JAX")  # which jax sets itself wherever it is imported

    assert not _discover.may_have_gpu()
    assert not _discover.may_have_tpu()


@pytest.mark.parametrize("node", _discover.GPU_NODES)
def test_a_drivers_file_says_gpu(bare: pytest.MonkeyPatch, node: str) -> None:
    bare.setattr(_discover, "_exists", lambda asked: asked == node)

    assert _discover.may_have_gpu()


def test_elsewhere_than_on_linux_the_library_has_to_say(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(_discover.sys, "platform", "win32")

    assert _discover.may_have_gpu()


def test_a_tpu_machine_is_recognized(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TPU_NAME", "local")

    assert _discover.may_have_tpu()


def test_a_missing_package_is_told_without_importing_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        _discover.require_installed("no_such_package_here")

    assert caught.value.name == "no_such_package_here"
