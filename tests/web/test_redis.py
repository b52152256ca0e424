"""A stream of a real Redis, whose server and whose reader are killed: each entry is learned once.

Needs `redis-server`, and `pip install redis`; left out where they are not there.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

redis = pytest.importorskip("redis")

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 4
PER_ROUND = 60
LIMIT_S = 60.0

READER = """
import asyncio, sys
from pathlib import Path
import numpy as np
import redis.asyncio
import aioreplica as ar
from aioreplica.integrations.redis import RedisSource

async def main(folder, size, last):
    client = redis.asyncio.Redis(unix_socket_path=f"{folder}/redis.sock")
    manager = ar.CheckpointManager(f"{folder}/checkpoints", max_to_keep=2)
    async with client, ar.MirroredStrategy(["cpu:0"]) as strategy, manager:
        with strategy.scope():
            counts = ar.Variable(np.zeros(size, np.int32), aggregation="sum")

        async def step(ctx, batch):
            await counts.assign_add(np.bincount(batch["id"], minlength=size).astype(np.int32))

        source = RedisSource(client, "clicks", count=7, poll_s=0.005)
        async with ar.online.OnlineLearner(
            strategy, step, {"counts": counts}, max_batch=8, max_delay_s=0.001, queue_size=64,
            journal=f"{folder}/journal.db", checkpoints=manager, checkpoint_every_s=0.03,
            sources={"clicks": source},
        ) as learner:
            print("open", flush=True)
            while last is None or learner.statistics().sources["clicks"].offset != last:
                await asyncio.sleep(0.01)
        print(*counts.value, flush=True)

folder, size, *last = sys.argv[1:]
asyncio.run(main(folder, int(size), last[0] if last else None))
"""


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Run a server that has everything on disk before it answers; SIGKILL ends it."""
    socket = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    options = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not any("eady to accept connections" in line for line in process.stdout):
                pytest.fail("The server does not answer.")
            yield
        finally:
            process.kill()


def reader(folder: Path, size: int, *last: str) -> list[str]:
    return [sys.executable, "-c", READER, str(folder), str(size), *last]


@pytest.mark.slow
def test_each_entry_is_learned_once_whoever_is_killed(tmp_path: Path) -> None:
    rng, size = random.Random(0), NUM_ROUNDS * PER_ROUND
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ids, last = iter(range(size)), ""
    for number in range(NUM_ROUNDS):
        with (
            serving(tmp_path),
            redis.Redis(unix_socket_path=str(tmp_path / "redis.sock")) as client,
            subprocess.Popen(
                reader(tmp_path, size), env=environment, stdout=subprocess.PIPE, text=True
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            for _ in range(PER_ROUND):
                example = json.dumps({"id": next(ids)})
                last = client.xadd("clicks", {"example": example}).decode()
            with_server = number % 2 == 0  # the reader goes on for a while without one, in turn
            if not with_server:
                client.shutdown(nosave=True, now=True, force=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() * 0.2)
            process.send_signal(signal.SIGKILL)
    with serving(tmp_path):
        done = subprocess.run(
            reader(tmp_path, size, last), env=environment, capture_output=True, text=True,
            timeout=LIMIT_S, check=True,
        )  # fmt: skip
    assert done.stdout.split()[1:] == ["1"] * size
