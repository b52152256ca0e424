"""Tokens: short, checked before anything runs, and the same schedule in every process."""

import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from binascii import crc32
from functools import partial
from pathlib import Path

import pytest

import aioreplica.testing as art
from aioreplica.testing import Schedule
from aioreplica.testing._schedule import CANCELLED, CHOICES, HELD, Hold
from aioreplica.testing._strategies import FIFO, MAKERS
from aioreplica.testing._token import TokenTooLongError, decode, encode
from tests.testing import programs

ROOT = Path(__file__).resolve().parents[2]
LARGEST = (1 << 40) - 1

SCHEDULES = [
    *(Schedule(maker, LARGEST, 100_000) for maker in range(len(MAKERS))),
    Schedule(1, 5, 8, "asyncio"),
    Schedule(1, 5, 8, "adversarial"),
    Schedule(CHOICES, 7, choices=((0, 1), (3, 2), (300, 1))),
    Schedule(CHOICES, 7),
    Schedule(CANCELLED, 7, cancel_step=1234),
    Schedule(HELD, 7, holds=(Hold((2, 0), 1, (2, 1), 3),)),
]


async def never_run() -> None:
    raise AssertionError("the program ran")


def found_token() -> str:
    report = art.explore(programs.lost_update, schedules=600)
    assert report.failure is not None
    return report.failure.token


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_token_is_its_schedule(schedule: Schedule) -> None:
    token = encode(schedule, never_run)

    assert len(token) <= 40
    assert decode(token, never_run) == schedule


def test_too_many_choices_do_not_fit() -> None:
    with pytest.raises(TokenTooLongError):
        encode(Schedule(CHOICES, choices=tuple((i, 1) for i in range(40))), never_run)


@pytest.mark.parametrize("at", range(4, 20))
def test_every_damaged_character_is_noticed(at: int) -> None:
    token = encode(Schedule(1, LARGEST, 8), never_run)
    damaged = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]

    with pytest.raises(ValueError, match="no schedule token, or a damaged one"):
        art.replay(never_run, damaged)


@pytest.mark.parametrize("text", ["", "ar1-", "simloom:1:2", "ar1-####", "ar1-" + "A" * 60])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Nothing was run"):
        art.replay(never_run, text)


def test_a_token_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="of another program than 'never_run'"):
        art.replay(never_run, found_token())


def test_a_token_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="of another version: it begins with 'ar2-'"):
        art.replay(never_run, found_token().replace("ar1-", "ar2-"))


@pytest.mark.parametrize("maker", [FIFO, HELD, CHOICES, CANCELLED])
def test_a_token_that_ends_too_early_is_refused(maker: int) -> None:
    body = bytes([maker << 2 | 1]) + bytes(7) + b"\x80"  # whole, but its last number is not
    text = urlsafe_b64encode(body + crc32(body).to_bytes(4)).decode().rstrip("=")

    with pytest.raises(ValueError, match="Nothing was run"):
        art.replay(never_run, f"ar1-{text}")


def test_a_token_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="A token is a string, got 7"):
        art.replay(never_run, 7)  # type: ignore[arg-type]


def test_a_nameless_program_takes_any_token() -> None:
    with pytest.raises(AssertionError):
        art.replay(lambda: programs.lost_update(), found_token())


def test_a_partial_is_known_by_its_function() -> None:
    token = encode(Schedule(0), never_run)

    with pytest.raises(AssertionError, match="the program ran"):
        art.replay(partial(never_run), token)


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_a_token_means_the_same_in_another_process(hash_seed: str) -> None:
    report = art.explore(programs.crossed_locks, schedules=600, seed=3)
    assert report.failure is not None
    script = (
        "import sys, aioreplica.testing as art\n"
        "from tests.testing.programs import crossed_locks\n"
        "report = art.explore(crossed_locks, schedules=600, seed=3)\n"
        "print(report.failure.token, *report.failure.schedule)\n"
        "try:\n    art.replay(crossed_locks, sys.argv[1])\n"
        "except art.DeadlockError as error:\n    print(str(error))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, report.failure.token],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    first, _, rest = result.stdout.partition("\n")
    assert first.split() == [report.failure.token, *map(str, report.failure.schedule)]
    assert rest.strip() == str(report.failure.error).strip()
