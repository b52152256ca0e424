"""A learner that is killed again and again under load: `python -m tests.online.kills --kills 100`.

Each process learns what the ones before it left, takes examples from several tasks, and writes the
number of each one that is acknowledged; it saves and compacts all the time. SIGKILL ends it at some
time after its first acknowledgement, or while it recovers. At the end each acknowledged example
must have been learned exactly once, and no other one twice.

With `--rollbacks` each process goes back to a checkpoint again and again, and leaves an example out
that was just taken: that one must be a dead letter once the rollback has returned.

With `--joins` two thirds of the examples come in other ways: as labels, each sent twice at once, of
inputs that wait in the journal; and as lines of files, which the learner reads itself.
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
from collections.abc import Awaitable, Callable
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


async def live(
    folder: Path, size: int, first: int | None, *, rolls_back: bool, joins: bool
) -> None:
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
            max_batch=8, max_delay_s=0.001, queue_size=64, checkpoints=manager,
            journal=ar.online.Journal(folder / "journal.db", label_ttl_s=3600.0),
            checkpoint_every_s=0.03, validate=lambda given: given.get("input", given),
            sources={"lines": ar.online.FolderSource(folder / "lines", parse=parsed, poll_s=0.003)},
        ) as learner:  # fmt: skip
            print("open", flush=True)
            if first is not None:
                ids = iter(range(first, first + PER_RUN))
                ways: list[Way] = [submit, label, Lines(folder, first)] if joins else [submit]
                taken: list[tuple[int, int]] = []

                async def client() -> None:
                    for i in ids:
                        way = ways[i % len(ways)]
                        ticket = await way(learner, i)
                        os.write(1, f"{i}\n".encode())
                        if ticket is None:
                            continue
                        taken.append((ticket.number or 0, i))

                if rolls_back:
                    operator = asyncio.create_task(roll_back(learner, taken, random.Random(first)))
                await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
                if rolls_back:
                    await operator
                await asyncio.Event().wait()
            while not is_read(folder, learner):
                await asyncio.sleep(0.003)
        for i in np.flatnonzero(counts.value):
            print(f"{i} {counts.value[i]}")
        dead = await dead_ids(folder)
        print(f"dead {' '.join(map(str, dead))}", flush=True)


def example(i: int) -> dict[str, Any]:
    return {"id": i, "x": np.ones(3)}


def parsed(line: str) -> dict[str, Any]:
    return example(int(line))


Way = Callable[[ar.online.OnlineLearner, int], Awaitable[ar.online.Ticket | None]]
"""Hands an example to a learner; returns once it must not be lost, None without a number."""


async def submit(learner: ar.online.OnlineLearner, i: int) -> ar.online.Ticket:
    return await learner.submit(example(i), key=str(i))


async def label(learner: ar.online.OnlineLearner, i: int) -> ar.online.Ticket:
    name = learner.expect(example(i))
    tickets = await asyncio.gather(learner.label(name, 1.0), learner.label(name, 1.0))
    assert tickets[0].number == tickets[1].number
    return tickets[0]


class Lines:
    """A file of a process, of which each line is an example."""

    def __init__(self, folder: Path, first: int) -> None:
        (folder / "lines").mkdir(exist_ok=True)
        path = folder / "lines" / f"{first:09}.jsonl"
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def __call__(self, _learner: ar.online.OnlineLearner, i: int) -> None:
        await asyncio.to_thread(os.write, self.fd, f"{i}\n".encode())


def is_read(folder: Path, learner: ar.online.OnlineLearner) -> bool:
    """Tell whether all lines were taken."""
    files = sorted(path for path in folder.glob("lines/*") if path.stat().st_size)
    end = f"{files[-1].stat().st_size} {files[-1].name}" if files else None
    return learner.statistics().sources["lines"].offset == end


async def roll_back(
    learner: ar.online.OnlineLearner, taken: list[tuple[int, int]], rng: random.Random
) -> None:
    """Leave out the example that was taken last, again and again; write what is to be dead."""
    while True:
        await asyncio.sleep(rng.random() * 0.03)
        number, i = taken[-1] if taken else (0, 0)
        now = learner.statistics()
        to = min(number - 1, now.learned_number)
        if now.rollback_from is None or to < now.rollback_from:
            continue
        os.write(1, f"leaves out {i}\n".encode())
        with suppress(ValueError):  # the checkpoint may just have gone
            await learner.rollback(to, skip=[number])
            os.write(1, f"left out {i}\n".encode())


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
    num_left_out: int = 0

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.twice and self.acknowledged > 0


def kill(num_kills: int, seed: int = 0, *, rolls_back: bool = False, joins: bool = False) -> Kills:
    """Kill processes; return what was learned at the end."""
    rng, lines = random.Random(seed), list[str]()
    options = ["--rollbacks"] * rolls_back + ["--joins"] * joins
    size = (num_kills + 1) * PER_RUN
    with tempfile.TemporaryDirectory() as folder:
        for run in range(num_kills):
            program = _program(folder, size, str(run * PER_RUN), *options)
            # While a rollback is under way, or after one that has returned, in turn.
            begin = ("leaves out", "left out")[run % 2] if rolls_back else ""
            lines += _until_killed(program, rng, begin)
        done = subprocess.run(
            _program(folder, size), capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    acknowledged = {int(line) for line in lines if line.isdigit()}
    may_be_left = {int(line.rpartition(" ")[2]) for line in lines if line.startswith("leaves")}
    left_out = {int(line.rpartition(" ")[2]) for line in lines if line.startswith("left")}
    lines = done.stdout.split("\n")[1:]
    learned = Counter({int(i): int(n) for i, n in (x.split() for x in lines[:-2])})
    dead = Counter(map(int, lines[-2].split()[1:]))
    assert all(i % POISONED_EVERY == 0 or i in may_be_left for i in dead)
    assert left_out <= {*dead}
    fate = learned + dead
    lost = sorted(i for i in acknowledged if fate[i] == 0)
    twice = sorted(i for i, n in fate.items() if n > 1)
    return Kills(num_kills, len(acknowledged), lost, twice, len(left_out))


def _program(folder: str, size: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.online.kills", "--child", folder, str(size), *options]


def _until_killed(program: list[str], rng: random.Random, begin: str) -> list[str]:
    """Run a program and kill it some time after a line that begins so; return its lines."""
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        head = [process.stdout.readline()]
        if rng.random() < 0.7:  # else while it recovers, mostly
            head.append(process.stdout.readline())
            while head[-1] and not head[-1].startswith(begin):
                head.append(process.stdout.readline())
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        tail = process.stdout.read().split("\n")
        process.wait(LIMIT_S)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"The process ended by itself, with status {process.returncode}.")
    # A line may have been cut off by the kill: whoever reads that has no acknowledgement.
    return [line.strip() for line in itertools.chain(head[1:], tail[:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rollbacks", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--joins", action="store_true")
    chosen = parser.parse_args()
    if chosen.child:
        ar.set_logical_devices("cpu", 2)
        folder, size, *first = chosen.child
        number = int(first[0]) if first else None
        live_so = {"rolls_back": chosen.rollbacks, "joins": chosen.joins}
        asyncio.run(live(Path(folder), int(size), number, **live_so))
        return
    kills = kill(chosen.kills, rolls_back=chosen.rollbacks, joins=chosen.joins)
    print(kills)
    if not kills.is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
