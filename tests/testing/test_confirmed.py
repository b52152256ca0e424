"""Failures that come at asyncio's own queue too, and the complete search of that queue."""

import asyncio
import random
import re
import subprocess

import pytest

import aioreplica.testing as art
from aioreplica.testing import _explain, _loop
from aioreplica.testing._report import unread_reports
from tests.testing.programs import step


async def overlapping_awaits() -> None:
    """Lose an update, but only where a task is held although it is ready."""
    count = 0

    async def add(steps: int) -> None:
        nonlocal count
        await step(steps)
        seen = count
        await step()
        count = seen + 1

    await asyncio.gather(add(0), add(4))
    assert count == 2


async def overlapping_calls() -> None:
    """Lose an update, where a call in a pool takes longer than another."""
    count = 0

    async def add(calls: int) -> None:
        nonlocal count
        for _ in range(calls):
            await asyncio.to_thread(int)
        seen = count
        await asyncio.to_thread(int)
        count = seen + 1

    await asyncio.gather(add(0), add(2))
    assert count == 2


# --- the verdict ------------------------------------------------------------------------------


def test_a_failure_that_only_pools_decide_is_confirmed_with_its_token() -> None:
    report = art.explore(overlapping_calls)

    assert report.confirmed is True
    assert report.confirmation_runs > 0
    assert report.confirmed_token != ""
    with pytest.raises(AssertionError, match="assert"):
        art.replay(overlapping_calls, report.confirmed_token)
    assert "Confirmed at fidelity 'asyncio'" in report.verdict
    assert report.confirmed_token in report.verdict


def test_a_failure_that_no_queue_of_asyncio_lets_happen_is_excluded() -> None:
    report = art.explore(overlapping_awaits)

    assert report.confirmed is False
    assert report.confirmation_runs == 1, "there is one schedule: nothing comes from outside"
    assert report.confirmed_token == ""
    assert report.verdict.startswith("Excluded at fidelity 'asyncio': every schedule of it was run")


def test_a_search_that_was_cut_excludes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        others = [asyncio.create_task(asyncio.to_thread(int)) for _ in range(4)]
        await overlapping_awaits()
        await asyncio.gather(*others)

    monkeypatch.setattr(_explain, "CONFIRM", 10)

    report = art.explore(main)

    assert report.failed
    assert report.confirmed is None
    assert (
        report.verdict
        == f"Not found at fidelity 'asyncio' in {report.confirmation_runs} schedules."
    )
    assert report.confirmation_runs == 20, "those of the search, and a sample"


SPIN_STEPS = 200


@pytest.fixture
def short_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loop, "SPIN_STEPS", SPIN_STEPS)


@pytest.mark.slow
@pytest.mark.usefixtures("short_spin")
def test_what_comes_after_a_spin_is_not_complete() -> None:
    async def main() -> None:
        await step(SPIN_STEPS)
        await overlapping_awaits()

    report = art.exhaustive(main)

    assert not report.failed
    assert not report.complete
    [warning] = report.warnings
    assert warning.startswith("1 of 1 schedules took")
    [warning] = art.explore(main, schedules=3).warnings
    assert warning.startswith("3 of 3 schedules took")


@pytest.mark.usefixtures("short_spin")
def test_a_program_that_spins_alone_is_complete() -> None:
    report = art.exhaustive(lambda: step(2 * SPIN_STEPS), fidelity="asyncio")

    assert report.complete
    assert report.warnings == ()


@pytest.mark.usefixtures("short_spin")
def test_where_not_all_orders_were_run_for_a_spin_nothing_is_excluded() -> None:
    async def main() -> None:
        await overlapping_awaits()
        await step(SPIN_STEPS)
        await asyncio.gather(step(), asyncio.to_thread(int))

    report = art.explore(main)

    assert report.failed
    assert report.confirmed is None
    assert report.warnings == ()


def test_another_failure_at_that_fidelity_confirms_nothing() -> None:
    async def main() -> None:
        order: list[str] = []

        async def call(name: str) -> None:
            await asyncio.to_thread(int)
            order.append(name)

        both = asyncio.gather(call("a"), call("b"))
        await overlapping_awaits()
        await both
        if order == ["b", "a"]:
            raise KeyError("the calls came in another order")

    reports = (art.explore(main, seed=seed) for seed in range(30))
    failed = (each for each in reports if each.failure is not None)
    report = next(each for each in failed if type(each.failure.error) is AssertionError)  # type: ignore[union-attr]

    assert not report.confirmed


