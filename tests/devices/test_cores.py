"""Cores: how many there are; the BLAS budget, divided over the CPU lanes and restored after."""

import os
from collections.abc import Callable

import numpy as np  # its BLAS is what is measured
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from aioreplica.devices._cores import BlasBudget, num_cores

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
has_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system places threads by itself"
)


@has_affinity
def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})

    assert num_cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_systems_that_do_not_say_have_the_cores_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)

    assert num_cores() == expected


def blas_threads() -> list[int]:
    assert np.ones(2) @ np.ones(2) == 2.0
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.mark.parametrize("num_lanes", [1, 2, 8, 1000])
def test_lanes_share_the_cores(num_lanes: int) -> None:
    budget, before = BlasBudget(), blas_threads()

    budget.set_num_lanes(num_lanes)
    during = blas_threads()
    budget.set_num_lanes(0)

    assert during == [max(1, NUM_CORES // num_lanes)] * len(before)
    assert blas_threads() == before


def test_the_budget_follows_the_number_of_lanes() -> None:
    budget, before = BlasBudget(), blas_threads()
    seen = []

    for num_lanes in (1, 2, 3, 2, 1, 1):
        budget.set_num_lanes(num_lanes)
        seen.append((budget.threads_per_lane, blas_threads()))
    budget.set_num_lanes(0)

    assert all(threads == [per_lane] * len(before) for per_lane, threads in seen)
    assert blas_threads() == before
    assert budget.threads_per_lane is None


@pytest.mark.parametrize(("setting", "expected"), [(None, None), (1, 1), (3, 3)])
def test_a_number_is_taken_as_it_is_and_none_leaves_blas_alone(
    setting: int | None, expected: int | None
) -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        budget, before = BlasBudget(setting), blas_threads()
        budget.set_num_lanes(2)
        during = blas_threads()
        assert budget.threads_per_lane == expected
        budget.set_num_lanes(0)

        assert blas_threads() == before
    assert during == ([expected] * len(before) if expected else before)


def test_a_limit_set_by_the_user_comes_back_and_is_not_raised() -> None:
    budget = BlasBudget()
    with threadpool_limits(limits=1, user_api="blas"):
        budget.set_num_lanes(1)
        during = blas_threads()
        budget.set_num_lanes(0)

        assert set(blas_threads()) == {1}
    assert set(during) == {1}


@pytest.mark.slow
def test_strategies_are_counted_and_the_last_one_restores(
    run_script: Callable[[str], str],
) -> None:
    output = run_script("""
        import asyncio, os
        import numpy as np
        from threadpoolctl import threadpool_info
        import aioreplica as ar

        ar.set_logical_devices("cpu", 4)
        cores = len(os.sched_getaffinity(0))

        def threads():
            return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

        def is_shared_by(lanes):
            return threads() <= {max(1, cores // lanes)}

        async def main():
            before = threads()
            one = ar.MirroredStrategy(["cpu:0", "cpu:1"])
            two = ar.MirroredStrategy(["cpu:1", "cpu:2"])
            async with one:
                print(is_shared_by(2))
                async with two:
                    print(is_shared_by(3))
                print(is_shared_by(2))
            print(threads() == before)

        asyncio.run(main())
    """)

    assert output == "True\n" * 4
