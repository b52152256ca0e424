"""The command explore: exit status, report, tokens, names that are not there."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from tests.cli.test_app import ended

PROGRAM = """
import asyncio
import sys

calls = []

async def fine():
    calls.append(1)
    await asyncio.sleep(3600)

async def loses():
    state = {"v": 0}
    async def writer(delay):
        for _ in range(delay):
            await asyncio.sleep(0)
        seen = state["v"]
        await asyncio.sleep(0)
        state["v"] = seen + 1
    await asyncio.gather(writer(0), writer(2))
    if state["v"] != 2:
        raise ValueError(f"an update is lost: {state['v']}")

async def takes_long():
    for _ in range(3000):
        await asyncio.sleep(0)

async def leaves():
    asyncio.create_task(asyncio.sleep(10), name="left")

async def ends():
    await asyncio.sleep(0)
    sys.exit(0)

async def is_cancelled():
    await asyncio.sleep(0)
    raise asyncio.CancelledError("nobody asked for it")

def plain():
    pass

class Shop:
    @staticmethod
    async def main():
        await asyncio.sleep(1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "explored_shop.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "explored_shop", raising=False)
    return tmp_path


def explored(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    return ended(capsys, "explore", *arguments)


@pytest.mark.parametrize("path", ["fine", "Shop.main"])
def test_a_program_that_is_right_ends_with_0(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explored(capsys, f"explored_shop:{path}", "--schedules", "30")

    assert (code, err) == (0, "")
    assert "result\tno schedule failed\n" in out
    assert "schedules\t30\n" in out


def test_a_failure_ends_with_1_and_its_token_replays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder / "page.html"
    code, out, _ = explored(capsys, "explored_shop:loses", "--timeline", str(page))

    assert code == 1
    assert "ValueError: an update is lost: 1" in out
    assert "is held at" in out
    assert 'explored_shop.py", line' in out
    assert "aioreplica/testing" not in out
    assert page.exists()
    [token] = re.findall(r"^token\t(\S+)$", out, re.MULTILINE)

    for search in ([], ["--schedules=1", "--seed=5", "--fidelity=adversarial", "--max-steps=9"]):
        code, out, _ = explored(capsys, "explored_shop:loses", *search, "--token", token)
        assert code == 1
        assert "ValueError: an update is lost: 1" in out

    code, out, _ = explored(capsys, "explored_shop:loses", "--token", "ar1-nonsense")
    assert code == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [("ends", "SystemExit: 0"), ("is_cancelled", "CancelledError: nobody asked for it")],
)
def test_a_token_tells_a_failure_that_is_no_exception(
    path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = explored(capsys, f"explored_shop:{path}")
    [token] = re.findall(r"^token\t(\S+)$", out, re.MULTILINE)

    code, out, err = explored(capsys, f"explored_shop:{path}", "--token", token)

    assert (code, err) == (1, "")
    assert said in out
    assert "aioreplica/testing" not in out


def test_the_token_of_an_endless_schedule_needs_no_other_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = explored(capsys, "explored_shop:takes_long", "--max-steps=2000")
    [token] = re.findall(r"^token\t(\S+)$", out, re.MULTILINE)

    code, out, _ = explored(capsys, "explored_shop:takes_long", "--token", token)
    assert code == 1
    assert "StarvationError: The program has not ended after 2000 steps" in out


def test_other_seeds_and_fidelities_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explored(
        capsys, "explored_shop:loses", "--schedules=20", "--seed=3", "--fidelity=asyncio"
    )

    assert code == 0
    assert "seed\t3\n" in out
    assert "fidelity\tasyncio\n" in out


def test_what_may_be_left_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("explored_shop:leaves", "--schedules=3")

    assert explored(capsys, *options)[0] == 1
    assert explored(capsys, *options, "--leaks=left")[0] == 0
    assert explored(capsys, *options, "--leaks=ignore")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explored_shop"], "Name the program as module:function"),
        (["explored_shopp:fine"], "Cannot import 'explored_shopp'"),
        (["explored_shop:fin"], "Did you mean 'fine'?"),
        ([".explored_shop:fine"], "without a leading dot, got '.explored_shop:fine'"),
        (["explored_shop:calls.main"], "explored_shop has no 'calls.main'"),
        (["explored_shop:fine", "--token=ar1-x", "--timeline=page.html"], "leave --timeline out"),
        (["explored_shop:plain"], "plain is not an async function"),
        (["explored_shop:fine", "--schedules=0"], "schedules must be at least 1, got 0."),
        (["explored_shop:fine", "--fidelity=best"], "Unknown fidelity 'best'"),
    ],
)
def test_wrong_arguments_end_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = explored(capsys, *arguments)

    assert code == 2
    assert said in err


def test_a_page_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explored(capsys, "explored_shop:loses", "--timeline=no/folder/page.html")

    assert (code, "ValueError: an update is lost: 1" in out) == (1, True)
    assert err.startswith("The page cannot be written to no/folder/page.html: ")


def test_a_terminal_is_told_how_many_were_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    _, _, err = explored(capsys, "explored_shop:fine", "--schedules=100")

    assert "50 of 100 schedules" in err
