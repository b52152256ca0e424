"""Identities of processes, by which one that hangs is ended and no other."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from aioreplica.cluster._processes import ProcessId, end_process, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
SAY = "from aioreplica.cluster._processes import this_process; print(*this_process(), sep='|')"


@pytest.fixture
def other() -> Iterator[tuple["subprocess.Popen[str]", ProcessId]]:
    """A process that waits, and its identity."""
    code = f"{SAY}; import sys; sys.stdout.flush(); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as made:
        assert made.stdout is not None
        space, number, start = made.stdout.readline().strip().split("|")
        yield made, ProcessId(space, int(number), start)
        made.kill()


def test_a_process_of_this_host_is_ended(
    other: tuple["subprocess.Popen[str]", ProcessId],
) -> None:
    process, identity = other

    assert identity.space == this_process().space
    assert identity.number == process.pid
    assert end_process(identity)
    assert process.wait() == -9
    assert not end_process(identity)  # it is gone


@pytest.mark.parametrize("changed", [{"space": "another host"}, {"start": "1"}, {"space": ""}])
def test_one_that_may_be_another_is_left_alone(
    other: tuple["subprocess.Popen[str]", ProcessId], changed: dict[str, str]
) -> None:
    process, identity = other

    assert not end_process(identity._replace(**changed))
    assert process.poll() is None


def test_a_process_does_not_end_itself() -> None:
    assert not end_process(this_process())
