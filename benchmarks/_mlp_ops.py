"""A small network in plain NumPy, cut into ops: 64 inputs, 32 hidden units, 10 classes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

import aioreplica as ar

Array = npt.NDArray[np.float32]
Params = list[Array]

BATCH_SIZE = 32
SIZES = (64, 32, 10)
RATE = np.float32(0.05)


def new_params() -> Params:
    """Return the weights to begin with, the same every time."""
    rng = np.random.default_rng(0)
    params: Params = []
    for inputs, outputs in pairwise(SIZES):
        scale = np.float32(np.sqrt(2 / inputs))
        params.append(rng.standard_normal((inputs, outputs), np.float32) * scale)
        params.append(np.zeros(outputs, np.float32))
    return params


def new_batches(num_replicas: int, count: int) -> list[Any]:
    """Return global batches: pairs of images and one-hot labels, one of each per replica."""
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(count):
        images = [
            rng.standard_normal((BATCH_SIZE, SIZES[0]), np.float32) for _ in range(num_replicas)
        ]
        labels = [
            np.eye(SIZES[-1], dtype=np.float32)[rng.integers(0, SIZES[-1], BATCH_SIZE)]
            for _ in range(num_replicas)
        ]
        batches.append((ar.PerReplica(images), ar.PerReplica(labels)))
    return batches


def hidden_layer(params: Params, images: Array) -> Array:
    """Return the activations of the hidden units."""
    hidden = images @ params[0]
    hidden += params[1]
    return np.maximum(hidden, 0, out=hidden)


def output_layer(params: Params, hidden: Array) -> Array:
    """Return the logits."""
    logits: Array = hidden @ params[2]
    logits += params[3]
    return logits


def loss_gradient(logits: Array, labels: Array) -> Array:
    """Return the gradient of the mean cross entropy with respect to the logits."""
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    logits -= labels
    logits *= np.float32(1 / BATCH_SIZE)
    return logits


def output_gradients(hidden: Array, errors: Array) -> Params:
    """Return the gradients of the output layer."""
    return [hidden.T @ errors, errors.sum(axis=0)]


def hidden_gradients(params: Params, images: Array, hidden: Array, errors: Array) -> Params:
    """Return the gradients of the hidden layer."""
    back = errors @ params[2].T
    back *= hidden > 0
    return [images.T @ back, back.sum(axis=0)]


def descend(params: Params, gradients: Params) -> None:
    """Change the weights of one replica in place."""
    for param, gradient in zip(params, gradients, strict=True):
        np.subtract(param, RATE * gradient, out=param)


def gradients_of(params: Params, images: Array, labels: Array) -> Params:
    """Do all ops before the reduction, one after the other."""
    hidden = hidden_layer(params, images)
    errors = loss_gradient(output_layer(params, hidden), labels)
    top = output_gradients(hidden, errors)
    return [*hidden_gradients(params, images, hidden, errors), *top]
