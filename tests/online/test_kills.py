"""SIGKILL under load, on a real disk: nothing acknowledged is lost or learned twice."""

import pytest

from .kills import Wanted, kill


@pytest.mark.xslow
def test_ten_kills_lose_and_double_nothing() -> None:
    kills = kill(10)
    assert kills.is_good, kills
    assert kills.acknowledged > 100


@pytest.mark.xslow
def test_ten_kills_of_labels_and_sources_lose_and_double_nothing() -> None:
    kills = kill(10, wanted=Wanted(joins=True))
    assert kills.is_good, kills
    assert kills.acknowledged > 50


@pytest.mark.xslow
def test_ten_kills_while_it_rolls_back_lose_and_double_nothing() -> None:
    kills = kill(10, wanted=Wanted(rolls_back=True))
    assert kills.is_good, kills
    assert kills.num_left_out > 0


@pytest.mark.xslow
def test_ten_kills_with_everything_at_once_lose_and_double_nothing() -> None:
    """Rollbacks, promotions, labels and offsets of files, with two models, and three upgrades."""
    kills = kill(10, wanted=Wanted(rolls_back=True, joins=True, promotes=True, num_upgrades=3))
    assert kills.is_good, kills
    assert kills.num_left_out > 0
    assert kills.num_promoted > 0
