"""Predictions of a torch model over HTTP, several requests in a call or each alone.

    python -m benchmarks._online_batches [ROUNDS]

Two services with the same model predict in turns for the same clients, which ask again as soon as
they have an answer. Inference of one input costs more than its request over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

FEATURES = 64
WIDTH, DEPTH = 2048, 4
CLIENTS = (1, 8, 32)
SIZES = (1, 32)
SECONDS = 2.0


async def serve(path: str, size: int) -> None:
    """Serve a model from a published file, until killed."""
    import numpy as np
    import torch
    import uvicorn

    import aioreplica as ar
    from aioreplica.integrations.asgi import OnlineService
    from aioreplica.online import SnapshotReader, publish_snapshot

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = [FEATURES, *[WIDTH] * DEPTH, 1]
    layers: list[Any] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).eval()

    def infer(inputs: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(inputs))[:, 0].numpy()

    async def predict(_snapshot: Any, inputs: Any) -> Any:
        return await ar.run_on_host(infer, inputs)

    publish_snapshot(path, 1, {"w": np.zeros(1)})
    like = np.zeros(FEATURES, np.float32)
    service = OnlineService(SnapshotReader(path), predict, input_like=like, predict_batch=size)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(service, log_level="warning", lifespan="on", ws="none")
        await uvicorn.Server(config).serve([listening])


async def load(port: int, num_clients: int, seconds: float) -> tuple[float, list[float]]:
    """Ask for some seconds; return requests per second, and sorted times in ms."""
    body = json.dumps({"input": [0.5] * FEATURES}).encode()
    head = (
        "POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    end = time.perf_counter() + seconds

    async def ask() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        taken = []
        while (start := time.perf_counter()) < end:
            writer.write(head.encode() + body)
            top = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(top.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            if b" 200 " not in top.partition(b"\r\n")[0]:
                raise RuntimeError(f"A prediction was answered with {top[:80]!r}.")
            taken.append((time.perf_counter() - start) * 1e3)
        writer.close()
        return taken

    found = await asyncio.gather(*(ask() for _ in range(num_clients)))
    times = sorted(chain.from_iterable(found))
    return len(times) / seconds, times


def main(num_rounds: int) -> None:
    """Measure in turns; print medians of rounds, and ratios to each request alone."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = {}
        for size in SIZES:
            command = [sys.executable, "-m", "benchmarks._online_batches", "serve"]
            server = stack.enter_context(
                subprocess.Popen(
                    [*command, str(Path(folder) / f"{size}"), str(size)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(server.kill)
            assert server.stdout is not None
            ports[size] = int(server.stdout.readline())
        for num_clients in CLIENTS:
            rounds: dict[int, list[tuple[float, float, float]]] = {size: [] for size in SIZES}
            for number in range(num_rounds + 1):
                for size in SIZES:
                    rate, times = asyncio.run(load(ports[size], num_clients, SECONDS))
                    if number > 0:  # the first one warms up
                        half, last = times[len(times) // 2], times[int(len(times) * 0.99)]
                        rounds[size].append((rate, half, last))
            told = []
            for size in SIZES:
                rate, half, last = (median(each) for each in zip(*rounds[size], strict=True))
                told.append(f"batch {size}: {rate:.0f}/s, p50 {half:.1f} ms, p99 {last:.1f} ms")
            ratio = median(b[0] / a[0] for a, b in zip(*rounds.values(), strict=True))
            print(f"{num_clients} clients | {' | '.join(told)} | {ratio:.2f} as many", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
