"""The attack on the training service: its short form, and the growth that it finds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import hostile
from tests.examples.hostile import GOOD, MAX_GROWTH_MIB, growth_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xslow
def test_good_jobs_end_in_the_right_bits_beside_everything_else() -> None:
    result = subprocess.run(
        [sys.executable, "-m", hostile.__name__, "--seconds", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = dict(each.split(" ", 1)[::-1] for each in result.stdout.partition("\n")[0].split(", "))

    assert result.returncode == 0, result.stdout + result.stderr
    assert int(counts["good jobs"]) >= len(GOOD)
    assert int(counts["restarts"]) >= 2  # one more for each that a full table could not count
    assert int(counts["jobs that ended the process"]) == 1
    assert int(counts["jobs that hung: cancelled"]) >= 1
    assert int(counts["times without space"]) >= 2
    assert int(counts["hostile requests"]) >= 20


def test_growth_is_found_and_a_start_is_none() -> None:
    steady = [{"MiB": 200.0, "threads": 9.0, "descriptors": 20.0}] * 9
    start = [{"MiB": 20.0, "threads": 1.0, "descriptors": 3.0}, *steady]
    large = {**steady[0], "MiB": 201.0 + MAX_GROWTH_MIB}
    many = {**steady[0], "descriptors": 41.0}

    assert growth_of(steady) == growth_of(start) == []
    assert growth_of([*steady[:6], large, large, large]) == ["MiB grew from 200 to 249"]
    assert growth_of([*steady[:6], many, many, steady[0]]) == ["descriptors grew from 20 to 41"]
    assert growth_of(steady[:2]) == ["the service lived for 2 s only after its last start"]
