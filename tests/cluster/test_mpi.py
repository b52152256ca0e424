"""Reasons that MPI gives for a failed call, without an MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aioreplica.cluster._communicator import ENDED, LOST
from aioreplica.cluster._mpi import MpiEngine

CLASSES = ("PROC_FAILED", "PROC_FAILED_PENDING", "REVOKED", "IN_STATUS", "TRUNCATE")


class MpiError(Exception):
    def Get_error_class(self) -> str:  # noqa: N802 (a name of mpi4py)
        return str(self)


class Group(SimpleNamespace):
    def Get_size(self) -> int:  # noqa: N802
        return len(self.ranks)


def engine_that_lost(*ranks: int, survives: bool = True) -> MpiEngine:
    """An engine of worker 1, whose MPI says that `ranks` have failed."""

    def failed() -> Any:
        if not survives:
            raise NotImplementedError
        return Group(ranks=ranks)

    mpi = SimpleNamespace(**{f"ERR_{name}": name for name in CLASSES}, Exception=MpiError)
    mpi.Group = SimpleNamespace(
        Translate_ranks=lambda group, wanted, _everyone: [group.ranks[each] for each in wanted]
    )
    engine = object.__new__(MpiEngine)
    engine.rank = 1
    engine._mpi = mpi
    engine._notes = SimpleNamespace(Get_failed=failed, Get_group=lambda: None)
    return engine


@pytest.mark.parametrize("name", CLASSES[:4])
def test_a_loss_is_told_with_the_worker_that_is_gone(name: str) -> None:
    """One of several requests has failed (IN_STATUS): survivors blamed themselves."""
    failure = engine_that_lost(2).explain(MpiError(name), "all_reduce #21")
    assert failure is not None
    assert (failure.kind, failure.ranks) == (LOST, (2,))
    assert failure.text.startswith("Worker 2 is gone, as MPI says in all_reduce #21.")


@pytest.mark.parametrize(
    ("name", "engine"),
    [("IN_STATUS", engine_that_lost()), ("IN_STATUS", engine_that_lost(survives=False)),
     ("TRUNCATE", engine_that_lost(2))],
)  # fmt: skip
def test_any_other_failure_is_this_worker_s_own(name: str, engine: MpiEngine) -> None:
    failure = engine.explain(MpiError(name), "all_reduce #21")
    assert failure is not None
    assert (failure.kind, failure.ranks) == (ENDED, (1,))
    assert failure.text == f"MPI failed in all_reduce #21 on worker 1: {name}"


def test_an_error_that_is_not_of_mpi_is_not_explained() -> None:
    assert engine_that_lost(2).explain(ValueError("PROC_FAILED"), "barrier #1") is None
