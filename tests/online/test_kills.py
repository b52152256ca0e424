"""SIGKILL under load, on a real disk: nothing acknowledged is lost or learned twice."""

import pytest

from .kills import kill


@pytest.mark.xslow
def test_ten_kills_lose_and_double_nothing() -> None:
    kills = kill(10)
    assert kills.is_good, kills
    assert kills.acknowledged > 100


@pytest.mark.xslow
def test_ten_kills_of_labels_and_sources_lose_and_double_nothing() -> None:
    kills = kill(10, joins=True)
    assert kills.is_good, kills
    assert kills.acknowledged > 50


@pytest.mark.xslow
def test_ten_kills_while_it_rolls_back_lose_and_double_nothing() -> None:
    kills = kill(10, rolls_back=True)
    assert kills.is_good, kills
    assert kills.num_left_out > 0
