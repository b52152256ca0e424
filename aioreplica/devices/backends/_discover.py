"""Finding backends: all of them by entry point, and the one that an array belongs to."""

from __future__ import annotations

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
