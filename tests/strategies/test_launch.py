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


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, np.int64(-1), np.ones(2, int)])
def test_seeds_are_checked(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an int >= 0 or None"):
        ar.RunOptions(seed=seed)


@pytest.mark.asyncio
async def test_integers_of_numpy_are_numbers_too(pair: ar.MirroredStrategy) -> None:
    three = np.random.default_rng(0).integers(3, 4)

    options = ar.RunOptions(seed=three, send_bound=three)

    assert options == ar.RunOptions(seed=3, send_bound=3)
    assert {type(options.seed), type(options.send_bound)} == {int}
    with pair.scope():
        variable = ar.Variable(1.0)
    assert await pair.wait_for_version(variable, np.int64(0)) == 0
    resolver = ar.TPUClusterResolver(three, three)
    assert resolver == ar.TPUClusterResolver(3, 3)
    assert repr(resolver) == "TPUClusterResolver(num_hosts=3, cores_per_host=3)"
    assert ar.TPUStrategy(num_cores=three).num_replicas_in_sync == 3
