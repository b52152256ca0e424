"""The communicators of the engines, as their users start them: the contract, and every failure.

Not part of the usual suite: `python -m pytest tests/cluster_engines`, with the extras `mpi` and
`torch`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioreplica.cluster._poller import MAX_PAUSE_S
from tests.cluster.communicator_contract import CHECKS
from tests.cluster_engines import launching
from tests.cluster_engines.launching import (
    PROGRAM,
    ULFM,
    Launch,
    ended,
    free_port,
    gloo,
    mpi,
    started,
    started_by_mpi,
)

Launcher = Callable[..., Launch]
SECONDS = 15.0  # less than the timeout of the program's calls, which nothing of this waits for
both = pytest.mark.parametrize("launch", [mpi, gloo], ids=["mpi", "gloo"])


def results_of(launch: Launch, size: int) -> list[Any]:
    assert sorted(launch.results) == list(range(size)), (launch.codes, launch.output)
    return [launch.results[rank] for rank in range(size)]


@both
@pytest.mark.parametrize("size", [2, 3])
def test_contract(launch: Launcher, size: int) -> None:
    assert results_of(launch(size, "contract"), size) == [len(CHECKS)] * size


def test_contract_with_the_collectives_of_mpi() -> None:
    """As for more than 8 workers, who do not exchange in pairs."""
    assert results_of(mpi(3, "contract", "collectives"), 3) == [len(CHECKS)] * 3


@both
def test_waiting_costs_little(launch: Launcher, tmp_path: Path) -> None:
    """A worker that waits looks a thousand times a second, one that spins 350,000 times."""
    early, _ = results_of(launch(2, "late", str(tmp_path)), 2)
    assert early["waited"] > 1.8
    assert 0 < early["turns"] < 1.1 * early["waited"] / MAX_PAUSE_S


@both
def test_a_missing_worker_is_named_to_all(launch: Launcher, tmp_path: Path) -> None:
    early, late, third = results_of(launch(3, "absent", str(tmp_path)), 3)
    for each in (early, third, late):
        assert (each["error"], each["ranks"]) == ("StallError", [1]), each
        assert "Worker 1 did not come to all_reduce #1 within 1.5 s" in each["text"]
    assert 1.4 < early["after"] < 1.5 + SECONDS
    assert late["after"] < SECONDS  # it is told at its call, and does not wait 1.5 s as well


@pytest.mark.parametrize(
    ("launch", "victim", "where"),
    [(mpi, 1, "inside"), (gloo, 0, "before"), (gloo, 1, "inside")],
    ids=["mpi", "gloo-store", "gloo"],
)  # fmt: skip
def test_a_worker_that_is_stopped_is_named_to_all_in_time(
    launch: Launcher, victim: int, where: str, tmp_path: Path
) -> None:
    """Also inside an exchange, and where it keeps Gloo's store, whose calls then never end."""
    variables = {"TEST_VICTIM": str(victim), "TEST_WHERE": where, "TEST_TIMEOUT": "2"}
    launched = launch(3, "frozen", str(tmp_path), **variables)
    assert sorted({*launched.results, victim}) == [0, 1, 2], launched.output
    for row in launched.results.values():
        assert (row["error"], row["ranks"]) == ("StallError", [victim]), row
        assert row["after"] < 5.0, row
        assert "stopped" in row["text"], row


@both
@pytest.mark.parametrize(
    ("scenario", "text"),
    [("aborting", "Worker 1 ended the group: the disk is full"),
     ("raising", "Worker 1 ended the group: ValueError: bad batch")],
)  # fmt: skip
def test_the_reason_of_an_end_reaches_all(
    launch: Launcher, scenario: str, text: str, tmp_path: Path
) -> None:
    launched = launch(3, scenario, str(tmp_path))
    told = [0, 2] if scenario == "raising" else [0, 1, 2]
    assert sorted(launched.results) == told, launched.output
    for rank in told:
        row = launched.results[rank]
        assert (row["error"], row["ranks"], row["text"]) == ("WorkerLostError", [1], text)
        assert row["after"] < SECONDS
    assert ("ValueError: bad batch" in launched.output) == (scenario == "raising")


@both
def test_a_worker_that_closes_early_is_named(launch: Launcher, tmp_path: Path) -> None:
    first, left, third = results_of(launch(3, "closing", str(tmp_path)), 3)
    assert left == "closed"
    for each in (first, third):
        assert (each["error"], each["ranks"]) == ("WorkerLostError", [1])
        assert "Worker 1 has closed the communicator before all_reduce #1" in each["text"]


