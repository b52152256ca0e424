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


@final
class Backprop:
    """Differentiates the sum of the cross entropies, by hand, in memory of its own.

    The gradients it returns hold until the next call.
    """

    def __init__(self, batch_size: int) -> None:
        self._layers = [np.empty((batch_size, size), np.float32) for size in SIZES[1:]]
        self._slopes = [np.empty_like(layer) for layer in self._layers[:-1]]
        self._active = [np.empty(layer.shape, bool) for layer in self._layers[:-1]]
        self._gradients = [np.empty_like(array) for array in initial_parameters()]

    def __call__(self, parameters: list[Any], images: Array, labels: Any) -> list[Array]:
        weights, biases = parameters[::2], parameters[1::2]
        first, second, scores = self._layers
        inputs = [images, first, second]
        for before, after, weight, bias in zip(inputs, self._layers, weights, biases, strict=True):
            np.matmul(before, weight, out=after)
            np.add(after, bias, out=after)
            if after is not scores:
                np.maximum(after, 0, out=after)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        scores[np.arange(len(labels)), labels] -= 1
        slopes = [*self._slopes, scores]
        for index in (1, 0):
            np.matmul(slopes[index + 1], weights[index + 1].T, out=slopes[index])
            np.greater(inputs[index + 1], 0, out=self._active[index])
            np.multiply(slopes[index], self._active[index], out=slopes[index])
        for index, (before, slope) in enumerate(zip(inputs, slopes, strict=True)):
            np.matmul(before.T, slope, out=self._gradients[2 * index])
            np.sum(slope, axis=0, out=self._gradients[2 * index + 1])
        return self._gradients


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
