"""Other numbers of workers: as the program goes on, and with torchrun by a restart."""

import os
import signal
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.cluster_engines.launching import (
    BEYOND_ONE_LAUNCH,
    STRATEGY_PROGRAM,
    ULFM,
    Launch,
    free_port,
    gloo,
    mpi,
    row_after_shrinking,
)
from tests.cluster_engines.test_training import launch, workers_of

Launcher: TypeAlias = Callable[..., Launch]
LONG = {"TEST_TIMEOUT_S": "100"}  # workers of Gloo that are added import torch first


def ulfm(size: int, *arguments: str, **variables: str) -> Launch:
    options = {**BEYOND_ONE_LAUNCH, **variables}
    return mpi(size, *arguments, options=ULFM, program=STRATEGY_PROGRAM, **options)


def over_gloo(size: int, *arguments: str, **variables: str) -> Launch:
    return gloo(size, *arguments, program=STRATEGY_PROGRAM, **variables)


on_both = pytest.mark.parametrize("launch_workers", [ulfm, over_gloo])


@on_both
def test_survivors_of_two_losses_end_with_the_numbers_of_one_worker(
    launch_workers: Launcher,
) -> None:
    """Worker 2 is killed in step 3, worker 0, the chief, in step 6."""
    launched = launch_workers(4, "shrink", "2,0")

    assert sorted(launched.results) == [1, 3], launched.output
    for rank, row in enumerate(launched.results[each] for each in (1, 3)):
        assert row == row_after_shrinking(rank, 2, [[2], [0]])


@on_both
def test_a_worker_that_has_stopped_is_ended_and_left_out(launch_workers: Launcher) -> None:
    """Of two; and the launch ends as one that has gone well."""
    launched = launch_workers(2, "evict")

    assert launched.results == {0: {"told": [[1]], "replicas": 2, "learned": True}}, launched.output
    assert launched.codes in ([0], [0, -signal.SIGKILL]), launched.output
    assert "Worker 1 hangs: its process" in launched.output


def test_workers_are_added_in_the_middle_of_an_epoch() -> None:
    """By an MPI that would not survive a loss."""
    launched = mpi(2, "grow", "4", program=STRATEGY_PROGRAM, **BEYOND_ONE_LAUNCH)

    row = {"replicas": 8, "lost": [], "learned": True}
    expected = [{**row, "rank": rank, "was new": rank > 1} for rank in range(4)]
    assert sorted(launched.said, key=itemgetter("rank")) == expected, launched.output
    assert launched.codes == [0], launched.output


@on_both
def test_a_worker_that_is_killed_is_replaced(launch_workers: Launcher) -> None:
    """Of four, two of which were added before; the newest one has seen no loss."""
    launched = launch_workers(2, "grow", "4,1", **LONG)

    row = {"replicas": 8, "learned": True}
    expected = [
        {**row, "rank": rank, "was new": rank > 0, "lost": [[1]] if rank < 3 else []}
        for rank in range(4)
    ]
    assert sorted(launched.said, key=itemgetter("rank")) == expected, launched.output


@pytest.mark.parametrize(
    ("lost", "written"),
    [
        (0, "1/came/0"),  # it keeps the store: they go on to that of the next
        (0, "1/members"),
        (0, "decided"),  # to go on, and maybe one of the others has read it
        (1, "connected/1"),  # Gloo waits for who dies before that, for 30 s
    ],
)
def test_a_further_loss_while_survivors_meet(lost: int, written: str) -> None:
    """However far they have come, those who are left go on with the numbers of one worker."""
    launched = over_gloo(4, "shrink_again", f"{lost}@{written}")

    assert sorted(launched.results) == sorted({0, 1, 2} - {lost}), launched.output
    for row in launched.results.values():
        assert row["told"][0] == "WorkerLostError [3]"
        assert row["learned"]


def test_a_worker_that_computes_for_long_is_not_left_out() -> None:
    launched = gloo(3, "slow")

    row = {"error": "WorkerLostError", "size": 2}
    assert launched.results == {0: row, 1: row}, launched.output


def test_a_group_of_the_program_is_left_alone() -> None:
    launched = gloo(3, "beside", str(free_port()))

    row = {"own": True, "lost": [1], "size": 2}
    assert launched.results == {0: row, 2: row}, launched.output


def test_another_strategy_of_the_same_workers_grows_as_well() -> None:
    launched = over_gloo(2, "again", **LONG)

    assert sorted(launched.said) == [[6], [6], [6, 6], [6, 6]], launched.output


def test_a_worker_that_is_added_ends_before_it_comes() -> None:
    """Worker 0 has started it, and sees that; then all go on as they were."""
    launched = over_gloo(2, "grow_in_vain", "3", TEST_TIMEOUT_S="0")  # without a timeout

    told = "Worker 2, which worker 0 has started, ended with status 3 before all had come"
    assert f"WorkerLostError [2]: {told}" in launched.results[0]["told"], launched.output
    assert f"WorkerLostError [2]: {told}" in launched.results[1]["told"]
    for row in launched.results.values():
        assert (row["replicas"], row["learned"]) == (4, True)


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_is_late_to_shrink_is_left_behind(late: int, tmp_path: Path) -> None:
    """It lives and would go on alone; also if it is the one whose store comes first."""
    launched = gloo(4, "left_behind", f"{tmp_path}@{late}")

    out = f"WorkerLostError [{late}]"
    assert launched.results.pop(late) == ["WorkerLostError", out, out], launched.output
    for told in launched.results.values():
        assert told[0] == "WorkerLostError"
        # One that still waits when the others try again is not told of the attempt in between.
        assert told[1:] in (["2 workers"], [f"StallError [{late}]", "2 workers"]), told
    assert len(launched.results) == 2


def test_torchrun_starts_all_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    options = ["--max-restarts", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(free_port())]
    arguments = ["--epochs", 12, "--checkpoints", tmp_path]
    with launch("torchrun", *arguments, options=options) as process:
        assert process.stdout is not None
        seen = next((line for line in process.stdout if line.startswith("epoch 2:")), None)
        assert seen is not None
        os.kill(workers_of(tmp_path)[-1], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)

    assert process.returncode == 0, output
    assert output.count("goes on from checkpoint") == 1, output
    assert "epoch 12:" in output
    assert "replicas: 4" in output
