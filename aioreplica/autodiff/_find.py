"""Finding a differentiation adapter by name; its library is imported at that moment."""

from __future__ import annotations

from ._adapter import Adapter

BACKENDS = ("autograd", "torch", "jax")


def find_adapter(backend: str) -> Adapter:
    """Return the adapter called `backend`.

    Raises:
        ValueError: If there is no such backend.
        ImportError: If its library is not installed.

    Example:
        >>> find_adapter("autograd").name
        'autograd'
    """
    if backend not in BACKENDS:
        legal = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"Unknown autodiff backend {backend!r}. Use one of {legal}.")
    try:
        return _new_adapter(backend)
    except ModuleNotFoundError as missing:
        if missing.name not in (backend, f"{backend}lib"):
            raise
        raise ImportError(
            f"Gradients with the {backend!r} backend need the {backend} package, which is not "
            f'installed. Run: pip install "aioreplica[{backend}]"',
            name=backend,
        ) from missing


def _new_adapter(backend: str) -> Adapter:
    if backend == "torch":
        from ._torch import TorchAdapter

        return TorchAdapter()
    if backend == "jax":
        from ._jax import JaxAdapter

        return JaxAdapter()
    from ._autograd import AutogradAdapter

    return AutogradAdapter()
