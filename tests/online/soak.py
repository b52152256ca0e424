"""A long mixed run whose memory, threads and files stay flat: `python -m tests.online.soak`.

Clients submit with and without keys, some examples are poisoned, some submissions are cancelled,
the learner is paused, saved and compacted, listeners come and go, and snapshots are published.
"""

import argparse
import asyncio
import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import psutil

import aioreplica as ar
from aioreplica.errors import KeyReusedError, PoisonedExampleError

from .program import NUM_IDS, Counting, example

MIB = 1024 * 1024


@dataclass
class Sample:
    """What the process holds."""

    memory_mib: float
    num_threads: int
    num_files: int
    num_tasks: int


@dataclass
class Soak:
    """Samples of a run, and what was done in it."""

    samples: list[Sample] = field(default_factory=list)
    num_learned: int = 0
    num_dead: int = 0

    def growth(self, what: Callable[[Sample], float]) -> float:
        """Return how much larger the last quarter's least value is than the second quarter's."""
        values = [what(sample) for sample in self.samples]
        quarter = max(1, len(values) // 4)
        return min(values[-quarter:]) - min(values[quarter : 2 * quarter])


def sample() -> Sample:
    process = psutil.Process()
    gc.collect()
    return Sample(
        process.memory_info().rss / MIB,
        threading.active_count(),
        process.num_fds(),
        len(asyncio.all_tasks()),
    )


async def soak(seconds: float, folder: Path, num_samples: int = 40) -> Soak:
    """Load a learner; return what it held meanwhile."""
    found, rng, end = Soak(), random.Random(0), time.monotonic() + seconds
    async with Counting(
        folder, checkpoint_every_s=0.2, publish_to=folder / "published", max_failures_in_a_row=None,
        journal=ar.online.Journal(folder / "journal.db", keep_keys_s=5.0),
    ) as program:  # fmt: skip
        learner = program.learner

        async def submit() -> None:
            number = rng.randrange(NUM_IDS)
            mood = rng.choice([0.0] * 40 + [1.0, 2.0])
            key = f"k{rng.randrange(1000)}" if rng.random() < 0.3 else None
            with anyio.move_on_after(rng.choice([0.0005, 1.0, 1.0])):
                with suppress(PoisonedExampleError, KeyReusedError):
                    await (await learner.submit(example(number, mood), key=key))

        async def meddle() -> None:
            await asyncio.sleep(0.03)
            await learner.pause()
            learner.resume()
            with anyio.move_on_after(0.01):
                await anext(learner.records(buffer_size=2))
            for letter in await learner.dead_letters(limit=20):
                await learner.discard(letter.number)
            assert program.is_one_version()

        async def read() -> None:
            await asyncio.sleep(0.01)
            with ar.online.SnapshotReader(folder / "published") as reader:
                snapshot = reader.read()
                assert (snapshot["counts"] == snapshot["sums"]).all()

        async def again(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
            while time.monotonic() < end:
                await work()

        async def watch() -> None:
            for _ in range(num_samples):
                await asyncio.sleep(max(0.0, end - time.monotonic()) / num_samples)
                found.samples.append(sample())
                program.batches.clear()

        async with asyncio.TaskGroup() as group:
            for work in (*[submit] * 12, meddle, read):
                group.create_task(again(work))
            group.create_task(watch())
        statistics = learner.statistics()
        found.num_learned, found.num_dead = statistics.num_learned, statistics.num_dead
        assert statistics.num_checkpoints > 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    seconds = parser.parse_args().seconds
    ar.set_logical_devices("cpu", 2)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(seconds, Path(folder)))
    quarter = len(found.samples) // 4
    print(f"after a quarter {found.samples[quarter]}, at the end {found.samples[-1]}")
    print(f"{found.num_learned} learned, {found.num_dead} set aside")
    print(f"memory grew by {found.growth(lambda each: each.memory_mib):.1f} MiB")


if __name__ == "__main__":
    main()
