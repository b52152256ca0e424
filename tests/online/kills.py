"""A learner that is killed again and again under load: `python -m tests.online.kills --kills 100`.

Each process learns what the ones before it left, takes examples from several tasks, and writes the
number of each one that is acknowledged; it saves and compacts all the time. SIGKILL ends it at some
time after its first acknowledgement, or while it recovers. At the end each acknowledged example
must have been learned exactly once, and no other one twice.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar

PER_RUN = 600
NUM_CLIENTS = 6
POISONED_EVERY = 97
LIMIT_S = 120


async def live(folder: Path, size: int, first: int | None) -> None:
    """Learn; from an example on submit more until killed, or only finish what is there."""
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(folder / "checkpoints", max_to_keep=2) as manager,
    ):
        with strategy.scope():
            counts = ar.Variable(np.zeros(size, np.int32), aggregation="sum")
            weight = ar.Variable(np.zeros(3))
            adam = ar.optimizers.Adam(0.01)

        async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
            await counts.assign_add(np.bincount(batch["id"], minlength=size).astype(np.int32))
            if (batch["id"] % POISONED_EVERY == 0).any():
                raise ValueError("poisoned")
            await adam.apply_gradients([(batch["x"].sum(0), weight)])

        async with ar.online.OnlineLearner(
            strategy, step, {"counts": counts, "weight": weight, "adam": adam},
            max_batch=8, max_delay_s=0.001, queue_size=64, journal=folder / "journal.db",
            checkpoints=manager, checkpoint_every_s=0.03,
        ) as learner:  # fmt: skip
            print("open", flush=True)
            if first is not None:
                ids = iter(range(first, first + PER_RUN))

                async def client() -> None:
                    for i in ids:
                        await learner.submit({"id": i, "x": np.ones(3)}, key=str(i))
                        os.write(1, f"{i}\n".encode())

                await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
                await asyncio.Event().wait()
        for i in np.flatnonzero(counts.value):
            print(f"{i} {counts.value[i]}")
        dead = await dead_ids(folder)
        print(f"dead {' '.join(map(str, dead))}", flush=True)


async def dead_ids(folder: Path) -> list[int]:
    from aioreplica.online import Journal

    file = Journal(folder / "journal.db").file()
    file.open()
    try:
        return [letter.example["id"] for letter in file.dead_letters(0, 10**6)]
    finally:
        file.close()


@dataclass
class Kills:
    """What became of the examples."""

    num_kills: int
    acknowledged: int
    lost: list[int]
    twice: list[int]

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.twice and self.acknowledged > 0


def kill(num_kills: int, seed: int = 0) -> Kills:
    """Kill processes; return what was learned at the end."""
    rng, acknowledged = random.Random(seed), set[int]()
    size = (num_kills + 1) * PER_RUN
    with tempfile.TemporaryDirectory() as folder:
        for run in range(num_kills):
            acknowledged |= _until_killed(folder, size, run * PER_RUN, rng)
        done = subprocess.run(
            _program(folder, size), capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    lines = done.stdout.split("\n")[1:]
    learned = Counter({int(i): int(n) for i, n in (x.split() for x in lines[:-2])})
    dead = Counter(map(int, lines[-2].split()[1:]))
    assert all(i % POISONED_EVERY == 0 for i in dead)
    fate = learned + dead
    lost = sorted(i for i in acknowledged if fate[i] == 0)
    return Kills(num_kills, len(acknowledged), lost, sorted(i for i, n in fate.items() if n > 1))


def _program(folder: str, size: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.online.kills", "--child", folder, str(size), *options]


def _until_killed(folder: str, size: int, first: int, rng: random.Random) -> set[int]:
    with subprocess.Popen(
        _program(folder, size, str(first)), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        head = [process.stdout.readline()]
        if rng.random() < 0.7:  # else while it recovers, mostly
            head.append(process.stdout.readline())
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        tail = process.stdout.read().split("\n")
        process.wait(LIMIT_S)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"The process ended by itself, with status {process.returncode}.")
    # A line may have been cut off by the kill: whoever reads that has no acknowledgement.
    return {int(line) for line in itertools.chain(head[1:], tail[:-1]) if line.strip().isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        ar.set_logical_devices("cpu", 2)
        folder, size, *first = chosen.child
        asyncio.run(live(Path(folder), int(size), int(first[0]) if first else None))
        return
    kills = kill(chosen.kills)
    print(kills)
    if not kills.is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
