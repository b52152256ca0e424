"""Strategies over the engines as their users start them: results, failures, and who is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_engines.launching import STRATEGY_PROGRAM, Launch, gloo, mpi

Launcher = Callable[..., Launch]
both = pytest.mark.parametrize("launch", [mpi, gloo], ids=["mpi", "gloo"])


def results_of(launch: Launch, size: int) -> list[Any]:
    assert sorted(launch.results) == list(range(size)), (launch.codes, launch.output)
    return [launch.results[rank] for rank in range(size)]


@both
def test_kinds_of_numbers_half_precision_and_groups(launch: Launcher) -> None:
    expected = {"loss": 7.0, "weight": 7.0, "other": True, "half": ["float16", 2052.0]}
    columns = [[0, 2, 2, 2], [1, 1, 3, 3, 3, 3]]
    for rank, row in enumerate(results_of(launch(2, "sums", program=STRATEGY_PROGRAM), 2)):
        told = row.pop("told")
        first, failed, last = row.pop("groups")
        assert row == expected
        assert first == [[columns[0], 2, 2, 6], [columns[1], 4, 4, 6]]
        assert last == [[columns[0], 6, 6, 6], [columns[1], 8, 8, 6]]
        assert failed.startswith("WorkerLostError: Worker 0 failed in " if rank else "ValueError")
        assert "ValueError: bad batch" in failed
        assert "float64[] on worker 0 and SUM; number on worker 1" in told


@both
def test_parts_of_variables_and_state_have_the_bits_of_whole_ones(launch: Launcher) -> None:
    found = results_of(launch(3, "parts", program=STRATEGY_PROGRAM), 3)
    assert found == [{"same": True, "read": True, "rows": rows} for rows in (234, 234, 233)]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a single worker says that no one has killed."""
    folder = tmp_path_factory.mktemp("once")
    return results_of(mpi(1, "restart", f"{folder}/once@0", program=STRATEGY_PROGRAM), 1)[0]


def test_killed_training_goes_on_with_another_number_of_workers(once: Any, tmp_path: Path) -> None:
    killed = mpi(3, "restart", f"{tmp_path}/state@50", program=STRATEGY_PROGRAM)
    assert killed.results == {}, killed.output

    rest = results_of(mpi(2, "restart", f"{tmp_path}/state@0", program=STRATEGY_PROGRAM), 2)

    assert [row["began"] for row in rest] == [40] * 2
    assert len({row["digest"] for row in [*rest, once]}) == 1


def test_a_worker_killed_while_it_writes_its_part_leaves_no_step(once: Any, tmp_path: Path) -> None:
    killed = mpi(2, "restart", f"{tmp_path}/state@in=60", program=STRATEGY_PROGRAM)
    assert killed.results == {}, killed.output
    saved = sorted(path.parent.name for path in (tmp_path / "state").glob("*/manifest.json"))
    assert saved == ["step-0000000020", "step-0000000040"]

    rest = results_of(mpi(3, "restart", f"{tmp_path}/state@0", program=STRATEGY_PROGRAM), 3)

    assert [row["began"] for row in rest] == [40] * 3
    assert len({row["digest"] for row in [*rest, once]}) == 1


@both
def test_started_reductions_go_together_with_the_bits_of_one_by_one(launch: Launcher) -> None:
    for row in results_of(launch(2, "handles", program=STRATEGY_PROGRAM), 2):
        assert row["same"]
        assert row["calls"] < 21 * 80  # one by one, then in 20 turns that wait here and there


@both
def test_device_loops_stop_at_one_step_on_all_workers(launch: Launcher) -> None:
    rows = results_of(launch(2, "steps", program=STRATEGY_PROGRAM), 2)
    total = 4.0 * (sum(range(150)) + sum(range(5)) + 1 + 2)
    for row in rows:
        assert row["steps"] == [150, 2]
        assert row["outputs"] == {"x": 150.0}
        assert row["total"] == total
    assert "Worker 1 failed" in rows[0]["told"]
    assert rows[0]["told"].startswith("WorkerLostError")
    assert "OSError: disk" in rows[0]["told"]
    assert rows[1]["told"] == "OSError: disk"


def test_an_all_reduce_passes_few_files_and_classes() -> None:
    for row in results_of(mpi(2, "path", program=STRATEGY_PROGRAM), 2):
        assert "Exchange" in row["classes"]
        assert len(row["files"]) <= 26, row["files"]
        # A worker that waits for half a second says so, by a note.
        assert len({*row["classes"]} - {"Note"}) <= 26, row["classes"]


@pytest.mark.parametrize(
    ("launch", "how", "name"),
    [(mpi, "raise", "ValueError: bad batch"), (mpi, "exit", "SystemExit: 3"),
     (mpi, "ctrl-c", "KeyboardInterrupt"), (gloo, "exit", "SystemExit: 3")],
)  # fmt: skip
def test_an_end_between_steps_is_told_with_its_cause(
    launch: Launcher, how: str, name: str, tmp_path: Path
) -> None:
    launched = launch(2, "leaving", f"{how}:{tmp_path}", program=STRATEGY_PROGRAM)
    assert sorted(launched.results) == [0], launched.output
    row = launched.results[0]
    assert (row["error"], row["ranks"]) == ("WorkerLostError", [1]), row
    assert name in row["text"], row
