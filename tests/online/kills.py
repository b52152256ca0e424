"""A learner that is killed again and again under load: `python -m tests.online.kills --kills 100`.

Each process learns what the ones before it left, takes examples from several tasks, and writes the
number of each one that is acknowledged; it saves and compacts all the time. SIGKILL ends it at some
time after its first acknowledgement, or while it recovers. At the end each acknowledged example
must have been learned exactly once, and no other one twice.

With `--rollbacks` each process goes back to a checkpoint again and again, and leaves an example out
that was just taken: that one must be a dead letter once the rollback has returned.

With `--joins` two thirds of the examples come in other ways: as labels, each sent twice at once, of
inputs that wait in the journal; and as lines of files, which the learner reads itself.

With `--promotions` a second model learns from the journal, in batches of its own, and each process
promotes the one and the other again and again. Both must have learned each example once, the one
that is served must be the last whose promotion has returned, or the one after that, and versions
must only grow.

With `--upgrades k` a newer version of the program is started k times, each with examples of another
form and other keys of its state. Steps get the newest form only, and what was acknowledged to a
client that sends it again in its older form is known.
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
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar

PER_RUN = 600
NUM_CLIENTS = 6
POISONED_EVERY = 97
SENT_AGAIN = 60
LIMIT_S = 120


@dataclass
class Wanted:
    """Options of a process."""

    rolls_back: bool = False
    joins: bool = False
    promotes: bool = False
    num_upgrades: int = 0

    def version(self, size: int, first: int | None) -> int:
        """Return the spec version of the process whose examples begin with one."""
        last = size - PER_RUN
        return 1 + (last if first is None else first) * self.num_upgrades // last


class Model:
    """A strategy with variables that count, and a step."""

    def __init__(self, device: str, size: int, poisoned: int, version: int) -> None:
        self.strategy = ar.MirroredStrategy([device])
        self._size, self._poisoned, self._version = size, poisoned, version
        with self.strategy.scope():
            self.counts = ar.Variable(np.zeros(size, np.int32), aggregation="sum")
            self.weight = ar.Variable(np.zeros(3))
            self.added = {str(v): ar.Variable(0.0) for v in range(2, version + 1)}
            self.adam = ar.optimizers.Adam(0.01)

    @property
    def state(self) -> dict[str, Any]:
        weights = {str(self._version): self.weight}
        added = {"added": self.added} if self.added else {}
        return {"counts": self.counts, "weight": weights, "adam": self.adam, **added}

    async def step(self, _ctx: ar.ReplicaContext, batch: Any) -> None:
        if (batch["form"] != self._version).any():
            raise ValueError("of another form")
        hits = np.bincount(batch["id"], minlength=self._size).astype(np.int32)
        await self.counts.assign_add(hits)
        if (batch["id"] % self._poisoned == 0).any():
            raise ValueError("poisoned")
        await self.adam.apply_gradients([(batch["x"].sum(0), self.weight)])

    def learner(self, manager: ar.CheckpointManager, **options: Any) -> ar.online.OnlineLearner:
        given = {
            "max_batch": 8, "max_delay_s": 0.001, "queue_size": 64, "checkpoint_every_s": 0.03,
            "spec_version": self._version,
            "migrate": {version: RISES[version] for version in range(1, self._version)},
        }  # fmt: skip
        return ar.online.OnlineLearner(
            self.strategy, self.step, self.state, checkpoints=manager, **(given | options)
        )


def risen(version: int) -> ar.online.Migration:
    """Return the step from a version to the next."""

    def rise(row: dict[str, Any]) -> dict[str, Any]:
        if "input" in row:  # it was made of a prediction and its label
            return {**row, "input": rise(row["input"])}
        assert row["form"] == version
        return {**row, "form": version + 1}

    keys = {f"weight/{version}": f"weight/{version + 1}"}
    return ar.online.Migration(rise, renamed=keys, added=[f"added/{version + 1}"])


RISES = {version: risen(version) for version in range(1, 100)}


async def live(folder: Path, size: int, first: int | None, wanted: Wanted) -> None:
    """Learn; from an example on submit more until killed, or only finish what is there."""
    names = ["main", "second"][: 1 + wanted.promotes]
    version = wanted.version(size, first)
    models = [
        Model(f"cpu:{at}", size, POISONED_EVERY + 2 * at, version) for at in range(len(names))
    ]

    def valid(given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = given.get("input", given)
        if found["form"] != version:
            raise ValueError("An example of another form.")
        return found

    def parsed(line: str) -> dict[str, Any]:
        return example(int(line), version)

    async with AsyncExitStack() as ends:
        managers = []
        for name, model in zip(names, models, strict=True):
            await ends.enter_async_context(model.strategy)
            path = folder / f"checkpoints-{name}"
            manager = ar.CheckpointManager(path, max_to_keep=2)
            managers.append(await ends.enter_async_context(manager))
        others = {
            name: model.learner(manager, max_batch=5)
            for name, model, manager in list(zip(names, models, managers, strict=True))[1:]
        }
        learner = models[0].learner(
            managers[0],
            journal=ar.online.Journal(folder / "journal.db", label_ttl_s=3600.0),
            validate=valid,
            sources={"lines": ar.online.FolderSource(folder / "lines", parse=parsed, poll_s=0.003)},
            challengers=others,
        )
        async with learner:
            print(f"open {learner.champion} {learner.version}", flush=True)
            if first is not None:
                if wanted.num_upgrades and first:
                    begin = first - PER_RUN
                    ids = range(begin, begin + SENT_AGAIN, 3)  # `submit` took these
                    await send_again(learner, ids, wanted.version(size, begin))
                await submit_more(folder, learner, first, wanted, version)
            while not is_read(folder, learner):
                await asyncio.sleep(0.003)
        for name, model in zip(names, models, strict=True):
            values = model.counts.value
            learned = " ".join(f"{i}:{values[i]}" for i in np.flatnonzero(values))
            dead = " ".join(map(str, await dead_ids(folder, name)))
            print(f"model {learned}|{dead}", flush=True)


async def submit_more(
    folder: Path, learner: ar.online.OnlineLearner, first: int, wanted: Wanted, version: int
) -> None:
    """Submit examples, and do what is wanted meanwhile, until the process is killed."""
    ids = iter(range(first, first + PER_RUN))
    ways: list[Way] = [submit, label, Lines(folder, first)] if wanted.joins else [submit]
    taken: list[tuple[int, int]] = []

    async def client() -> None:
        for i in ids:
            way = ways[i % len(ways)]
            ticket = await way(learner, i, version)
            os.write(1, f"{i}\n".encode())
            if ticket is None:
                continue
            taken.append((ticket.number or 0, i))

    operators = []
    if wanted.rolls_back:
        operators.append(roll_back(learner, taken, random.Random(first)))
    if wanted.promotes:
        operators.append(promote(learner, random.Random(first)))
    if wanted.num_upgrades:
        operators.append(save(learner, random.Random(first)))
    operating = [asyncio.create_task(each) for each in operators]
    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    await asyncio.gather(*operating)
    await asyncio.Event().wait()


async def promote(learner: ar.online.OnlineLearner, rng: random.Random) -> None:
    """Promote the model that is not served, again and again; write what is to be served."""
    while True:
        await asyncio.sleep(rng.random() * 0.02)
        name = "main" if learner.champion == "second" else "second"
        os.write(1, f"promotes {name} {learner.version}\n".encode())
        with suppress(ValueError):  # it may not have caught up
            version = await learner.promote(name)
            os.write(1, f"promoted {name} {version}\n".encode())


async def save(learner: ar.online.OnlineLearner, rng: random.Random) -> None:
    """Save checkpoints."""
    while True:
        number = await learner.checkpoint()
        os.write(1, f"saved {number}\n".encode())
        await asyncio.sleep(rng.random() * 0.05)


async def send_again(learner: ar.online.OnlineLearner, ids: range, version: int) -> None:
    """Send what the process before may have taken, as it was then; write what is not known."""
    for i in ids:
        try:
            await learner.submit(example(i, version), key=str(i))
        except ValueError:
            os.write(1, f"unknown {i}\n".encode())
        else:
            os.write(1, f"{i}\n".encode())


def example(i: int, version: int) -> dict[str, Any]:
    return {"id": i, "x": np.ones(3), "form": version}


Way = Callable[[ar.online.OnlineLearner, int, int], Awaitable[ar.online.Ticket | None]]
"""Hands an example of a spec version to a learner; returns once it must not be lost, None without
a number."""


async def submit(learner: ar.online.OnlineLearner, i: int, version: int) -> ar.online.Ticket:
    return await learner.submit(example(i, version), key=str(i))


async def label(learner: ar.online.OnlineLearner, i: int, version: int) -> ar.online.Ticket:
    name = learner.expect(example(i, version))
    tickets = await asyncio.gather(learner.label(name, 1.0), learner.label(name, 1.0))
    assert tickets[0].number == tickets[1].number
    return tickets[0]


class Lines:
    """A file of a process, of which each line is an example."""

    def __init__(self, folder: Path, first: int) -> None:
        (folder / "lines").mkdir(exist_ok=True)
        path = folder / "lines" / f"{first:09}.jsonl"
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def __call__(self, _learner: ar.online.OnlineLearner, i: int, _version: int) -> None:
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
        if now.state == "recovering" and learner.champion != "main":
            continue  # it would never catch up, as examples go on coming
        os.write(1, f"leaves out {i}\n".encode())
        with suppress(ValueError):  # the checkpoint may just have gone
            await learner.rollback(to, skip=[number])
            os.write(1, f"left out {i}\n".encode())


async def dead_ids(folder: Path, model: str) -> list[int]:
    from aioreplica.online import Journal

    file = Journal(folder / "journal.db").file()
    file.open()
    try:
        return [letter.example["id"] for letter in file.dead_letters(0, 10**6, None, model)]
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
    num_promoted: int = 0

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.twice and self.acknowledged > 0


def kill(num_kills: int, seed: int = 0, wanted: Wanted | None = None) -> Kills:
    """Kill processes; return what was learned at the end."""
    wanted = Wanted() if wanted is None else wanted
    rng, lines = random.Random(seed), list[str]()
    options = ["--rollbacks"] * wanted.rolls_back + ["--joins"] * wanted.joins
    options += ["--promotions"] * wanted.promotes + ["--upgrades", str(wanted.num_upgrades)]
    begins = [""]
    if wanted.rolls_back:  # while a rollback is under way, or after one that has returned, in turn
        begins = ["leaves out", "left out"]
    if wanted.promotes:
        begins += ["promotes", "promoted"]
    if wanted.num_upgrades:
        begins += ["saved"]
    size = (num_kills + 1) * PER_RUN
    with tempfile.TemporaryDirectory() as folder:
        for run in range(num_kills):
            program = _program(folder, size, str(run * PER_RUN), *options)
            waits = run < len(begins) or rng.random() < 0.7  # for each of them once
            lines += _until_killed(program, rng, begins[run % len(begins)] if waits else None)
        last = ["--promotions"] * wanted.promotes + ["--upgrades", str(wanted.num_upgrades)]
        done = subprocess.run(
            _program(folder, size, *last), capture_output=True, text=True, timeout=LIMIT_S,
            check=True,
        )  # fmt: skip
    unknown = {int(line.removeprefix("unknown ")) for line in lines if line.startswith("unknown")}
    acknowledged = {int(line) for line in lines if line.isdigit()}
    may_be_left = {int(line.rpartition(" ")[2]) for line in lines if line.startswith("leaves")}
    left_out = {int(line.rpartition(" ")[2]) for line in lines if line.startswith("left")}
    ends = [line for line in done.stdout.split("\n") if line.startswith("model ")]
    lost, twice = sorted(unknown & acknowledged), list[int]()
    for at, line in enumerate(ends):
        counted, _, letters = line.removeprefix("model ").partition("|")
        learned = Counter({int(i): int(n) for i, n in (x.split(":") for x in counted.split())})
        dead = Counter(map(int, letters.split()))
        allowed = may_be_left if at == 0 else set[int]()
        assert all(i % (POISONED_EVERY + 2 * at) == 0 or i in allowed for i in dead)
        assert at or left_out <= {*dead}
        fate = learned + dead
        lost += sorted(i for i in acknowledged if fate[i] == 0)
        twice += sorted(i for i, n in fate.items() if n > 1)
    promoted = _require_promotions([*lines, done.stdout.split("\n")[0]])
    return Kills(num_kills, len(acknowledged), lost, twice, len(left_out), promoted)


def _require_promotions(lines: list[str]) -> int:
    """Check that what was promoted is served after each restart; return how often it was."""
    served, asked, newest, least, count = "main", "", 0, 0, 0
    for what, name, number in (line.split() for line in lines if line.count(" ") == 2):
        version = int(number) if what in {"open", "promotes", "promoted"} else 0
        if what == "open":
            assert name in {served, asked} - {""}, (name, served, asked)
            assert version > newest or (name == served and version >= least), (name, version)
            served, asked = name, ""
        elif what == "promotes":
            asked = name
        elif what == "promoted":
            assert version > newest, (name, version, newest)
            served, asked, least, count = name, "", version, count + 1
        newest = max(newest, version)
    return count


def _program(folder: str, size: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.online.kills", "--child", folder, str(size), *options]


def _until_killed(program: list[str], rng: random.Random, begin: str | None) -> list[str]:
    """Run a program and kill it some time after a line that begins so; return its lines.

    Without one it is killed at any time, mostly while it recovers.
    """
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        head = ["", process.stdout.readline()]
        if begin is not None:
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
    parser.add_argument("--promotions", action="store_true")
    parser.add_argument("--upgrades", type=int, default=0)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--joins", action="store_true")
    chosen = parser.parse_args()
    wanted = Wanted(chosen.rollbacks, chosen.joins, chosen.promotions, chosen.upgrades)
    if chosen.child:
        ar.set_logical_devices("cpu", 2)
        folder, size, *first = chosen.child
        asyncio.run(live(Path(folder), int(size), int(first[0]) if first else None, wanted))
        return
    kills = kill(chosen.kills, wanted=wanted)
    print(kills)
    if not kills.is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