@both
def test_a_worker_that_closes_with_a_split_open_is_named(launch: Launcher, tmp_path: Path) -> None:
    first, left, third = results_of(launch(3, "leaving", str(tmp_path)), 3)
    assert left["error"] == "ContextError"
    for each in (first, third):
        assert (each["error"], each["ranks"]) == ("WorkerLostError", [1]), each
        assert "Worker 1 has closed the communicator before all_reduce #1" in each["text"]


@pytest.mark.parametrize("launch", [partial(mpi, options=ULFM), gloo], ids=["mpi", "gloo"])
def test_a_worker_that_is_gone_before_the_first_call_of_a_split_is_named(launch: Launcher) -> None:
    launched = launch(3, "dead_before")
    assert sorted(launched.results) == [0, 2], launched.output
    for row in launched.results.values():
        assert (row["error"], row["ranks"]) == ("WorkerLostError", [1]), row
        assert row["after"] < SECONDS


@both
def test_splits_that_are_closed_leave_no_thread(launch: Launcher) -> None:
    """Each had three with Gloo; those of the last few may not be known as left by all."""
    assert max(results_of(launch(2, "many_splits"), 2)) < 18


@pytest.mark.parametrize("turn", range(int(os.environ.get("TEST_KILLS", "2"))))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", ["ulfm", "gloo"])
def test_a_killed_worker_is_named_to_all_survivors(engine: str, size: int, turn: int) -> None:
    victim = (turn * 3 + size - 1) % size if engine == "ulfm" else size - 1 - turn % (size - 1)
    if engine == "ulfm":
        launched = mpi(size, "kill", str(victim), options=ULFM)
    else:
        launched = gloo(size, "kill", str(victim))
    assert sorted({*launched.results, victim}) == list(range(size)), launched.output
    for row in launched.results.values():
        assert (row["error"], row["ranks"]) == ("WorkerLostError", [victim]), row
        assert row["after"] < SECONDS
        assert row["again"] == "WorkerLostError"


def test_the_worker_that_keeps_the_store_is_killed() -> None:
    launched = gloo(3, "kill", "0")
    assert sorted(launched.results) == [1, 2], launched.output
    for row in launched.results.values():
        assert (row["error"], row["ranks"]) == ("WorkerLostError", [0]), row
        assert "kept the store" in row["text"]
        assert row["after"] < SECONDS


def test_without_ulfm_the_launcher_ends_all() -> None:
    launched = mpi(3, "kill", "1")
    assert launched.results == {}
    assert launched.codes == [137]  # 128 + SIGKILL
    assert launched.seconds < 15.0
    assert "signal 9" in launched.output


def test_with_ulfm_a_worker_that_hangs_does_not_outlive_the_job() -> None:
    """Worker 1 would sleep for a minute, and the launcher wait for it: nothing else ends it."""
    launched = mpi(2, "waiting", options=ULFM, TEST_TIMEOUT="2")
    assert launched.results[0]["ranks"] == [1], launched.output
    assert launched.codes != [0]
    assert launched.seconds < 40.0


@pytest.mark.parametrize("launch", [partial(mpi, options=ULFM), gloo], ids=["mpi", "gloo"])
def test_survivors_shrink_and_go_on(launch: Launcher) -> None:
    launched = launch(3, "shrinking", "1")
    expected = {"size": 2, "total": 2, "lost": [1]}
    assert launched.results == {0: expected, 2: expected}, launched.output


def test_workers_of_torchrun_are_started_again_instead() -> None:
    launched = gloo(2, "shrinking", "1", TORCHELASTIC_RUN_ID="a job")

    assert launched.results == {}
    told = "Workers of torchrun cannot go on after the loss of a worker"
    assert told in launched.output, launched.output


@both
def test_a_worker_that_never_comes(launch: Launcher, tmp_path: Path) -> None:
    launched = launch(3, "never", str(tmp_path), TEST_TIMEOUT="4")
    assert sorted(launched.results) == [0, 2], (launched.codes, launched.output)
    for rank in (0, 2):
        row = launched.results[rank]
        assert row["error"] == "StallError", row
        assert ("Worker 1 did not come" in row["text"]) or ("Not all workers came" in row["text"])


