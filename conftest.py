"""The whole suite runs on all cores; doctests of packages that are missing are left out."""

import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest
from _pytest.doctest import DoctestModule

from aioreplica.devices._cores import num_cores

TESTS = Path(__file__).with_name("tests")
MAX_PROCESSES = 8
"""More would begin for longer than they run."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the examples of functions over a package that is missing; all but a part of all.

    With `AIOREPLICA_TEST_PART=0/5`, 1/5 and so on, every fifth test runs: `.ci/run` asks for these
    in turn where tests run that have run before, on another Python or with fewer seeds.
    """
    missing = {name for name, package in _EXAMPLES.items() if find_spec(package) is None}
    items[:] = [item for item in items if item.name not in missing]
    part, _, parts = os.environ.get("AIOREPLICA_TEST_PART", "0/1").partition("/")
    if int(parts) > 1:
        chosen = [item for item in items if crc32(item.nodeid.encode()) % int(parts) == int(part)]
        config.hook.pytest_deselected(items=list({*items}.difference(chosen)))
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in the package only: looking takes longer than importing a test module."""
    found = yield
    if TESTS not in file_path.parents:
        return found
    return [each for each in found if not isinstance(each, DoctestModule)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests: one per core for the whole suite, none for a part.

    A part that is asked for by name is mostly small, or debugged. Tests that are asked for by a
    mark run programs that take all cores by themselves.
    """
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not is_whole or not config.option.markexpr.startswith("not "):
        return 0
    config.option.dist = "worksteal"  # neighbours stay together, so their fixtures are made once
    return min(num_cores(), MAX_PROCESSES)
