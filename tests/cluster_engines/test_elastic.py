"""Other numbers of workers: under MPI as the program goes on, with torchrun by a restart."""

import os
import signal
from operator import itemgetter
from pathlib import Path

from tests.cluster_engines.launching import (
    BEYOND_ONE_LAUNCH,
    STRATEGY_PROGRAM,
    ULFM,
    free_port,
    mpi,
    row_after_shrinking,
)
from tests.cluster_engines.test_training import launch, workers_of


def test_survivors_of_two_losses_end_with_the_numbers_of_one_worker() -> None:
    """Worker 2 is killed in step 3, worker 0, the chief, in step 6."""
    launched = mpi(4, "shrink", "2,0", options=ULFM, program=STRATEGY_PROGRAM)

    assert sorted(launched.results) == [1, 3], launched.output
    for rank, row in enumerate(launched.results[each] for each in (1, 3)):
        assert row == row_after_shrinking(rank, 2, [[2], [0]])


def test_a_worker_that_has_stopped_is_ended_and_left_out() -> None:
    """Of two; and the launch ends as one that has gone well."""
    launched = mpi(2, "evict", options=ULFM, program=STRATEGY_PROGRAM)

    assert launched.results == {0: {"told": [[1]], "replicas": 2, "learned": True}}, launched.output
    assert launched.codes == [0], launched.output
    assert "Worker 1 hangs: its process" in launched.output


def test_workers_are_added_in_the_middle_of_an_epoch() -> None:
    launched = mpi(2, "grow", "4", program=STRATEGY_PROGRAM, **BEYOND_ONE_LAUNCH)

    row = {"replicas": 8, "lost": [], "learned": True}
    expected = [{**row, "rank": rank, "was new": rank > 1} for rank in range(4)]
    assert sorted(launched.said, key=itemgetter("rank")) == expected, launched.output
    assert launched.codes == [0], launched.output


def test_a_worker_that_is_killed_is_replaced() -> None:
    """Of four, two of which were added before; the newest one has seen no loss."""
    launched = mpi(2, "grow", "4,1", options=ULFM, program=STRATEGY_PROGRAM, **BEYOND_ONE_LAUNCH)

    row = {"replicas": 8, "learned": True}
    expected = [
        {**row, "rank": rank, "was new": rank > 0, "lost": [[1]] if rank < 3 else []}
        for rank in range(4)
    ]
    assert sorted(launched.said, key=itemgetter("rank")) == expected, launched.output


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
