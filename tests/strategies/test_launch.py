"""Options of a run: what they take."""

import math
from typing import Any

import numpy as np
import pytest

import aioreplica as ar


@pytest.mark.parametrize("timeout", [None, 1, 0.5, np.float32(2), math.inf])
def test_a_stall_timeout_is_a_positive_number(timeout: Any) -> None:
    assert ar.RunOptions(stall_timeout=timeout).stall_timeout == timeout


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_other_numbers_are_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=f"must be positive seconds or None, got {timeout}"):
        ar.RunOptions(stall_timeout=timeout)


@pytest.mark.parametrize("timeout", ["5", [5], 1j])
def test_a_timeout_that_is_not_a_number_is_refused(timeout: Any) -> None:
    with pytest.raises(TypeError, match="must be seconds as a number or None, got"):
        ar.RunOptions(stall_timeout=timeout)


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_seeds_are_checked(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an int >= 0 or None"):
        ar.RunOptions(seed=seed)
