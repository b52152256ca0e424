"""Modules over optional packages are left out of the doctests where their package is missing."""

from importlib.util import find_spec

_ADAPTERS = {
    "aioreplica/autodiff/_jax.py": "jax",
    "aioreplica/autodiff/_jax_variables.py": "jax",
    "aioreplica/autodiff/_torch.py": "torch",
    "aioreplica/autodiff/_torch_module.py": "torch",
    "aioreplica/autodiff/_torch_random.py": "torch",
}
collect_ignore = [path for path, package in _ADAPTERS.items() if find_spec(package) is None]
