"""Tokens: short, checked before anything runs, and the same schedule in every process."""

import asyncio
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from binascii import crc32
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import aioreplica.testing as art
from aioreplica.testing import Schedule, _explain
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
    Schedule(FIFO, 7, max_steps=2000),
    Schedule(CHOICES, 7, choices=((0, 1),), max_steps=2000),
    Schedule(CANCELLED, 7, cancel_step=1234, max_steps=2000),
    Schedule(HELD, 7, holds=(Hold((2, 0), 1, (2, 1), 3),), max_steps=2000),
]
FAULTS = art.Faults().fail_op("cpu:1", error=OSError, at=2)


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


@pytest.mark.parametrize(
    "schedule", [each for each in SCHEDULES if each.seed != LARGEST or each.maker == FIFO], ids=str
)
def test_every_kind_of_token_keeps_its_faults(schedule: Schedule) -> None:
    faulty = replace(schedule, faults=FAULTS)
    read = decode(encode(faulty, never_run), never_run)

    assert replace(read, faults=None) == schedule
    assert read.faults is not None
    assert encode(read, never_run) == encode(faulty, never_run) != encode(schedule, never_run)


def test_a_token_without_faults_takes_those_that_are_passed() -> None:
    before_faults_were_written = encode(SCHEDULES[-1], never_run)

    assert decode(before_faults_were_written, never_run).faults is None
    assert decode(before_faults_were_written, never_run, FAULTS).faults is FAULTS


def test_other_faults_than_those_of_the_token_are_refused() -> None:
    token = encode(Schedule(FIFO, 7, faults=FAULTS), never_run)

    assert decode(token, never_run, FAULTS).faults is not None
    with pytest.raises(ValueError, match="has its own faults"):
        art.replay(never_run, token, faults=art.Faults().fail_op("cpu:2", error=OSError, at=2))


async def order_after_a_fault() -> None:
    """Fail with another text in nearly every order, but only after a fault."""
    log: list[str] = []

    async def call(name: str) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, str)
        except OSError:
            log.append(name)

    async def note(name: str, rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        log.append(name)

    await asyncio.gather(call("a"), note("b", 2), note("c", 3), note("d", 1), call("e"))
    if "a" in log and log.index("c") < log.index("b"):
        raise ValueError(f"order {log}")


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_token_of_constraints_and_faults_fails_as_it_was_told(seed: int) -> None:
    faults = art.Faults().fail_op(error=OSError)
    report = art.explore(order_after_a_fault, schedules=300, seed=seed, faults=faults)
    assert report.failure is not None

    with pytest.raises(ValueError, match="order") as raised:
        art.replay(order_after_a_fault, report.failure.token)
    assert str(raised.value) == str(report.failure.error)


def test_a_token_whose_text_does_not_fail_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if constraints were written without something that the failure needs."""
    monkeypatch.setattr("aioreplica.testing._token._hold_numbers", lambda hold: (1, 9, 9, 1, 9, 9))
    faults = art.Faults().fail_op(error=OSError)
    report = art.explore(order_after_a_fault, schedules=300, faults=faults)
    assert report.failure is not None

    with pytest.raises(ValueError, match="order"):
        art.replay(order_after_a_fault, report.failure.token)


def test_too_many_choices_do_not_fit() -> None:
    with pytest.raises(TokenTooLongError):
        encode(Schedule(CHOICES, choices=tuple((i, 1) for i in range(40))), never_run)


async def takes_3000_steps() -> None:
    await programs.step(3_000)


@pytest.mark.parametrize("max_steps", [1_000, 2_900])
def test_a_token_of_an_endless_schedule_knows_when_it_is_endless(max_steps: int) -> None:
    report = art.explore(takes_3000_steps, max_steps=max_steps)
    assert report.failure is not None

    with pytest.raises(art.StarvationError):
        art.replay(takes_3000_steps, report.failure.token)


@pytest.mark.slow
def test_constraints_that_only_let_an_endless_program_end_later_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds_nobody = Hold((9, 9), 0, (9, 9), 0)
    monkeypatch.setattr(_explain, "shrink", lambda trace, fails: ((holds_nobody,), 1))
    report = art.explore(programs.spin_on_lost_flag, schedules=600)

    assert report.failure is not None
    assert report.failure.constraints == ()
    with pytest.raises(art.StarvationError):
        art.replay(programs.spin_on_lost_flag, report.failure.token)


@pytest.mark.parametrize("at", range(4, 20))
def test_every_damaged_character_is_noticed(at: int) -> None:
    token = encode(Schedule(1, LARGEST, 8), never_run)
    damaged = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]

    with pytest.raises(ValueError, match="not a schedule token, or it is damaged"):
        art.replay(never_run, damaged)


@pytest.mark.parametrize("text", ["", "ar1-", "simloom:1:2", "ar1-####", "ar1-" + "A" * 60])
def test_text_that_is_not_a_token_is_refused(text: str) -> None:
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
