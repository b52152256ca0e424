"""Reasons that MPI gives for a failed call, without an MPI."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioreplica.cluster import _processes, _transport
from aioreplica.cluster._communicator import ENDED, LOST
from aioreplica.cluster._mpi import ULFM_VARIABLE, MpiRuntime, MpiTransport, tag_of
from aioreplica.cluster._processes import this_process
from aioreplica.cluster._transport import WAITING, Note
from aioreplica.errors import ContextError

CLASSES = ("PROC_FAILED", "PROC_FAILED_PENDING", "REVOKED", "IN_STATUS", "TRUNCATE")


class MpiError(Exception):
    def Get_error_class(self) -> str:  # noqa: N802 (a name of mpi4py)
        return str(self)


class Group(SimpleNamespace):
    def Get_size(self) -> int:  # noqa: N802
        return len(self.ranks)


def transport_that_lost(*ranks: int, survives: bool = True) -> MpiTransport:
    """An engine of worker 1, whose MPI says that `ranks` have failed."""

    def failed() -> Any:
        if not survives:
            raise NotImplementedError
        return Group(ranks=ranks)

    mpi = SimpleNamespace(**{f"ERR_{name}": name for name in CLASSES}, Exception=MpiError)
    mpi.Group = SimpleNamespace(
        Translate_ranks=lambda group, wanted, _everyone: [group.ranks[each] for each in wanted]
    )
    transport = object.__new__(MpiTransport)
    transport.rank = 1
    transport._mpi = mpi
    transport._notes = SimpleNamespace(Get_failed=failed, Get_group=lambda: None)
    return transport


@pytest.mark.parametrize("name", CLASSES[:4])
def test_a_loss_is_told_with_the_worker_that_is_gone(name: str) -> None:
    """One of several requests has failed (IN_STATUS): survivors blamed themselves."""
    failure = transport_that_lost(2).explain(MpiError(name), "all_reduce #21")
    assert failure is not None
    assert (failure.kind, failure.ranks) == (LOST, (2,))
    assert failure.text.startswith("Worker 2 is gone, as MPI says in all_reduce #21.")


@pytest.mark.parametrize(
    ("name", "transport"),
    [("IN_STATUS", transport_that_lost()), ("IN_STATUS", transport_that_lost(survives=False)),
     ("TRUNCATE", transport_that_lost(2))],
)  # fmt: skip
def test_any_other_failure_is_this_worker_s_own(name: str, transport: MpiTransport) -> None:
    failure = transport.explain(MpiError(name), "all_reduce #21")
    assert failure is not None
    assert (failure.kind, failure.ranks) == (ENDED, (1,))
    assert failure.text == f"MPI failed in all_reduce #21 on worker 1: {name}"


def test_an_error_that_is_not_of_mpi_is_not_explained() -> None:
    assert transport_that_lost(2).explain(ValueError("PROC_FAILED"), "barrier #1") is None


def test_notes_are_held_until_they_are_sent_and_no_longer() -> None:
    sent: list[SimpleNamespace] = []

    def send(_what: Any, rank: int) -> SimpleNamespace:
        sent.append(SimpleNamespace(Test=lambda: rank == 2))
        return sent[-1]

    transport = transport_that_lost()
    transport.size, transport._sent = 3, []
    transport._mpi.BYTE, transport._runtime = None, MpiRuntime()
    transport._notes.Isend = send
    for number in range(5):
        transport.tell(Note(WAITING, 1, "", number))
    assert len(sent) == 10
    assert len(transport._sent) == 6  # all to worker 0, who takes none, and the newest to worker 2
    assert not transport._runtime.failed


class Posted:
    """A communicator of MPI that begins so many requests, and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.memory: list[weakref.ref[Any]] = []

    def begin(self, what: Any, _rank: int, _tag: int) -> object:
        if len(self.memory) == self.most:
            raise MpiError("PROC_FAILED")
        array = what[0]
        self.memory.append(weakref.ref(array if array.base is None else array.base))
        return object()

    Isend = Irecv = begin


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", ["", "/0,1,2.0"])
def test_memory_is_held_where_only_some_requests_could_be_begun(name: str, most: int) -> None:
    """MPI wrote to that of receives when it was used for something else."""
    transport = transport_that_lost(2)
    transport.size, transport._max_tag = 3, 1000
    transport._mpi.BYTE, transport._runtime = None, MpiRuntime()
    group = _transport.Group(1, (0, 1, 2), name)

    def gather() -> None:
        transport.all_gather(group, np.ones(8, np.uint8), np.empty(24, np.uint8))

    def swap() -> None:
        sends = list(np.ones((3, 8), np.uint8))
        transport.all_to_all(group, sends, np.empty(24, np.uint8), [8] * 3)

    for exchange in (gather, swap):
        transport._comm = Posted(most)
        with pytest.raises(MpiError):
            exchange()
        gc.collect()
        assert [each() is not None for each in transport._comm.memory] == [True] * most


def test_a_group_that_has_failed_is_held_as_notes_may_still_come() -> None:
    transport = transport_that_lost(2)
    transport._runtime = runtime = MpiRuntime()
    transport.end()
    transport.end()
    assert runtime.held == [transport]


def test_tags_of_groups_differ_and_fit() -> None:
    """Of 30,000 tags, as they were, two of these were the same."""
    names = [f"/{rank},{rank + 1}.{ordinal}" for rank in range(100) for ordinal in range(20)]
    assert len({tag_of(name, 2**31 - 1) for name in names}) == len(names)
    small = [tag_of(name, 32_767) for name in names]
    assert 1 <= min(small) <= max(small) <= 32_767


def test_without_ulfm_a_group_cannot_shrink_and_nobody_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ULFM_VARIABLE, raising=False)
    monkeypatch.setattr(_processes, "end_process", lambda _: pytest.fail("it was killed"))

    with pytest.raises(ContextError, match="--with-ft ulfm"):
        transport_that_lost(0).shrunk([0])


@pytest.mark.parametrize(("hang", "killed"), [((0, 2), [0, 2]), ((0, 1), []), ((), [])])
def test_who_hangs_is_killed_but_not_by_one_that_is_named_too(
    monkeypatch: pytest.MonkeyPatch, hang: tuple[int, ...], killed: list[int]
) -> None:
    monkeypatch.setenv(ULFM_VARIABLE, "1")
    ended: list[int] = []
    monkeypatch.setattr(_processes, "end_process", lambda process: ended.append(process.number))
    transport = transport_that_lost()
    transport._processes = [this_process()._replace(number=rank) for rank in range(3)]

    def shrink() -> None:
        raise NotImplementedError

    transport._comm = SimpleNamespace(Shrink=shrink)
    with pytest.raises(ContextError, match="cannot go on"):
        transport.shrunk(hang)

    assert ended == killed
