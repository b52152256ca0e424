"""The kit against programs whose verdict is known: bugs are found, correct programs pass."""

from collections.abc import Callable
from typing import Any

import pytest

import aioreplica.testing as art
from aioreplica.testing._strategies import CYCLES, PCT1, POS, Rotation
from tests.testing import programs

SEEDS = 20
NEVER_END = (programs.polite_pair, programs.spin_on_lost_flag)
QUICK = [program for program in programs.BUGGY if program not in NEVER_END]
ENDLESS = [pytest.param(program, marks=pytest.mark.xslow) for program in NEVER_END]
DEPTH_1_OR_2 = [p for p in programs.BUGGY if p.__name__ not in {"three_way", "polite_pair"}]


def named(program: Callable[[], Any]) -> str:
    return program.__name__


@pytest.mark.parametrize("program", programs.BUGGY, ids=named)
def test_bug_passes_in_asyncios_own_order(program: Callable[[], Any]) -> None:
    art.run(program)


@pytest.mark.parametrize("program", [*QUICK, *ENDLESS], ids=named)
def test_bug_is_found_and_replayed(program: Callable[[], Any]) -> None:
    report = art.explore(program, schedules=600, seed=1)

    assert report.failure is not None
    assert len(report.failure.token) <= 40
    assert 1 <= len(report.failure.constraints) <= 3
    assert report.failure.shrink_runs <= 200
    with pytest.raises(type(report.failure.error)) as again:
        art.replay(program, report.failure.token)
    assert str(again.value) == str(report.failure.error)


@pytest.mark.xslow
@pytest.mark.parametrize("program", programs.BUGGY, ids=named)
def test_bug_is_found_whatever_the_seed(program: Callable[[], Any]) -> None:
    reports = [art.explore(program, schedules=600, seed=seed) for seed in range(SEEDS)]

    assert [report.failed for report in reports] == [True] * SEEDS
    if program in DEPTH_1_OR_2:
        assert sum(report.schedules_run for report in reports) / SEEDS <= 60


@pytest.mark.parametrize("fidelity", ["asyncio", "reorder"])
@pytest.mark.parametrize("program", programs.CORRECT, ids=named)
def test_correct_program_passes(program: Callable[[], Any], fidelity: str) -> None:
    report = art.explore(program, schedules=150, seed=2, fidelity=fidelity)

    report.check()
    assert report.schedules_run == 150


@pytest.mark.xslow
@pytest.mark.parametrize("fidelity", ["asyncio", "reorder"])
@pytest.mark.parametrize("program", programs.CORRECT, ids=named)
def test_correct_program_passes_a_thousand_times(program: Callable[[], Any], fidelity: str) -> None:
    for seed in range(10):
        art.explore(program, schedules=101, seed=seed, fidelity=fidelity).check()


@pytest.mark.slow
@pytest.mark.parametrize("program", programs.BUGGY, ids=named)
def test_exhaustive_finds_every_bug(program: Callable[[], Any]) -> None:
    report = art.exhaustive(program)

    assert report.failed
    assert not report.complete


@pytest.mark.slow
def test_exhaustive_of_a_program_that_spins_ends_and_claims_nothing() -> None:
    report = art.exhaustive(programs.spins_with_patience)

    assert not report.failed
    assert not report.complete
    assert report.schedules_run < 5000


@pytest.mark.parametrize(
    "program",
    [programs.locked_counter, programs.bounded_queue, programs.join_a_queue],
    ids=named,
)
def test_exhaustive_covers_a_small_correct_program(program: Callable[[], Any]) -> None:
    report = art.exhaustive(program, max_preemptions=1)

    assert report.complete
    assert not report.failed


@pytest.mark.parametrize("strategy", ["random", "pct", "pos"])
def test_every_strategy_finds_a_lost_update(strategy: str) -> None:
    report = art.explore(programs.lost_update, schedules=600, strategy=strategy)

    assert isinstance(report.failure and report.failure.error, AssertionError)


@pytest.mark.parametrize("seed", range(3))
def test_pct_finds_a_task_that_is_early_before_a_wait_and_late_after_it(seed: int) -> None:
    report = art.explore(programs.condition_without_loop, schedules=600, seed=seed, strategy="pct")

    assert isinstance(report.failure and report.failure.error, IndexError)


def test_a_strategy_that_only_repeats_itself_gives_way() -> None:
    rotation, made = Rotation("portfolio"), list[int]()
    for number in range(160):
        made.append(rotation.next())
        rotation.ran(made[-1], b"same" if made[-1] == PCT1 else bytes([number]))

    static, others = made.count(PCT1), made.count(POS)
    assert made[: len(CYCLES["portfolio"])] == list(CYCLES["portfolio"])
    assert 0 < static < others / 2


def test_asyncios_order_alone_finds_nothing() -> None:
    report = art.explore(programs.lost_update, schedules=20, strategy="fifo")

    assert not report.failed


def test_asyncio_fidelity_varies_pools_only() -> None:
    tasks = art.explore(programs.lost_update, schedules=200, fidelity="asyncio")
    pools = art.explore(programs.completion_order, schedules=200, fidelity="asyncio")

    assert not tasks.failed
    assert pools.failed
