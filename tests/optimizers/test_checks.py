"""Hyperparameters: numbers in range, learning rates that are numbers or functions."""

from typing import Any

import numpy as np
import pytest

from aioreplica.optimizers._checks import (
    checked_learning_rate,
    checked_number,
    learning_rate_at,
)


def test_numbers_of_every_kind_become_floats() -> None:
    for value in (1, 1.0, np.float32(1.0), np.int64(1), np.array(1.0)):
        number = checked_number("beta", value, "> 0", lambda number: number > 0)
        assert type(number) is float
        assert number == 1.0


@pytest.mark.parametrize("value", [None, "fast", [1.0, 2.0], 1j])
def test_a_value_that_is_not_a_number_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        checked_learning_rate(value)


def test_the_error_says_what_would_be_legal() -> None:
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 3\."):
        checked_number("beta", 3, "in [0, 1)", lambda number: number < 1)


def test_a_function_is_asked_for_each_iteration() -> None:
    assert learning_rate_at(0.5, 10) == 0.5
    assert learning_rate_at(lambda iteration: iteration / 10, 5) == 0.5
    with pytest.raises(ValueError, match=r"learning_rate.*-1"):
        learning_rate_at(lambda iteration: -iteration, 1)
