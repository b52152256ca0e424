"""Own test suites of published packages under `--ar-explore`: the table of docs/real_bugs.md.

`python -m tests.libraries.suites FOLDER` makes an environment with the releases below in a folder,
unpacks their source distributions there, and runs their asyncio tests with 1 and with 20 schedules.
Its exit status is 1 if more tests fail than are known to.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = "aioreplica.integrations._pytest_plugin"
NEEDED = (
    "pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-benchmark", "pytest-mock", "hypothesis",
    "time-machine", "anyio==4.16.0", "trio", "blockbuster", "dunamai", "exceptiongroup", "psutil",
    "tornado", "trustme", "typeguard",
)  # fmt: skip
"""What the suites import, and what they are run with."""
ONLY_ASYNCIO = ("--anyio-mode=auto", "-p", "no:asyncio", "-k", "not trio and not uvloop")


@dataclass(frozen=True)
class Suite:
    """Tests of a release.

    Attributes:
        release: Name and version.
        tests: Files or folders of its source distribution.
        options: Of pytest.
        failing: Tests that may fail with 1 and with 20 schedules; docs/real_bugs.md says why.
    """

    release: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ("-p", "no:anyio")
    failing: tuple[int, int] = (0, 0)


SUITES = (
    Suite("janus==2.0.0", ("tests",), failing=(0, 2)),
    Suite("async-lru==2.4.0", ("tests",), failing=(3, 3)),
    Suite("aiolimiter==1.3.0", ("tests",), failing=(0, 2)),
    Suite("tenacity==9.2.1", ("tests/test_asyncio.py", "tests/test_issue_478.py"), failing=(0, 1)),
    Suite("anyio==4.16.0", ("tests",), ONLY_ASYNCIO, failing=(62, 68)),
)


def main() -> int:
    """Return 0 if no suite has more failures than are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the environment and the sources")
    parser.add_argument("names", nargs="*", help="only packages with these names")
    given = parser.parse_args()
    folder = given.folder.resolve()
    releases = [suite.release for suite in SUITES]
    python = environment(folder / "environment", [*NEEDED, *releases])
    worse = []
    print("| release | schedules | explored | refused | failed | confirmed |")
    print("|---|---|---|---|---|---|")
    for suite in SUITES:
        name = suite.release.partition("==")[0]
        if given.names and name not in given.names:
            continue
        source = _source(folder, python, suite.release)
        for schedules, known in zip((1, 20), suite.failing, strict=True):
            counts, output = _run(python, source, suite, schedules)
            print(
                f"| {suite.release.replace('==', ' ')} | {schedules} | {' | '.join(counts)} |",
                flush=True,
            )
            (folder / f"{name}-{schedules}.log").write_text(output, encoding="utf-8")
            if int(counts[2]) > known:
                worse.append(f"{name} with {schedules} schedules: {counts[2]}, known are {known}")
    print("\n".join(worse) or "no failure that is not known")
    return 1 if worse else 0


def environment(home: Path, releases: Sequence[str]) -> Path:
    """Make an environment with some releases, unless it is there; return its interpreter."""
    python, marker = home / "bin" / "python", home / "complete"
    if not marker.exists():
        venv.create(home, with_pip=True, clear=True)
        _call([python, "-m", "pip", "install", "-q", *releases])
        marker.touch()
    return python


def _source(folder: Path, python: Path, release: str) -> Path:
    """Download and unpack the source distribution, which has the tests; return its folder."""
    name = release.partition("==")[0]
    target = folder / "sources" / name
    if not target.exists():
        options = ("--no-deps", "--no-binary", name, "-d", target)
        _call([python, "-m", "pip", "download", "-q", *options, release])
        [archive] = target.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(target, filter="data")
    [unpacked] = (path for path in target.iterdir() if path.is_dir())
    return unpacked


def _run(python: Path, source: Path, suite: Suite, schedules: int) -> tuple[list[str], str]:
    """Return the counts of the last line of the table, and all output."""
    ended = subprocess.run(
        [
            python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", PLUGIN,
            "-o", "addopts=", "-o", "filterwarnings=", "--ar-explore", "--ar-fidelity=asyncio",
            f"--ar-schedules={schedules}", *suite.options, *suite.tests,
        ],
        cwd=source, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    output = ended.stdout + ended.stderr
    rows = re.findall(r"^\S+ +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    if not rows:
        raise RuntimeError(f"{suite.release} has no table:\n{output[-2000:]}")
    return list(rows[-1]), output


def _call(command: list[object]) -> None:
    subprocess.run([str(each) for each in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
