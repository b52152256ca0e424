"""aioreplica: awaited runs, plain steps and device loops, gradients by hand in NumPy."""

import contextlib
import sys
from functools import partial

import _serve as peer
import numpy as np

import aioreplica as ar
from benchmarks._mlp import Backprop

COUNT = int(sys.argv[1])
MERGES = 100
REDUCTIONS = 10
LOOP_STEPS = 10
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


class Linear:
    """Differentiates the sum of half the squares of a linear model."""

    def __call__(self, parameters, inputs, labels):
        return [(inputs @ parameters[0] - labels) @ inputs]


def make_train(mode, optimizer, batch, num_parameters=0):
    images, labels = peer.batch_of(num_parameters, batch)
    xs, ys = (np.array_split(array, COUNT) for array in (images, labels))
    with strategy.scope():
        variables = [ar.Variable(array) for array in peer.start_of(num_parameters)]
        settings = {"epsilon": peer.EPSILON} if optimizer == "Adam" else {}
        rule = getattr(ar.optimizers, optimizer)(peer.LEARNING_RATE[optimizer], **settings)
    programs = [Linear() if num_parameters else Backprop(len(x)) for x in xs]
    parts = tuple(map(ar.PerReplica, (programs, xs, ys)))

    def differentiate(program, x, y):
        found = program([variable.value for variable in variables], x, y)
        return [
            (ar.Weighted(gradient, len(y)), variable)
            for gradient, variable in zip(found, variables, strict=True)
        ]

    async def awaited(program, x, y):
        if num_parameters:  # too little work for a way to another thread
            pairs = differentiate(program, x, y)
        else:
            ctx = ar.get_replica_context()
            pairs = await ctx.run_on_device(differentiate, program, x, y)
        await rule.apply_gradients(pairs)

    def plain(program, x, y):
        rule.blocking.apply_gradients(differentiate(program, x, y))

    def looped(_ctx, program, x, y):
        rule.blocking.apply_gradients(differentiate(program, x, y))

    calls = {
        "run": lambda: strategy.run(awaited, args=parts),
        "plain steps": lambda: strategy.run(plain, args=parts),
        "run_steps": lambda: strategy.run_steps(looped, [parts] * LOOP_STEPS, LOOP_STEPS),
    }
    return peer.Work(
        calls[mode],
        LOOP_STEPS if mode == "run_steps" else 1,
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
