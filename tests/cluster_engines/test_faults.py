"""The fault programs: each fault, in each place, on each engine; who hears of it, how, how soon.

What leaves the processes alive runs in one launch for each engine, program by program. Where a
process ends, each program is a launch, in which nothing is caught: its exit statuses are looked at.
Two workers of two replicas each; worker 1 is the victim, or worker 0 where a name ends in "@0".
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster_engines.launching import MEMORY, ULFM, ended, gloo, started_by_mpi

PROGRAM = str(Path(__file__).with_name("fault_program.py"))
BOUND_S = 60.0  # for what takes a second or less, on any machine: what is told later was not told
LIMIT_S = 300.0  # of a launch
PAUSE_S = 0.2
CALLS = {  # where the others are then, as errors name it
    "first": r"all_reduce #1 \(SUM\)",
    "all_reduce": r"all_reduce #1 \(SUM\)",
    "handle": r"start_all_reduce #[12] \(SUM\)",
    "merge": r"merge_call #1",
    "run_steps": r"all_reduce #\d+ \(SUM\)",
    "between": r"extended\.read_var",
    "save": r"CheckpointManager\.save",
    "agreement": r"all #1",
    "dataset": r"next batch",
    "run_steps/another number": r"infeed #1 \(of 50 steps\)",
    "agreement/another value": r"agree #1",
    "agreement/another tree": r"agree #1",
}
RAISES = "exception", "SystemExit", "Ctrl-C"
GROUPED = {
    "first": ["exception", "cancellation", "return", "another variable"],
    "all_reduce": [*RAISES, "exception@0", "cancellation", "hang", "return", "another op",
                   "another shape", "another dtype", "another tree", "another collective"],
    "handle": [*RAISES, "cancellation", "hang", "return", "another op", "another shape"],
    "merge": [*RAISES, "hang", "return", "another op", "another tree"],
    "run_steps": [*RAISES, "cancellation", "hang", "return", "another op", "another number"],
    "between": [*RAISES, "hang", "close", "another variable", "another operation"],
    "save": ["full disk", "Ctrl-C", "cancellation", "hang", "another tree"],
    "agreement": [*RAISES, "cancellation", "hang", "return", "another collective",
                  "another value", "another tree"],
    "dataset": [*RAISES, "hang", "return"],
    "closing": [*RAISES, "hang"],
}  # fmt: skip
ALONE = {
    "gloo": [
        "first/SIGKILL", "first/os._exit", "all_reduce/exception", "all_reduce/SystemExit",
        "all_reduce/Ctrl-C", "all_reduce/SIGKILL", "all_reduce/SIGKILL@0", "all_reduce/SIGSTOP",
        "all_reduce/os._exit", "handle/SIGKILL", "merge/SIGKILL", "run_steps/SIGKILL",
        "between/SIGKILL", "save/SIGKILL", "save/SIGSTOP", "agreement/SIGKILL", "dataset/SIGKILL",
        "closing/SIGKILL",
    ],
    "ulfm": [
        "all_reduce/exception", "all_reduce/SIGKILL", "all_reduce/os._exit", "save/SIGKILL",
        "closing/SIGKILL",
    ],
    "mpi": ["all_reduce/exception", "all_reduce/SIGKILL", "all_reduce/os._exit"],
}  # fmt: skip
LEFT = ("between", "dataset", "closing")  # where errors leave the block of the strategy
NUM_REPLICAS = 4  # of both workers: what a step counts that all do
ITS_OWN = {
    "exception": "ValueError", "cancellation": "CancelledError", "SystemExit": "SystemExit",
    "Ctrl-C": "KeyboardInterrupt", "full disk": "CheckpointNotCommittedError", "close": "",
}  # fmt: skip
ENDS = {
    "exception": "ValueError: bad batch",
    "cancellation": "CancelledError",
    "SystemExit": "SystemExit: 3",
    "Ctrl-C": "KeyboardInterrupt",
}


@dataclass
class Outcome:
    """What has become of a program.

    Attributes:
        rows: What the workers that could say something were told, by rank.
        codes: The exit status of the launcher, or of each worker where there is none.
        output: Everything on stderr.
        left: Processes that have outlived it.
    """

    rows: dict[int, dict[str, Any]]
    codes: list[int] = field(default_factory=list)
    output: str = ""
    left: list[int] = field(default_factory=list)


class Workers:
    """Starts programs, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grouped: dict[str, Outcome] = {}

    def of_group(self, engine: str, name: str) -> Outcome:
        """Return what has become of one of the programs of one launch."""
        if engine not in self.grouped:
            names = [f"{where}/{what}" for where, faults in GROUPED.items() for what in faults]
            self.grouped[engine] = self.run(engine, f"all-{engine}", names)
        whole = self.grouped[engine]
        rows = self._rows(f"all-{engine}", name)
        return Outcome(rows, whole.codes, whole.output, whole.left)

    def alone(self, engine: str, name: str) -> Outcome:
        """Return what has become of a launch with one program."""
        return self.run(engine, f"{engine} {name.replace('/', ' ')}", [name])

    def run(self, engine: str, folder: str, names: list[str]) -> Outcome:
        own = self.folder / folder
        own.mkdir()
        if engine == "gloo":
            launch = gloo(2, str(own), *names, program=PROGRAM, limit_s=LIMIT_S)
        else:
            options = ULFM if engine == "ulfm" else ()
            launcher = started_by_mpi(2, str(own), *names, options=options, program=PROGRAM)
            with launcher:
                launch = ended([launcher], LIMIT_S)
        rows = self._rows(folder, names[0])
        outcome = Outcome(rows, launch.codes, launch.output, self._left(own))
        for process in outcome.left:  # the test fails, and the next ones have the machine
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return outcome

    def _rows(self, folder: str, name: str) -> dict[int, dict[str, Any]]:
        files = (self.folder / folder / name.replace("/", " ")).glob("*.json")
        return {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in files}

    def _left(self, folder: Path) -> list[int]:
        processes = []
        for number in {file.read_text(encoding="utf-8") for file in folder.glob("*/*.pid")}:
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(number)))
        for _ in range(int(BOUND_S / PAUSE_S)):  # mpirun ends before they do
            _, alive = psutil.wait_procs(processes, timeout=PAUSE_S)
            processes = [process for process in alive if not is_dead(process)]
            if not processes:
                break
        return [process.pid for process in processes]


