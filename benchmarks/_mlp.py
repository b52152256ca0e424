"""A small network in plain NumPy: the work that the training benchmark shares out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
SIZES = (784, 512, 512, 10)


def initial_parameters() -> list[Array]:
    """Return weights and biases, layer by layer."""
    rng = np.random.default_rng(0)
    parameters = []
    for fan_in, fan_out in pairwise(SIZES):
        weights = rng.normal(0, fan_in**-0.5, (fan_in, fan_out))
        parameters += [weights.astype(np.float32), np.zeros(fan_out, np.float32)]
    return parameters


def made_up_batch(size: int) -> tuple[Array, Any]:
    """Return images and labels."""
    rng = np.random.default_rng(1)
    return rng.random((size, SIZES[0]), np.float32), rng.integers(0, SIZES[-1], size)


def gradients(parameters: list[Any], images: Array, labels: Any) -> list[Array]:
    """Differentiate the sum of the cross entropies, by hand."""
    w1, b1, w2, b2, w3, b3 = parameters
    first = np.maximum(images @ w1 + b1, 0)
    second = np.maximum(first @ w2 + b2, 0)
    scores = second @ w3 + b3
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(len(labels)), labels] -= 1
    d_second = (scores @ w3.T) * (second > 0)
    d_first = (d_second @ w2.T) * (first > 0)
    return [
        images.T @ d_first, d_first.sum(axis=0), first.T @ d_second, d_second.sum(axis=0),
        second.T @ scores, scores.sum(axis=0),
    ]  # fmt: skip


@final
class SequentialSGD:
    """Gradient descent on arrays, in place: nothing is allocated after the first step."""

    def __init__(self, parameters: list[Array]) -> None:
        self.parameters = [array.copy() for array in parameters]
        self._scratch = [np.empty_like(array) for array in parameters]

    def apply(self, grads: list[Array], weight: float) -> None:
        """Take a step along the mean gradient."""
        for value, gradient, scratch in zip(self.parameters, grads, self._scratch, strict=True):
            np.divide(gradient, weight, out=scratch)
            np.multiply(scratch, 0.01, out=scratch)
            np.subtract(value, scratch, out=value)


@final
class SequentialAdam:
    """Adam on arrays, in place, with as few passes as we know how."""

    def __init__(self, parameters: list[Array]) -> None:
        self.parameters = [array.copy() for array in parameters]
        self._means = [np.zeros_like(array) for array in parameters]
        self._squares = [np.zeros_like(array) for array in parameters]
        self._scratch = [np.empty_like(array) for array in parameters]
        self._mean_gradient = [np.empty_like(array) for array in parameters]
        self._step = 0

    def apply(self, grads: list[Array], weight: float) -> None:
        """Take a step along the mean gradient."""
        self._step += 1
        root = (1 - 0.999**self._step) ** 0.5
        size, epsilon = 0.001 * root / (1 - 0.9**self._step), 1e-8 * root
        columns = (
            self.parameters, grads, self._means, self._squares, self._scratch, self._mean_gradient
        )  # fmt: skip
        for value, summed, m, v, scratch, gradient in zip(*columns, strict=True):
            np.divide(summed, weight, out=gradient)
            np.subtract(gradient, m, out=scratch)
            np.multiply(scratch, 0.1, out=scratch)
            np.add(m, scratch, out=m)
            np.multiply(gradient, gradient, out=scratch)
            np.subtract(scratch, v, out=scratch)
            np.multiply(scratch, 0.001, out=scratch)
            np.add(v, scratch, out=v)
            np.sqrt(v, out=scratch)
            np.add(scratch, epsilon, out=scratch)
            np.divide(m, scratch, out=scratch)
            np.multiply(scratch, size, out=scratch)
            np.subtract(value, scratch, out=value)


SEQUENTIAL = {"SGD": SequentialSGD, "Adam": SequentialAdam}
