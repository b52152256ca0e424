"""The portfolio against a random walk, on bugs of depth 1 to 5 among 2 to 8 tasks."""

import pytest

import aioreplica.testing as art
from tests.testing.depths import DEPTHS, TASKS, planted_bug

SCHEDULES = 1000


def search(depth: int, tasks: int, strategy: str, num_programs: int) -> tuple[int, int]:
    """Return how many planted bugs were found, and in how many schedules."""
    reports = [
        art.explore(
            planted_bug(depth, tasks, seed), schedules=SCHEDULES, seed=seed, strategy=strategy
        )
        for seed in range(num_programs)
    ]
    return sum(each.failed for each in reports), sum(each.schedules_run for each in reports)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("tasks", TASKS)
def test_a_planted_bug_takes_another_order_than_asyncios(depth: int, tasks: int) -> None:
    art.run(planted_bug(depth, tasks, 0))


@pytest.mark.xslow
def test_shallow_bugs_are_found_sooner_than_by_a_random_walk() -> None:
    cells = [(depth, tasks) for depth in (1, 2) for tasks in (3, 5, 8)]
    found, schedules = map(
        sum, zip(*(search(*each, "portfolio", 3) for each in cells), strict=True)
    )
    others, longer = map(sum, zip(*(search(*each, "random", 3) for each in cells), strict=True))

    assert found == 3 * len(cells) >= others
    assert schedules < longer


@pytest.mark.xslow
def test_bugs_of_all_depths_are_found_as_often_as_by_a_random_walk() -> None:
    cells = [(depth, tasks) for depth in DEPTHS for tasks in TASKS]
    found = sum(search(*each, "portfolio", 4)[0] for each in cells)
    others = sum(search(*each, "random", 4)[0] for each in cells)
    print(found, others)

    assert found >= 0.98 * others  # the same but for chance
