"""Workers of a strategy are killed, again and again: `python -m tests.cluster_engines.kills`.

Each time one of 2 or 4 workers kills itself (SIGKILL) in the middle of a step. Every survivor has
to raise a `WorkerLostError` that names it, within 5 seconds, and once more in the next run. On MPI
with ULFM and on Gloo survivors also shrink, and end with the numbers that a single worker computes.
With plain MPI the launcher ends all workers.

And in one launch `--replaced` workers are killed or frozen at random: the others go on, with a new
one each time, and no example of the epoch is lost or repeated.

`--repeat 20` does each of it twenty times. Exits with 1 if anything else happens than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster_engines.launching import (
    BEYOND_ONE_LAUNCH,
    STRATEGY_PROGRAM,
    ULFM,
    Launch,
    gloo,
    mpi,
    row_after_shrinking,
)

SECONDS = 5.0


def killed(engine: str, size: int, turn: int) -> float:
    """Kill one worker; return the seconds until the last survivor knew.

    Raises:
        AssertionError: If a survivor was told something else, or too late.
    """
    if engine == "ulfm":
        victim = turn % size
        launch = mpi(size, "kill", str(victim), options=ULFM, program=STRATEGY_PROGRAM)
    else:
        victim = size - 1 - turn % (size - 1)  # worker 0 keeps the store: a test of its own
        launch = gloo(size, "kill", str(victim), program=STRATEGY_PROGRAM)
    rows = survivors(launch, size, victim)
    for row in rows:
        assert row["error"] == "WorkerLostError", row
        assert row["ranks"] == [victim], row
        assert "cannot meet the other workers any more" in row["again"], row
        assert row["after"] < SECONDS, row
    return float(max(row["after"] for row in rows))


def shrunk(engine: str, size: int, turn: int) -> float:
    """Kill one worker; the others shrink and go on to the end. Return the seconds of all."""
    victim = turn % size
    if engine == "ulfm":
        launch = mpi(size, "shrink", str(victim), options=ULFM, program=STRATEGY_PROGRAM)
    else:
        launch = gloo(size, "shrink", str(victim), program=STRATEGY_PROGRAM)
    for rank, row in enumerate(survivors(launch, size, victim)):
        expected = row_after_shrinking(rank, size - 1, [[victim]])
        assert row == expected, row
    return launch.seconds


def replaced(engine: str, size: int, kills: int, turn: int) -> float:
    """End workers one after the other; return the most seconds until survivors had gone on."""
    with TemporaryDirectory() as folder:
        arguments = size, "replace", f"{size},{kills},{turn},{folder}"
        options = {"program": STRATEGY_PROGRAM, "limit_s": 240.0 + 30 * kills}
        variables = {"TEST_TIMEOUT_S": "25"}
        if engine == "ulfm":
            launch = mpi(*arguments, options=ULFM, **options, **{**BEYOND_ONE_LAUNCH, **variables})
        else:
            launch = gloo(*arguments, **options, **variables)
        assert len(list(Path(folder).iterdir())) == kills, launch.output
    assert sorted(row["rank"] for row in launch.said) == list(range(size)), launch.output
    assert all(row["learned"] for row in launch.said), launch.said
    for row in launch.said:
        print(f"  until new ones had come: {row['replaced']}")
    return max(wait for row in launch.said for wait in row["waits"])


def ended_by_launcher(size: int, turn: int) -> float:
    """Kill one worker of plain MPI; the launcher ends the others. Return the seconds of all."""
    launch = mpi(size, "kill", str(turn % size), program=STRATEGY_PROGRAM)
    assert launch.codes == [137], (launch.codes, launch.output)
    assert launch.results == {}, launch.results
    return launch.seconds


def survivors(launch: Launch, size: int, victim: int) -> list[dict[str, object]]:
    """Return what all but one worker have said, by rank."""
    assert sorted({*launch.results, victim}) == list(range(size)), (launch.codes, launch.output)
    return [launch.results[rank] for rank in sorted(launch.results)]


CASES: dict[str, Callable[[int], float]] = {
    "ulfm, 2 workers, one is killed": lambda turn: killed("ulfm", 2, turn),
    "ulfm, 4 workers, one is killed": lambda turn: killed("ulfm", 4, turn),
    "gloo, 2 workers, one is killed": lambda turn: killed("gloo", 2, turn),
    "gloo, 4 workers, one is killed": lambda turn: killed("gloo", 4, turn),
    "ulfm, 3 workers shrink to 2": lambda turn: shrunk("ulfm", 3, turn),
    "gloo, 3 workers shrink to 2": lambda turn: shrunk("gloo", 3, turn),
    "plain MPI, 2 workers, the launcher ends all": lambda turn: ended_by_launcher(2, turn),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--replaced", type=int, default=5, help="how many in one launch")
    options = parser.parse_args(arguments)
    num_failed = 0
    kills = options.replaced
    several: dict[str, Callable[[int], float]] = {
        f"{engine}, 3 workers, {kills} replaced": partial(replaced, engine, 3, kills)
        for engine in ("ulfm", "gloo")
    }
    for name, case in {**CASES, **several}.items():
        if options.only not in name:
            continue
        seconds = []
        for turn in range(options.repeat):
            try:
                seconds.append(case(turn))
            except AssertionError as error:
                num_failed += 1
                print(f"{name}, turn {turn}: {error}", flush=True)
        slowest = f"slowest {max(seconds):.2f} s" if seconds else ""
        print(f"{name}: {len(seconds)} of {options.repeat} as promised, {slowest}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
