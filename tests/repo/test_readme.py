"""The README's program runs, and its table is what a mismatch looks like."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aioreplica as ar

README = Path(__file__).parents[2] / "README.md"
BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks.md"
PEERS = Path(__file__).parents[2] / "docs/peers.md"


@pytest.mark.slow
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program)

    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    devices = [f"cpu:{i}" for i in range(4)]
    means = [ar.PerReplica([np.float64(mean)] * 4, devices=devices) for mean in (124.0, 380.0)]
    assert done.stdout.splitlines() == [repr(mean) for mean in means]


@pytest.mark.asyncio
async def test_the_table_in_the_readme_is_the_real_one() -> None:
    async def step() -> None:
        replica = ar.get_replica_context()
        if replica.replica_id_in_sync_group != 1:
            await replica.all_reduce("sum", 1.0)

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
        with pytest.raises(ar.errors.MergeMismatchError) as caught:
            await strategy.run(step)

    shown = re.search(r"```text\nMergeMismatchError: (.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None
    real = re.sub(r"\S+test_readme\.py:\d+", "step.py:11", str(caught.value))
    assert real.split() == shown.group(1).split()


def test_every_figure_of_the_peers_is_on_their_page() -> None:
    _, _, table = README.read_text().partition("`python -m benchmarks peers`")
    page = PEERS.read_text()

    figures = re.findall(r"[\d.,]+x", table.partition("## Where next")[0])
    assert len(figures) >= 10
    assert [figure for figure in figures if f" {figure} " not in page] == []


def costs() -> list[tuple[str, str, str, str]]:
    """Return what is measured, the range, its mark and the command of each row of the table."""
    rows = re.findall(
        r"^\| (.+?) \| .+? \| ([\d.]+-[\d.]+)( \*|) \| `(python -m benchmarks \w+)` \|$",
        README.read_text(),
        re.M,
    )
    assert len(rows) >= 10
    return rows


@pytest.mark.parametrize(("what", "extent", "mark", "command"), costs())
def test_every_range_in_the_readme_has_the_run_on_the_page_of_benchmarks(
    what: str, extent: str, mark: str, command: str
) -> None:
    """A range that is of one run is that of its rounds, as the page shows it."""
    _, _, behind = BENCHMARKS.read_text().partition("## One full run")
    shown = re.search(rf"`{command}`.*?\n```text\n(.*?)```", behind, re.DOTALL)

    assert shown is not None, f"the page has no table of {command}"
    lines = [line for line in shown[1].splitlines() if "uvloop" not in line]
    low, high = map(float, extent.split("-"))
    runs = [re.search(r" ([\d.]+)  +([\d.]+-[\d.]+)( |$)", line) for line in lines]
    found = [(float(run[1]), run[2]) for run in runs if run is not None]
    assert any(rounds == extent if mark else low <= ratio <= high for ratio, rounds in found), what