def test_what_was_found_at_that_fidelity_is_confirmed_as_it_is() -> None:
    report = art.explore(overlapping_calls, fidelity="asyncio")

    assert report.failure is not None
    assert report.confirmed is True
    assert report.confirmed_token == report.failure.token
    assert report.confirmation_runs == 0


def test_without_a_failure_there_is_no_verdict() -> None:
    report = art.explore(lambda: step(2), schedules=3)

    assert report.confirmed is None
    assert report.verdict == ""


def test_runs_that_differ_are_not_tried() -> None:
    numbers = iter(range(1000))

    async def main() -> None:
        if next(numbers) % 2:
            await step()

    report = art.explore(main, schedules=3)

    assert report.failure is not None
    assert isinstance(report.failure.error, art.NondeterminismError)
    assert (report.confirmed, report.confirmation_runs, report.verdict) == (None, 0, "")


def test_what_is_not_simulated_is_not_called_confirmed() -> None:
    async def main() -> None:
        await asyncio.to_thread(subprocess.run, ["true"], check=True)

    for fidelity in ("reorder", "asyncio"):
        report = art.explore(main, schedules=3, fidelity=fidelity)
        assert report.failure is not None
        assert isinstance(report.failure.error, art.RealIOError)
        assert (report.confirmed, report.verdict) == (None, "")


def test_a_cancellation_in_asyncios_own_order_is_confirmed() -> None:
    async def main() -> None:
        left = asyncio.create_task(step(20))
        await step(2)
        left.cancel()

    report = art.cancel_everywhere(main)

    assert report.failed
    assert report.confirmed is True
    with pytest.raises(art.LeakError):
        art.replay(main, report.confirmed_token)


def test_faults_are_tried_too() -> None:
    async def main() -> None:
        await asyncio.gather(asyncio.to_thread(int), asyncio.to_thread(str))

    report = art.explore(main, faults=art.Faults().fail_op("default pool"))

    assert report.failure is not None
    assert report.confirmed is True
    with pytest.raises(type(report.failure.error)):
        art.replay(main, report.confirmed_token)


def test_the_verdict_is_a_line_of_the_error_and_of_the_warning() -> None:
    with pytest.raises(AssertionError) as caught:
        art.explore(overlapping_awaits).check()
    assert any("Excluded at fidelity 'asyncio'" in note for note in caught.value.__notes__)
    before = list(unread_reports())
    report = art.explore(overlapping_awaits)
    [unread] = [each for each in unread_reports() if each not in before]
    unread.read()
    assert report.verdict in unread.text


# --- the search -------------------------------------------------------------------------------


def test_every_moment_of_every_event_is_searched() -> None:
    orders = set[tuple[int, ...]]()

    async def main() -> None:
        order: list[int] = []

        async def call(number: int) -> None:
            await asyncio.to_thread(int)
            order.append(number)

        await asyncio.gather(*map(call, range(3)))
        orders.add(tuple(order))

    assert art.exhaustive(main, fidelity="asyncio").complete
    assert len(orders) == 6


@pytest.mark.parametrize("seed", range(6))
def test_a_sample_of_the_fidelity_shows_nothing_that_the_search_has_not(seed: int) -> None:
    shown = set[tuple[str, ...]]()

    async def main() -> None:
        draw = random.Random(seed)
        order: list[str] = []

        async def work(name: str, actions: list[str]) -> None:
            for number, action in enumerate(actions):
                if action == "call":
                    await asyncio.to_thread(int)
                elif action == "sleep":
                    await asyncio.sleep(0.1)
                else:
                    await step()
                order.append(f"{name}{number}")

        plans = [draw.choices(["call", "sleep", "step"], k=2) for _ in range(2)]
        await asyncio.gather(*(work(name, plan) for name, plan in zip("ab", plans, strict=True)))
        shown.add(tuple(order))

    report = art.exhaustive(main, fidelity="asyncio")
    assert report.complete
    searched = set(shown)

    art.explore(main, fidelity="asyncio", strategy="random", schedules=400, seed=seed).check()

    assert shown == searched


def test_the_search_of_the_queue_takes_no_sample_and_the_other_names_it() -> None:
    async def main() -> None:
        await asyncio.gather(step(), step())

    assert art.exhaustive(main, fidelity="asyncio").cross_checked == 0
    assert art.exhaustive(main).cross_checked == 599
    assert art.exhaustive(main, fidelity="asyncio").fidelity == "asyncio"


@pytest.mark.parametrize("fidelity", ["adversarial", "real", None])
def test_other_fidelities_cannot_be_searched(fidelity: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(fidelity))):
        art.exhaustive(lambda: step(), fidelity=fidelity)
