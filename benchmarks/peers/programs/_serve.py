"""What the programs of all peers share: requests come in as lines of JSON, answers go out so."""

import asyncio
import gc
import inspect
import json
import sys
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks._mlp import initial_parameters, made_up_batch

# With ten times as much, a rounding that turns the sign of a tiny gradient shows in Adam's losses.
LEARNING_RATE = {"SGD": 0.01, "Adam": 0.0001}
EPSILON = 1e-12  # of Adam: TensorFlow means another one by it, which shows where it is larger
SMALL_BATCH = 32
CHECKED_STEPS = 20  # a multiple of the steps of every checked call, or less than one has


@dataclass
class Work:
    """What is measured.

    Attributes:
        call: Does it once; may be async.
        num_units: How many units of work a call is.
        checked: Does less of it, for the checks; None if that is `call`.
        num_checked: How many units of work that is.
        parameters: Gives the trained arrays, where something is trained.
        images: The whole batch.
        labels: Its labels.
        report: Of a failing call: what the error said.
    """

    call: Any
    num_units: int = 1
    checked: Any = None
    num_checked: int = 1
    parameters: Any = None
    images: Any = None
    labels: Any = None
    report: Any = None


def serve(make, prepare=None):
    """Answer requests until there are no more: make a work and check it, or take a sample of it.

    Args:
        make: Called with the settings of a request, returns a Work; may be async.
        prepare: Called once, inside the running loop; may be async.
    """
    asyncio.run(_serve(make, prepare))


async def _serve(make, prepare):
    if prepare is not None:
        await _finish(prepare())
    _answer({"ready": True})
    works = {}  # by mode, of one task
    for line in sys.stdin:
        request = json.loads(line)
        if "make" in request:
            mode = request["make"]["mode"]
            works[mode] = work = await _finish(make(**request["make"]))
            _answer({"checks": await _checks(work), "report": work.report and work.report()})
        elif "seconds" in request:
            _answer({"us": await _sample(works[request["mode"]], request["seconds"])})
        else:
            works.clear()
            gc.collect()
            _answer({})


async def _checks(work):
    """Warm up, and return the losses behind some steps where something is trained."""
    if work.parameters is None:
        for _ in range(3):
            await _finish(work.call())
        return []
    losses = []
    call, num_units = work.call, work.num_units
    if work.checked is not None:
        call, num_units = work.checked, work.num_checked
    last = max(CHECKED_STEPS, num_units)
    for step in range(num_units, last + 1, num_units):
        await _finish(call())
        if step % 10 == 0 or step == last:
            losses.append(loss(work.parameters(), work.images, work.labels))
    return losses


async def _sample(work, seconds):
    """Return the median time of a unit, in microseconds, over calls for so many seconds."""
    times = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        start = perf_counter()
        result = work.call()
        if inspect.isawaitable(result):
            await result
        times.append((perf_counter() - start) / work.num_units * 1e6)
    return median(times)


async def _finish(result):
    return await result if inspect.isawaitable(result) else result


def _answer(answer):
    print(json.dumps(answer), file=sys.__stdout__, flush=True)


# ---- the same models and data for everybody ------------------------------------------------


def start_of(num_parameters):
    """Return the first values: of the network if the number is 0, else of a linear model."""
    if num_parameters:
        return [np.zeros(num_parameters, np.float32)]
    return initial_parameters()


def batch_of(num_parameters, batch_size):
    """Return inputs and labels for a network or a linear model."""
    if not num_parameters:
        return made_up_batch(batch_size)
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(SMALL_BATCH, num_parameters)).astype(np.float32)
    return inputs, rng.normal(size=SMALL_BATCH).astype(np.float32)


def loss(parameters, images, labels):
    """Return the mean loss in float64: cross entropies, or half the squares of a linear model."""
    parameters = [np.asarray(array, np.float64) for array in parameters]
    if len(parameters) == 1:
        return float(np.mean((images @ parameters[0] - labels) ** 2) / 2)
    layer = images
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        layer = np.maximum(layer @ weight + bias, 0)
    scores = layer @ parameters[-2] + parameters[-1]
    scores -= scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(labels)), labels]
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - chosen))
