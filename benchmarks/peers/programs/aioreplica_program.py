"""aioreplica: awaited runs, plain steps and device loops.

Gradients are computed by hand in NumPy; by jax or torch where the second argument says so.
"""

import contextlib
import os
import sys
from functools import partial

COUNT = int(sys.argv[1])
LIBRARY = sys.argv[2] if len(sys.argv) > 2 else "numpy"
if LIBRARY == "torch":  # in each thread that computes
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // COUNT))

import _serve as peer
import numpy as np

import aioreplica as ar
from benchmarks._mlp import Backprop

MERGES = 100
REDUCTIONS = 10
LOOP_STEPS = 10  # of a device loop: of the network, and when it is checked
SMALL_STEPS = 200  # of the linear model
ar.set_logical_devices("cpu", max(2, COUNT))
strategy = ar.MirroredStrategy(ar.list_devices("cpu")[:COUNT])


def make(task, mode, **settings):
    return globals()[f"make_{task}"](mode, **settings)


def make_merge(_mode):
    async def replica():
        ctx = ar.get_replica_context()
        for _ in range(MERGES):
            await ctx.merge_call(lambda strategy: None)

    return peer.Work(lambda: strategy.run(replica), MERGES * COUNT)


def make_run(_mode):
    async def replica():
        pass

    return peer.Work(lambda: strategy.run(replica))


def make_all_reduce(_mode, size):
    values = ar.PerReplica([np.ones(size // 4, np.float32) for _ in range(COUNT)])
    number = REDUCTIONS if size < 1 << 20 else 1

    async def replica(value):
        ctx = ar.get_replica_context()
        for _ in range(number):
            await ctx.all_reduce("sum", value)

    return peer.Work(lambda: strategy.run(replica, args=(values,)), number)


class NumpyNetwork:
    """Differentiates the sum of the cross entropies, by hand."""

    def __init__(self, images, labels):
        self._gradients = Backprop(len(labels))
        self._batch = images, labels

    def __call__(self, parameters):
        return self._gradients(parameters, *self._batch)


class JaxNetwork:
    """The same, differentiated and compiled by jax."""

    def __init__(self, images, labels):
        import jax
        import jax.numpy as jnp

        def loss(values, x, y):
            for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
                x = jax.nn.relu(x @ weight + bias)
            scores = jax.nn.log_softmax(x @ values[-2] + values[-1])
            return -jnp.take_along_axis(scores, y[:, None], axis=1).sum()

        self._gradients = jax.jit(jax.grad(loss))
        self._batch = jax.device_put((images, labels))

    def __call__(self, parameters):
        return list(map(np.asarray, self._gradients(parameters, *self._batch)))


class TorchNetwork:
    """The same, differentiated by torch."""

    def __init__(self, images, labels):
        import torch

        self._torch = torch
        self._batch = torch.tensor(images), torch.tensor(labels)

    def __call__(self, parameters):
        torch, (x, y) = self._torch, self._batch
        values = [torch.from_numpy(array).requires_grad_() for array in parameters]
        for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
            x = torch.relu(torch.addmm(bias, x, weight))
        scores = torch.addmm(values[-1], x, values[-2])
        total = torch.nn.functional.cross_entropy(scores, y, reduction="sum")
        return [gradient.numpy() for gradient in torch.autograd.grad(total, values)]


NETWORKS = {"numpy": NumpyNetwork, "jax": JaxNetwork, "torch": TorchNetwork}


class Linear:
    """Differentiates the sum of half the squares of a linear model."""

    def __init__(self, inputs, labels):
        self._batch = inputs, labels

    def __call__(self, parameters):
        inputs, labels = self._batch
        return [(inputs @ parameters[0] - labels) @ inputs]


def make_train(mode, optimizer, batch, num_parameters=0):
    images, labels = peer.batch_of(num_parameters, batch)
    xs, ys = (np.array_split(array, COUNT) for array in (images, labels))
    with strategy.scope():
        variables = [ar.Variable(array) for array in peer.start_of(num_parameters)]
        settings = {"epsilon": peer.EPSILON} if optimizer == "Adam" else {}
        rule = getattr(ar.optimizers, optimizer)(peer.LEARNING_RATE[optimizer], **settings)
    network = Linear if num_parameters else NETWORKS[LIBRARY]
    programs = ar.PerReplica([network(x, y) for x, y in zip(xs, ys, strict=True)])
    sizes = ar.PerReplica(list(map(len, ys)))

    def differentiate(program, size):
        found = program([variable.value for variable in variables])
        return [
            (ar.Weighted(gradient, size), variable)
            for gradient, variable in zip(found, variables, strict=True)
        ]

    async def awaited(program, size):
        if num_parameters:  # too little work for a way to another thread
            pairs = differentiate(program, size)
        else:
            ctx = ar.get_replica_context()
            pairs = await ctx.run_on_device(differentiate, program, size)
        await rule.apply_gradients(pairs)

    def plain(program, size):
        rule.blocking.apply_gradients(differentiate(program, size))

    def looped(_ctx, program, size):
        rule.blocking.apply_gradients(differentiate(program, size))

    parts = (programs, sizes)
    calls = {
        "run": lambda: strategy.run(awaited, args=parts),
        "plain steps": lambda: strategy.run(plain, args=parts),
    }
    num_steps = SMALL_STEPS if num_parameters else LOOP_STEPS

    def loop(count):
        return strategy.run_steps(looped, [parts] * count, count)

    is_loop = mode == "run_steps"
    return peer.Work(
        partial(loop, num_steps) if is_loop else calls[mode],
        num_steps if is_loop else 1,
        checked=partial(loop, LOOP_STEPS) if is_loop else None,
        num_checked=LOOP_STEPS,
        parameters=lambda: [variable.value for variable in variables],
        images=images,
        labels=labels,
    )


def make_failure(_mode, kind):
    seen = []

    async def replica():
        ctx = ar.get_replica_context()
        index = ctx.replica_id_in_sync_group
        if kind == "exception" and index == 1:
            raise ValueError("replica 1 fails")
        await ctx.merge_call(lambda strategy: None)
        if kind == "mismatch" and index == 1:
            await ctx.merge_call(lambda strategy: None)

    async def call():
        try:
            await strategy.run(replica)
        except (ValueError, RuntimeError, ExceptionGroup) as error:
            seen[:] = [f"{type(error).__name__}: {error}"]

    return peer.Work(call, report=lambda: seen[0])


with contextlib.suppress(BrokenPipeError):
    peer.serve(make, partial(strategy.__aenter__))