def test_a_worker_that_was_cancelled_before_the_others_came_does_not_let_them_wait(
    tmp_path: Path,
) -> None:
    launched = gloo(2, "cancelled", str(tmp_path))
    row = launched.results[1]
    assert (row["error"], row["ranks"], row["left"]) == ("WorkerLostError", [0], 1), row
    assert row["after"] < SECONDS


@both
def test_ctrl_c_of_the_launcher(launch: Launcher) -> None:
    if launch is mpi:
        process = started_by_mpi(3, "waiting")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3",
                   "--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # fmt: skip
        process = started([*command, PROGRAM, "waiting"], {})
    assert process.stdout is not None
    with process:
        for _ in range(3):
            assert '"waiting"' in process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        launched = ended([process])
    assert launched.codes != [0]
    assert time.monotonic() - start < 40.0
    _, alive = psutil.wait_procs(children, timeout=10.0)
    assert alive == []


@both
def test_a_second_connection(launch: Launcher) -> None:
    for text in results_of(launch(2, "twice"), 2):
        assert "connected already: <" in text
    assert results_of(launch(2, "reconnecting"), 2) == [2, 2]


@both
def test_connections_that_are_closed_and_dropped_leave_no_thread(launch: Launcher) -> None:
    """Those that are left: of the first, which the program holds, and of the newest."""
    assert max(results_of(launch(2, "often"), 2)) <= 2


@both
def test_several_strategies_share_a_lane_and_have_no_order(
    launch: Launcher, tmp_path: Path
) -> None:
    """Opposite orders work, and so do the others while one waits; it closes no later for that."""
    expected = [1] * 4 + [2 * (number // 2) for number in range(100)]
    results = results_of(launch(2, "several", str(tmp_path)), 2)
    for each in results:
        assert each["totals"] == expected
        assert each["took"] < SECONDS
        assert "This communicator was closed." in each["failure"]
        assert each["lanes"] == 1
    assert [each["early"] for each in results] == [True, False]


@both
def test_a_fork(launch: Launcher) -> None:
    for text in results_of(launch(2, "forked"), 2):
        assert "forked from it. Fork before connecting" in text


def test_mpi_and_the_resolver_do_not_agree() -> None:
    launched = mpi(2, "contract", TEST_ENGINE="mpi", TEST_SIZE="3", TEST_RANK="0")
    assert "MPI says that this is worker" in launched.results[0]["text"], launched.output
    assert "of 2, the test that it is worker 0 of 3" in launched.results[0]["text"]


def test_workers_were_told_of_different_numbers() -> None:
    wrong = {rank: {"WORLD_SIZE": "3"} for rank in (1, 2)}
    launched = gloo(3, "contract", of_rank={0: {"WORLD_SIZE": "2"}, **wrong}, TEST_TIMEOUT="8")
    texts = [launched.results[rank]["text"] for rank in sorted(launched.results)]
    assert any("was told of 2 workers, and this one" in text for text in texts), texts
    assert {launched.results[r]["error"] for r in launched.results} <= {
        "ValueError", "StallError", "WorkerLostError",
    }  # fmt: skip


def test_a_rank_was_started_twice() -> None:
    launched = gloo(3, "contract", of_rank={2: {"RANK": "1"}}, TEST_TIMEOUT="6")
    rows = [row for row in launched.said if row["error"] == "ValueError"]
    assert len(rows) == 1, launched.said
    assert rows[0]["text"].startswith("Worker 1 was started twice: another process has come to")


def test_an_address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launched = gloo(1, "contract", port=taken.getsockname()[1], TEST_ENGINE="torch")
    assert launched.results[0]["error"] == "ValueError"
    assert "Worker 0 cannot listen at 127.0.0.1:" in launched.results[0]["text"]
    assert "the address is in use" in launched.results[0]["text"]


def test_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-addr", "127.0.0.1", "--master-port", str(free_port())]  # fmt: skip
    launched = ended([started([*command, PROGRAM, "contract"], {})])
    assert results_of(launched, 2) == [len(CHECKS)] * 2


def test_workers_are_forked_by_another_process_if_the_first_was_killed() -> None:
    gloo(1, "kill", "0")
    process = launching.SERVER._process
    assert process is not None
    process.kill()
    process.wait()

    assert gloo(1, "kill", "0").codes == [-signal.SIGKILL]
    assert launching.SERVER._process is not process
