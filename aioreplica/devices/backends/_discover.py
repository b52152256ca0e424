"""Finding backends by entry point or array, and accelerators without importing a library."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from array_api_compat import is_array_api_obj

from ...context import REGISTRY
from ._backend import Backend
from ._numpy import NumpyBackend

GROUP = "aioreplica.backends"


def find_backends() -> tuple[Backend, ...]:
    """Return the installed backends, NumPy first, the others by name.

    A backend whose library is not installed is left out: its entry point fails to import.
    """
    return REGISTRY.once("backends", _load_backends)


def _load_backends() -> tuple[Backend, ...]:
    from importlib.metadata import entry_points  # with what it imports, a tenth of NumPy's import

    found: dict[str, Backend] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            backend = point.load()()
        except ImportError:
            continue
        found[backend.name] = backend
    found.pop("numpy", None)  # it is there without an entry point
    return (numpy_backend(), *found.values())


def numpy_backend() -> Backend:
    """Return the backend of NumPy, without looking for others: that takes as long as a small run.

    It counts the host's CPUs, and serves what belongs to no other library.
    """
    return REGISTRY.once("numpy_backend", NumpyBackend)


def backend_of(value: object) -> Backend:
    """Return the backend of an array; numbers and sequences of them belong to NumPy.

    Raises:
        TypeError: If the array belongs to a library that no installed backend serves.
    """
    if type(value) is np.ndarray:
        return numpy_backend()
    backends = find_backends()
    for backend in backends:
        if backend.owns(value):
            return backend
    if is_array_api_obj(value):
        names = ", ".join(backend.name for backend in backends)
        raise TypeError(
            f"No installed backend serves arrays of type {type(value).__module__}."
            f"{type(value).__qualname__} (there is: {names}). Convert them with np.asarray first."
        )
    return backends[0]


GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
TPU_NODES = ("/dev/accel0", "/dev/vfio/0")
TPU_NAMES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR")


def require_installed(package: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        ModuleNotFoundError: If it is not.

    Example:
        >>> require_installed("numpy")
    """
    if package not in sys.modules and find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def may_have_gpu() -> bool:
    """Tell whether there may be a GPU: on Linux if a driver shows one, elsewhere always.

    Importing a library of arrays takes seconds: too long for a program that asks a machine without
    a GPU for its devices.
    """
    return not sys.platform.startswith("linux") or any(map(_exists, GPU_NODES))


def may_have_tpu() -> bool:
    """Tell whether there may be a TPU, by its device files or what its machines have set."""
    return any(name in os.environ for name in TPU_NAMES) or any(map(_exists, TPU_NODES))


def _exists(node: str) -> bool:
    return Path(node).exists()