def is_dead(process: psutil.Process) -> bool:
    """Tell whether a process has ended, though the one that has inherited it may not know yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Start them in memory where the system has such a folder: no timeout is for a slow disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Workers(Path(folder))


def told(where: str, what: str, victim: int) -> tuple[str, list[int], str]:
    """Return the error that the other worker gets, the ranks in it, and what its text has."""
    call, has_ended = CALLS.get(f"{where}/{what}", CALLS.get(where, "")), ENDS.get(what)
    if where == "closing" or (where, what) == ("dataset", "return"):
        return "", [], ""  # who closes too misses nothing; loops end with the shortest
    if what in ("hang", "SIGSTOP"):
        text = rf"Worker 1 did not come to .*{call}.* within [15] s"
        if where == "save":
            return "CheckpointNotCommittedError", [], text
        return "StallError", [victim], text if victim else rf"Worker 0 has stopped: .*{call}"
    if where == "first" and what in ("SIGKILL", "os._exit"):  # it has not connected yet
        return "StallError", [1], "Worker 1 did not come to 127.0.0.1:.* within 4 s"
    if what == "close":
        return "WorkerLostError", [victim], "Worker 1 has closed its strategy"
    if what == "full disk":
        return "CheckpointNotCommittedError", [], "Worker 1 could not save step 1: OSError: .*space"
    if what in ("SIGKILL", "os._exit"):
        return "WorkerLostError", [victim], rf"Worker {victim}.* is gone.*{call}"
    if has_ended is not None:
        return "WorkerLostError", [victim], rf"Worker {victim} .*{re.escape(has_ended)}"
    if (where, what) == ("first", "another variable"):
        return "MergeMismatchError", [], r"disagree in new variables: .*\[3\].*0 and.*\[4\].*1"
    return "MergeMismatchError", [], rf"orkers? 0.*{call}.*worker 1"


@pytest.mark.parametrize(("where", "what"), [(w, each) for w in GROUPED for each in GROUPED[w]])
@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_the_other_worker_is_told(workers: Workers, engine: str, where: str, what: str) -> None:
    outcome = workers.of_group(engine, f"{where}/{what}")

    assert sorted(outcome.rows) == [0, 1], outcome.output
    what, _, number = what.partition("@")
    victim = int(number or 1)
    own, other = outcome.rows[victim], outcome.rows[1 - victim]
    check_told(other, where, what, victim)
    leaves = where in LEFT and what in (*RAISES, "hang")
    ends = what in ("SystemExit", "Ctrl-C") or (leaves and bool(own["error"]))
    assert own["error"] == ITS_OWN.get(what, other["error"]), own
    assert own["left"] == (own["error"] if ends else "")
    assert other["left"] == ""
    stays = not (ends or what in ("hang", "close")) and where != "closing"
    differs = (where, what) == ("first", "another variable")
    for row in outcome.rows.values():
        assert (row["again"] == NUM_REPLICAS) == (stays and not differs), row


@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_no_process_outlives_the_launch(workers: Workers, engine: str) -> None:
    outcome = workers.of_group(engine, "first/exception")
    assert outcome.left == [], outcome.output


@pytest.mark.parametrize(("engine", "name"), [(e, each) for e in ALONE for each in ALONE[e]])
def test_the_launch_ends(workers: Workers, engine: str, name: str) -> None:
    outcome = workers.alone(engine, name)

    where, _, what = name.partition("/")
    what, _, number = what.partition("@")
    victim = int(number or 1)
    told_to = outcome.rows.get(1 - victim)
    if told_to is not None:
        check_told(told_to, where, what, victim)
    else:  # mpirun was faster
        assert (engine, what) in (("mpi", "SIGKILL"), ("mpi", "os._exit"), ("ulfm", "os._exit"))
    if where == "closing":
        assert "was closed without the others: Worker 1" in outcome.output
    assert outcome.codes == statuses_of(engine, where, what, victim), outcome.output
    assert outcome.left == []


def statuses_of(engine: str, where: str, what: str, victim: int) -> list[int]:
    """Return the exit statuses of the workers by rank; under MPI that of `mpirun`."""
    other = 0 if where == "closing" else 1
    own = {"exception": 1, "SystemExit": 3, "Ctrl-C": -2, "os._exit": 5}.get(what, -9)
    if engine == "gloo":
        return [other, own] if victim else [own, other]
    if engine == "mpi" and own < 0:
        return [128 - own]
    return [own if own > 0 else other]


def check_told(row: dict[str, Any], where: str, what: str, victim: int) -> None:
    """Check what the other worker was told, and that it was not told too late."""
    error, ranks, text = told(where, what, victim)
    assert (row["error"], row["ranks"]) == (error, ranks), row
    assert re.search(text, row["text"], re.DOTALL), row
    assert row["seconds"] < BOUND_S, row
