"""Peers: what the rounds say, and a whole run of this package beside its floor."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.peers import main
from benchmarks.peers._cases import CALLS, PEERS, SCAN, Case, all_cases, promised
from benchmarks.peers._charts import draw_charts
from benchmarks.peers._page import BEGIN, END, write_tables
from benchmarks.peers._results import Contender, Measured, Result, format_results, write_results

MERGE = Case("merge", 4, "merge", "us/replica")


def measured() -> Measured:
    found = Measured(MERGE)
    found.samples = {
        Contender("aioreplica", ""): [2.0, 4.0, 3.0],
        Contender("tensorflow", "eager"): [40.0, 60.0, 30.0],
        Contender("jax", "jit"): [1.0, 4.0, 1.5],
        Contender("floor", ""): [1.0, 1.0, 1.0],
    }
    return found


def test_ratios_are_taken_round_by_round_and_goals_are_marked() -> None:
    rows = {row["peer"]: row for row in measured().rows()}
    tensorflow, jax = rows["tensorflow"], rows["jax"]
    assert (tensorflow["ratio"], tensorflow["lowest"], tensorflow["highest"]) == (
        pytest.approx(1 / 15), 1 / 20, 1 / 10
    )  # fmt: skip
    assert tensorflow["is_met"] is True
    assert (jax["ratio"], jax["is_met"]) == (2, False)
    assert rows["floor"]["goal"] is None
    text = format_results(Result(is_quick=True, rows=measured().rows()))
    assert "1 of 2 goals met" in text
    assert re.search(r"tensorflow eager +40 +us/replica +15.00 +10.00-20.00 +>= 10 ok", text)


def test_ratios_are_to_the_fastest_of_our_ways() -> None:
    found = Measured(Case("train", 2, "MLP", "us/step", {"optimizer": "SGD", "batch": 32}))
    found.samples = {
        Contender("aioreplica", "run"): [9.0],
        Contender("aioreplica", "run_steps"): [6.0],
        Contender("torch", "gloo"): [12.0],
    }
    assert str(found.best) == "aioreplica run_steps"
    assert [row["ratio"] for row in found.rows()] == [6 / 9, 1.0, 0.5]


def test_a_run_in_parts_keeps_the_other_cases(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    first, other = Result(is_quick=True), measured()
    other.case = Case("merge", 2, "merge", "us/replica")
    first.add(measured())
    first.add(other)
    write_results(file, first)
    second = Result(is_quick=True)
    second.read(file)
    again = measured()
    again.samples[Contender("jax", "jit")] = [9.0, 9.0, 9.0]
    second.add(again)
    found = {(row["num_replicas"], row["peer"]): row["median"] for row in second.rows}
    assert len(second.rows) == len(found) == 8
    assert (found[2, "jax"], found[4, "jax"]) == (1.5, 9.0)


def test_the_memory_of_a_further_replica_is_a_difference() -> None:
    result = Result(is_quick=True)
    for size, mebibytes in ((1, 50.0), (4, 53.0)):
        found = Measured(Case("start", size, "memory", "MiB"))
        found.samples = {Contender("aioreplica", ""): [mebibytes]}
        result.add(found)
    assert "memory of a further replica, aioreplica: 1.00 MiB" in format_results(result)


def test_every_task_of_a_peer_has_a_case() -> None:
    cases = all_cases(is_quick=False)
    assert {case.task for case in cases} == {task for peer in PEERS for task in peer.modes}
    sixty_four = [case for case in cases if case.num_replicas == 64]
    assert [case.title for case in sixty_four] == ["merge", "empty run"]
    assert all(promised(case, "floor", "") is None for case in cases)
    assert promised(MERGE, "tensorflow", "eager") == 10


@pytest.mark.slow
def test_charts_are_drawn(tmp_path: Path) -> None:
    found = measured()
    reduce = Measured(Case("all_reduce", 2, "all_reduce 1 KiB", "us", {"size": 1024}))
    reduce.samples = {Contender("aioreplica", ""): [1.0], Contender("jax", "jit"): [2.0]}
    train = Measured(Case("train", 2, "MLP", "us/step"))
    train.samples = {Contender("aioreplica", "run"): [1.0], Contender("jax", "jit"): [2.0]}
    rows = [row for each in (found, reduce, train) for row in each.rows()]
    drawn = list(draw_charts(rows, tmp_path))
    assert [path.name for path in drawn] == [
        "peers_merge.png", "peers_all_reduce.png", "peers_train.png"
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_tables_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n", encoding="utf-8")
    for _ in range(2):
        write_tables(measured().rows(), page)
    lines = page.read_text("utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("above", "below")
    assert "| 4 | 3.00 | 15.0x | **0.50x** | 0.33x |" in lines
    assert "1 of 2 goals are met; those that are not:" in lines
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="no lines"):
        write_tables(measured().rows(), page)


def test_compiled_steps_are_compared_with_programs_by_hand(tmp_path: Path) -> None:
    case = next(case for case in all_cases(is_quick=False) if case.task == "compiled")
    found = Measured(case)
    found.samples = {
        Contender("aioreplica compiled", ""): [10.0],
        Contender("jax by hand", SCAN): [9.6],
        Contender("jax by hand", CALLS): [9.6],
    }
    assert [row["goal"] for row in found.rows()] == [None, 0.95, 1.0]
    assert [row["is_met"] for row in found.rows()] == [None, True, False]
    page = tmp_path / "peers.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    write_tables([*measured().rows(), *found.rows()], page)
    lines = page.read_text("utf-8").splitlines()
    assert f"| N |  | fastest (µs/step) | jax by hand {SCAN} | jax by hand {CALLS} |" in lines
    assert "| 1 | MLP, SGD, batch 32 | 10.0 compiled | 0.96x | **0.96x** |" in lines


@pytest.mark.xslow
def test_a_whole_run_of_compiled_steps(tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    arguments = ["--quick", "--tasks", "compiled", "--replicas", "2", "--output", str(output)]
    main([*arguments, "--peers", "aioreplica compiled,jax by hand"])
    rows = json.loads(output.read_text())["rows"]
    assert [(row["peer"], row["mode"]) for row in rows] == [
        ("aioreplica compiled", ""), ("jax by hand", SCAN), ("jax by hand", CALLS)
    ]  # fmt: skip
    assert all(row["median"] > 0 for row in rows)


def test_cases_of_which_we_have_no_way_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    main(["--quick", "--tasks", "compiled", "--peers", "aioreplica", "--output", str(output)])
    assert json.loads(output.read_text())["rows"] == []
    assert "compiled" not in capsys.readouterr().out


@pytest.mark.xslow
def test_a_whole_run_without_other_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    main(["--quick", "--replicas", "2", "--peers", "aioreplica,floor", "--output", str(output)])
    written = json.loads(output.read_text())
    reports = {row["name"]: row["report"] for row in written["rows"] if row["report"]}
    assert "Replica 0 returned" in reports["report of a mismatch"]
    assert {row["peer"] for row in written["rows"]} == {"aioreplica", "floor"}
    assert "goals met" in capsys.readouterr().out
