"""Programs of torch under `prepare`: the diffs of the page, and what DDP makes of the same ones."""

import re
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from tests.cluster_engines.launching import gloo
from tests.conftest import mirrored
from tests.strategies.workers import on_workers

FOLDER = Path(__file__).parent / "prepared"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting_ddp.md"
DDP = str(Path(__file__).parents[1] / "cluster_engines" / "ddp_program.py")
NAMES = ("cnn", "transformer", "uneven")


def hunks(name: str) -> list[list[str]]:
    """Return the pieces of a program's diff on the page, each some lines with their marks."""
    [diff] = re.findall(rf"```diff\n--- {name}\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [piece.splitlines() for piece in diff.split(" ...\n")]


def prepared(name: str) -> dict[str, Any]:
    """Change a program as the page says, and run its definitions."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    for lines in hunks(name):
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    program: dict[str, Any] = {}
    exec(compile(text, name, "exec"), program)
    return program


def made(program: dict[str, Any], num_workers: int) -> Any:
    """Make module, optimizer and loader, the latter with processes if it is one that has some."""
    make = program["make"]
    return make(num_workers) if make.__code__.co_argcount else make()


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_are_new(name: str) -> None:
    marks = [line[:1] for lines in hunks(name) for line in lines]
    assert 0 < marks.count("+") <= 5


async def states(strategy: ar.Strategy, num_workers: int) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        program = prepared(name)
        program["make"] = lambda made_of=dict(program): made(made_of, num_workers)
        found[name] = (await program["main"](strategy)).state_dict()
    return found


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_ddp_ends_with_the_same_parameters(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for size in (2, 4):
        launch = gloo(size, str(tmp_path), program=DDP, OMP_NUM_THREADS="1")
        assert launch.codes == [0] * size, launch.output
        async with mirrored(size) as strategy:
            ours = await states(strategy, num_workers=size == 2)
        async with mirrored(size) as strategy:
            again = await states(strategy, num_workers=0)
        runs = [ours, again]
        if size == 2:
            runs += await on_workers(2, 1, lambda each: states(each, num_workers=0))
            launch = gloo(2, str(tmp_path), "prepared", program=DDP, OMP_NUM_THREADS="1")
            assert launch.codes == [0, 0], launch.output
        for name in NAMES:
            theirs = torch.load(tmp_path / f"{name}.{size}.pt")
            on_gloo = torch.load(tmp_path / f"{name}.workers.pt")  # of two processes
            for key, expected in theirs.items():
                torch.testing.assert_close(ours[name][key], expected, rtol=0.0, atol=1e-6)
                if size == 2:
                    torch.testing.assert_close(on_gloo[key], expected, rtol=0.0, atol=1e-6)
                assert all(torch.equal(run[name][key], ours[name][key]) for run in runs), key
