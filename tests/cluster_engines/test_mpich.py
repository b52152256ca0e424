"""The contract of communicators on MPICH; in an environment of its own, see `.ci/run`."""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.cluster.communicator_contract import CHECKS
from tests.cluster_engines.launching import PROGRAM, ended, started


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(
    not is_installed("mpich") or is_installed("openmpi"),
    reason="mpi4py finds one MPI only: this is for an environment with mpich and without openmpi",
)
@pytest.mark.parametrize("how", ["", "collectives"], ids=["messages", "collectives"])
def test_contract(how: str) -> None:
    launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    assert launcher is not None
    command = [launcher, "-n", "2", sys.executable, PROGRAM, "contract", *([how] if how else [])]
    launched = ended([started(command, {})])
    assert launched.results == {0: len(CHECKS), 1: len(CHECKS)}, launched.output
