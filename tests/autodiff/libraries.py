"""The libraries that differentiate, each as the few functions that the tests need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Library:
    name: str
    array: Callable[[Any], Any]
    sin: Callable[[Any], Any]
    sum: Callable[[Any], Any]
    concatenate: Callable[[Any], Any]
    rtol: float = 1e-12


def library(name: str) -> Library:
    if name == "torch":
        torch = pytest.importorskip("torch")
        return Library(name, torch.tensor, torch.sin, torch.sum, torch.cat)
    if name == "jax":
        jax = pytest.importorskip("jax")
        jnp = jax.numpy
        # 32 bits, as jax is set unless a program says otherwise
        return Library(name, jnp.asarray, jnp.sin, jnp.sum, jnp.concatenate, rtol=2e-4)
    anp = pytest.importorskip("autograd.numpy")
    return Library(name, np.asarray, anp.sin, anp.sum, anp.concatenate)


NAMES = ["autograd", "torch", pytest.param("jax", marks=pytest.mark.slow)]  # jax compiles each op
