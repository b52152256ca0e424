"""Modules over optional packages are left out of the doctests where their package is missing."""

from importlib.util import find_spec

import pytest

_ADAPTERS = {
    "aioreplica/autodiff/_jax*.py": "jax",
    "aioreplica/autodiff/_torch*.py": "torch",
    "aioreplica/device_loop/_compiled": "jax",
    "tests/autodiff/ports": "torch",
    "tests/autodiff/prepared": "torch",
}
collect_ignore_glob = [path for path, package in _ADAPTERS.items() if find_spec(package) is None]

_EXAMPLES = {
    "aioreplica.optimizers.from_optax": "optax",
    "aioreplica.optimizers.from_torch": "torch",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the examples of single functions over a package that is missing."""
    missing = {name for name, package in _EXAMPLES.items() if find_spec(package) is None}
    items[:] = [item for item in items if item.name not in missing]
