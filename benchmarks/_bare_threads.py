"""Training with bare threads: what a program without any library makes of the same cores."""

from __future__ import annotations

import threading
from typing import Any, final

import numpy as np

from ._mlp import SEQUENTIAL, Backprop, initial_parameters, made_up_batch


@final
class BareUpdate:
    """What an optimizer has to do at least: sum arrays, update arrays, in place."""

    def __init__(self, name: str, num_parts: int) -> None:
        self._sequential = SEQUENTIAL[name](initial_parameters())
        self._sums = [np.empty_like(array) for array in initial_parameters()]
        self._num_parts = num_parts

    @property
    def parameters(self) -> list[Any]:
        """The arrays that are updated."""
        return self._sequential.parameters

    def apply(self, parts: list[list[Any]], weight: float = 256.0) -> None:
        """Take a step along the mean of the gradients that the parts add up to."""
        found = parts[0]
        if self._num_parts > 1:
            for total, first, second, *others in zip(self._sums, *parts, strict=True):
                np.add(first, second, out=total)
                for other in others:
                    np.add(total, other, out=total)
            found = self._sums
        self._sequential.apply(found, weight)


@final
class BareThreads:
    """Differentiates parts of a batch on threads that meet at a barrier; the first one updates.

    Nothing is checked, nothing can be cancelled, and readers see half a step.
    """

    def __init__(self, name: str, num_threads: int, batch_size: int) -> None:
        images, labels = made_up_batch(batch_size)
        self._images = np.array_split(images, num_threads)
        self._labels = np.array_split(labels, num_threads)
        self._backprops = [Backprop(len(part)) for part in self._images]
        self._update = BareUpdate(name, num_threads)
        self._barrier = threading.Barrier(num_threads)
        self._batch_size = batch_size

    @property
    def parameters(self) -> list[Any]:
        """The arrays that are trained."""
        return self._update.parameters

    def run(self, num_steps: int) -> None:
        """Take some steps."""
        found: list[Any] = [None] * len(self._backprops)
        others = [
            threading.Thread(target=self._work, args=(index, num_steps, found))
            for index in range(1, len(found))
        ]
        for thread in others:
            thread.start()
        self._work(0, num_steps, found)
        for thread in others:
            thread.join()

    def _work(self, index: int, num_steps: int, found: list[Any]) -> None:
        for _ in range(num_steps):
            found[index] = self._backprops[index](
                self._update.parameters, self._images[index], self._labels[index]
            )
            self._barrier.wait()
            if index == 0:
                self._update.apply(found, self._batch_size)
            self._barrier.wait()
