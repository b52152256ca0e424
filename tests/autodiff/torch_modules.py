"""Modules of torch that the tests of them share, and their gradients by torch itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def seeded(make: Callable[[], Any]) -> Any:
    """Return a module that is the same in every test."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def mlp() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))


def gradients_of(module: Any, x: Any, fn: Callable[[Any], Any] = torch.sum) -> list[Any]:
    module.zero_grad()
    fn(module(torch.tensor(x))).backward()
    return [p.grad.numpy().copy() for p in module.parameters() if p.requires_grad]


def assert_all_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
