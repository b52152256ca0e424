"""Divide the state of Adam among workers, and compare with state that is whole on each.

Alone it is one worker, where nothing is divided:

    python examples/sharded_state.py

Two workers on one machine, with Open MPI (pip install "aioreplica[mpi]"):

    mpirun --map-by :OVERSUBSCRIBE -n 2 python -m mpi4py examples/sharded_state.py

Each worker prints how many bytes of state it keeps; the first one also whether both trainings ended
in the same bits, and how long the steps took.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import aioreplica as ar


class Training:
    def __init__(self, width: int, layers: int, *, shard_state: bool) -> None:
        rng = np.random.default_rng(0)
        name = "divided" if shard_state else "whole"
        self.layers = [
            ar.Variable(rng.normal(0, 0.1, (width, width)).astype("float32"), name=f"{name}_{i}")
            for i in range(layers)
        ]
        self.adam = ar.optimizers.Adam(1e-3, shard_state=shard_state)
        self.seconds: list[float] = []

    async def step(self, targets: Sequence[Any]) -> None:  # of half the squared distance
        pairs = [(w.value - goal, w) for w, goal in zip(self.layers, targets, strict=True)]
        await self.adam.apply_gradients(pairs)

    def state_bytes(self) -> int:
        return sum(variable.components[0].nbytes for variable in self.adam.variables)


async def main(width: int, layers: int, steps: int) -> tuple[bool, float]:
    async with ar.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            both = [Training(width, layers, shard_state=each) for each in (False, True)]
        rng = np.random.default_rng(1)
        targets = [rng.standard_normal((width, width)).astype("float32") for _ in range(layers)]
        for _ in range(steps):
            for training in both:  # in turns, so that a busy machine is as busy for both
                began = time.perf_counter()
                await strategy.run(training.step, (targets,))
                training.seconds.append(time.perf_counter() - began)
        whole, divided = both
        print(f"{divided.adam}: {divided.state_bytes():,} of {whole.state_bytes():,} bytes")
        pairs = zip(whole.layers, divided.layers, strict=True)
        are_equal = all(a.value.tobytes() == b.value.tobytes() for a, b in pairs)
        ratio = statistics.median(divided.seconds) / statistics.median(whole.seconds)
        if strategy.extended.should_save_summary:
            print(f"the same bits: {are_equal}; a step takes {ratio:.2f} of one with whole state")
        return are_equal, ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Divide the state of Adam among workers.")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    raise SystemExit(not asyncio.run(main(options.width, options.layers, options.steps))[0])
