"""A service that predicts, and trains in one of several ways while it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import uvicorn

import aioreplica as ar
from aioreplica.devices import set_lane_options
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import OnlineLearner

from ._online_load import FEATURES

SIZES = (FEATURES, 512, 512, 10)
BLOCK = 32  # rows of an example
NUM_BLOCKS = 8  # examples of a step
TICK_S = 0.001
ON_PROCESSES = " on processes"  # in the name of a way whose devices have processes of their own
IN_BACKGROUND = " in the background"  # in that of one whose lanes take idle cores only

Training = Callable[[], Awaitable[object]]


def forward(values: list[Any], inputs: Any) -> list[Any]:
    """Return the inputs of each layer, and the scores."""
    layers = [inputs]
    for index in range(0, len(values), 2):
        scores = layers[-1] @ values[index] + values[index + 1]
        layers.append(np.maximum(scores, 0) if index + 2 < len(values) else scores)
    return layers


def gradients(values: list[Any], inputs: Any, labels: Any) -> list[Any]:
    """Return those of the summed cross entropy."""
    layers = forward(values, inputs)
    slope = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
    slope /= slope.sum(axis=1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    found: list[Any] = []
    for index in range(len(values) - 2, -1, -2):
        below = layers[index // 2]
        found = [below.T @ slope, slope.sum(axis=0), *found]
        if index:
            slope = (slope @ values[index].T) * (below > 0)
    return found


def parameters() -> list[Any]:
    rng = np.random.default_rng(0)
    arrays: list[Any] = []
    for fan_in, fan_out in pairwise(SIZES):
        weights = rng.normal(0, fan_in**-0.5, (fan_in, fan_out))
        arrays += [weights.astype(np.float32), np.zeros(fan_out, np.float32)]
    return arrays


def made_up(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.random((count, FEATURES), np.float32), rng.integers(0, SIZES[-1], count)


def plain_step(values: list[Any], inputs: Any, labels: Any) -> None:
    """Take a step in place: what other ways than ours do."""
    for value, slope in zip(values, gradients(values, inputs, labels), strict=True):
        np.subtract(value, 0.001 * slope / len(labels), out=value)


# ---- ways of training ----------------------------------------------------------------------


def way(name: str, learner: OnlineLearner, strategy: ar.Strategy) -> Training:
    """Return what takes one step, or a few, each time it is awaited."""
    inputs, labels = made_up(BLOCK * NUM_BLOCKS)
    values = parameters()
    if name.startswith("array steps"):
        blocks = [
            {"input": x, "target": y}
            for x, y in zip(
                inputs.reshape(NUM_BLOCKS, BLOCK, FEATURES), labels.reshape(NUM_BLOCKS, BLOCK),
                strict=True,
            )
        ]  # fmt: skip
        return partial(learner.submit_many, blocks)
    if name == "step in the handler":

        async def inline() -> None:
            plain_step(values, inputs, labels)
            await asyncio.sleep(0)

        return inline
    if name == "asyncio.to_thread":
        return partial(asyncio.to_thread, plain_step, values, inputs, labels)
    if name == "torch in a thread":
        return partial(asyncio.to_thread, torch_step())
    new_step = autograd_step if name.startswith("autograd steps") else python_step
    step = new_step()

    async def on_devices() -> None:
        await strategy.run(partial(run_on_device, step))

    return on_devices


async def run_on_device(step: Callable[[], object]) -> None:
    ctx = ar.get_replica_context()
    assert ctx is not None
    await ctx.run_on_device(step)
    await ctx.barrier()


def autograd_step() -> Callable[[], object]:
    """Return a step of a small model, most of whose time is spent in Python."""
    import autograd.numpy as anp
    from autograd import grad

    def loss(values: Any, inputs: Any, labels: Any) -> Any:
        hidden = anp.tanh(anp.dot(inputs, values[0]) + values[1])
        return anp.sum((anp.dot(hidden, values[2]) - labels) ** 2)

    rng = np.random.default_rng(0)
    values = [rng.random((8, 8)), np.zeros(8), rng.random(8)]
    inputs, labels = rng.random((16, 8)), rng.random(16)
    slopes = grad(loss)

    def step() -> None:
        for _ in range(20):
            slopes(values, inputs, labels)

    return step


def python_step() -> Callable[[], object]:
    def step() -> int:
        return sum(i * i for i in range(100_000))

    return step


def torch_step() -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for fan_in, fan_out in pairwise(SIZES):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    inputs, labels = map(torch.from_numpy, made_up(BLOCK * NUM_BLOCKS))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


# ---- the server ----------------------------------------------------------------------------


class Switch:
    """Trains while it is on, and measures how late the loop's timers are."""

    def __init__(self, service: OnlineService, train: Training) -> None:
        self._service = service
        self._train = train
        self._task: asyncio.Task[None] | None = None
        self._lags: list[float] = []
        self._num_steps = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") not in {"/train", "/lag"}:
            await self._service(scope, receive, send)
            return
        body = (await receive())["body"]
        if scope["path"] == "/train":
            await self._turn(is_on=json.loads(body))
        lags, self._lags = sorted(self._lags), []
        found = {"lag_p99": lags[int(len(lags) * 0.99)] * 1e3 if lags else 0.0}
        text = json.dumps({**found, "num_steps": self._num_steps}).encode()
        self._num_steps = 0
        head = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})

    async def _turn(self, *, is_on: bool) -> None:
        if is_on and self._task is None:
            self._task = asyncio.create_task(self._go_on())
        elif not is_on and self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _go_on(self) -> None:
        while True:
            await self._train()
            self._num_steps += 1

    async def tick(self) -> None:
        while True:
            start = perf_counter()
            await asyncio.sleep(TICK_S)
            self._lags.append(perf_counter() - start - TICK_S)


class Server(uvicorn.Server):
    """A server that ends with its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(name: str) -> None:
    """Serve until killed."""
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variables = [ar.Variable(array) for array in parameters()]
            optimizer = ar.optimizers.SGD(0.001)

        async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
            inputs = batch["input"].reshape(-1, FEATURES)
            labels = batch["target"].reshape(-1)
            values = [variable.value for variable in variables]
            found = await ctx.run_on_device(gradients, values, inputs, labels)
            del values
            weighted = [ar.Weighted(slope, len(labels)) for slope in found]
            await optimizer.apply_gradients(zip(weighted, variables, strict=True))

        learner = OnlineLearner(
            strategy, step, {"variables": variables, "optimizer": optimizer},
            max_batch=NUM_BLOCKS, max_delay_s=0.001, queue_size=4 * NUM_BLOCKS,
        )  # fmt: skip

        def predict(snapshot: Any, inputs: Any) -> Any:
            return forward([snapshot[v] for v in variables], inputs)[-1].argmax(axis=1)

        service = OnlineService(learner, predict, input_like=np.zeros(FEATURES, np.float32))
        switch = Switch(service, way(name, learner, strategy))
        config = uvicorn.Config(switch, log_level="warning", lifespan="on", ws="none")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            print(listening.getsockname()[1], flush=True)
            ticking = asyncio.create_task(switch.tick())
            await Server(config).serve([listening])
            ticking.cancel()


if __name__ == "__main__":
    ar.set_logical_devices("cpu", 2, processes=ON_PROCESSES in sys.argv[1])
    set_lane_options(background=IN_BACKGROUND in sys.argv[1])
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1]))
