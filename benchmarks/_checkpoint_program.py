"""A training program that is killed: `python -m benchmarks._checkpoint_program DIRECTORY`.

It goes on from the newest checkpoint, saves in the background after each step, and prints a line
for each save that is durable, at last a digest of everything that is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage
from aioreplica.errors import CheckpointError

FAULTY = 0.02
"""So many calls of all that read fail."""
NUM_STEPS = 20
BATCH = 8
DONE = "done"
"""Printed by a training that can be stopped, once it has done and saved all its steps."""


def build(strategy: ar.Strategy, size: int) -> dict[str, Any]:
    """Make everything that is trained, at its start."""
    with strategy.scope():
        state: dict[str, Any] = {
            "model": [ar.Variable(np.linspace(-1.0, 1.0, size)), ar.Variable(0.5)],
            "adam": ar.optimizers.Adam(
                0.05, loss_scale=ar.optimizers.DynamicLossScale(growth_interval=3)
            ),
            "loss": ar.metrics.Mean(),
            "history": [],
            "rng": np.random.default_rng(9),
        }
    examples = np.random.default_rng(1).normal(size=64)
    state["data"] = strategy.distribute_dataset(
        ar.ArrayDataset(examples, BATCH, shuffle=True, seed=4)
    )
    return state


def gradients(state: dict[str, Any], batch: Any, noise: float) -> list[tuple[Any, ar.Variable]]:
    w, b = state["model"]
    error = w.value * batch.mean() + b.value + noise
    return [(error * batch.mean(), w), (error.mean(), b)]


async def async_step(state: dict[str, Any], batch: Any) -> None:
    context = ar.get_replica_context()
    assert context is not None
    noise = context.rng("noise").normal()
    pairs = gradients(state, batch, noise)
    await state["adam"].apply_gradients(pairs)
    state["loss"].update_state(pairs[1][0])


def device_step(ctx: ar.MultiStepContext, batch: Any, *, state: dict[str, Any]) -> None:
    context = ar.get_replica_context()
    assert context is not None
    pairs = gradients(state, batch, context.rng("noise").normal())
    state["adam"].blocking.apply_gradients(pairs)
    state["loss"].update_state(pairs[1][0])


async def steps(strategy: ar.Strategy, state: dict[str, Any], *, is_looped: bool) -> Any:
    """Yield after each step, over as many epochs as are asked for."""
    data = state["data"]
    while True:
        if is_looped:
            batches = aiter(data)

            def step(ctx: ar.MultiStepContext, batch: Any) -> None:
                device_step(ctx, batch, state=state)

            while (await strategy.run_steps(step, batches, 1)).steps_run:
                yield
        else:
            async for batch in data:
                await strategy.run(async_step, args=(state, batch))
                yield


def digest(strategy: ar.Strategy, state: dict[str, Any]) -> str:
    """Return a checksum of every bit that training has made."""
    made = hashlib.sha256()
    for variable in (*state["model"], *state["adam"].variables, *state["loss"].variables):
        for part in strategy.local_results(variable):
            made.update(np.ascontiguousarray(part).tobytes())
    made.update(repr((state["history"], state["data"].state_dict())).encode())
    return made.hexdigest()


async def train(
    directory: str, num_steps: int, size: int, *, is_looped: bool, kill_at: int | None
) -> str:
    """Train from the newest checkpoint on; return the digest."""
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(directory) as manager,
    ):
        state = build(strategy, size)
        done = await manager.restore(state) if manager.latest() is not None else 0
        async with state["data"]:
            if done < num_steps:
                async for _ in steps(strategy, state, is_looped=is_looped):
                    done += 1
                    state["history"].append(float(state["rng"].random()))
                    await manager.save(done, state, wait=False)
                    if kill_at is not None:
                        await manager.wait()
                        print(f"saved {done}", flush=True)
                    if done == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if done == num_steps:
                        break
            return digest(strategy, state)


async def train_until_told(directory: str) -> None:
    """Train until SIGTERM; save then, and only then."""
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(directory) as manager,
    ):
        state = build(strategy, 100)

        async def work() -> None:
            async for _ in steps(strategy, state, is_looped=False):
                state["history"].append(1.0)
                if len(state["history"]) == 1:
                    print("training", flush=True)

        def number() -> int:
            return int(state["adam"].iterations.value)

        async with state["data"]:
            await manager.save_on_cancel(work(), state, number, exit_on_sigterm=True)


class FaultyReads:
    """The functions of `os` for checkpoints; reading and opening fail now and then."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def __getattr__(self, name: str) -> Any:
        if name in {"open", "preadv", "listdir"} and self._rng.random() < FAULTY:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return getattr(os, name)


async def train_and_stop(
    directory: str, num_steps: int, size: int, *, faults: int | None, max_to_keep: int | None
) -> None:
    """Train from the newest checkpoint on until done or told to stop; every step is saved.

    All but the last one in the background.
    """
    storage = LocalStorage(directory, calls=os if faults is None else FaultyReads(faults))

    def retry(_error: OSError, num_tries: int, _seconds: float) -> float | None:
        return 0.002 if num_tries < 50 else None

    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(storage, retry=retry, max_to_keep=max_to_keep) as manager,
    ):
        state = build(strategy, size)
        if LocalStorage(directory).list(""):
            with suppress_nothing_there():
                await manager.restore(state)

        async def step(batch: Any) -> None:
            await async_step(state, batch)
            context = ar.get_replica_context()
            assert context is not None
            if context.replica_id_in_sync_group == 0:  # so that no checkpoint is without it
                state["history"].append(float(state["rng"].random()))

        async def work() -> None:
            print("training", flush=True)
            while len(state["history"]) < num_steps:
                async for batch in state["data"]:
                    await strategy.run(step, args=(batch,))
                    if len(state["history"]) >= num_steps:
                        break
                    await manager.save(len(state["history"]), state, wait=False)
            await manager.save(len(state["history"]), state)

        def number() -> int:
            return len(state["history"])

        async with state["data"]:
            await manager.save_on_cancel(work(), state, number, exit_on_sigterm=True)


@contextmanager
def suppress_nothing_there() -> Iterator[None]:
    """Begin anew if no step was saved yet; any other error ends the program."""
    try:
        yield
    except CheckpointError as error:
        if "There is no step to restore" not in str(error):
            raise


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--looped", action="store_true")
    parser.add_argument("--on-sigterm", action="store_true")
    parser.add_argument("--stoppable", action="store_true")
    parser.add_argument("--faults", type=int)
    parser.add_argument("--keep-all", action="store_true")
    chosen = parser.parse_args()
    ar.set_logical_devices("cpu", 2)
    if chosen.stoppable:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # when all is saved it changes nothing
        warnings.simplefilter("ignore", RuntimeWarning)  # of calls that were made again
        stopped = train_and_stop(
            chosen.directory, chosen.steps, chosen.size,
            faults=chosen.faults, max_to_keep=None if chosen.keep_all else 3,
        )  # fmt: skip
        asyncio.run(stopped)
        print(DONE, flush=True)
        return
    if chosen.on_sigterm:
        asyncio.run(train_until_told(chosen.directory))
        return
    work = train(
        chosen.directory, chosen.steps, chosen.size, is_looped=chosen.looped, kill_at=chosen.kill_at
    )
    print(f"digest {asyncio.run(work)}", flush=True)


if __name__ == "__main__":
    main()
