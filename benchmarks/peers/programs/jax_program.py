"""JAX: one jitted program over devices of the host, with shard_map."""

import contextlib
import os
import sys

COUNT = int(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={COUNT}"
os.environ["JAX_PLATFORMS"] = "cpu"

import _serve as peer
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PSUMS = 100
mesh = Mesh(np.array(jax.devices()), ("r",))
split, whole = NamedSharding(mesh, P("r")), NamedSharding(mesh, P())


def make(task, mode, **settings):
    return globals()[f"make_{task}"](**settings)


def make_merge():
    def replica(x):
        for _ in range(PSUMS):  # chained, so that none can be left out
            x = jax.lax.psum(x * (1 / COUNT), "r") + 1e-6 * x
        return x

    function = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=P("r"), out_specs=P("r")))
    value = jax.device_put(jnp.ones(COUNT), split)
    return peer.Work(lambda: jax.block_until_ready(function(value)), PSUMS * COUNT)


def make_run():
    function = jax.jit(jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P("r"), out_specs=P("r")))
    value = jax.device_put(jnp.ones(COUNT), split)
    return peer.Work(lambda: jax.block_until_ready(function(value)))


def make_all_reduce(size):
    function = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "r"),
            mesh=mesh, in_specs=P("r"), out_specs=P(), check_vma=False,
        )
    )  # fmt: skip
    ones = jax.jit(lambda: jnp.ones(COUNT * size // 4, jnp.float32), out_shardings=split)()
    return peer.Work(lambda: jax.block_until_ready(function(ones)))


def make_train(optimizer, batch, num_parameters=0):
    images, labels = peer.batch_of(num_parameters, batch)
    batch = len(images)
    rate = peer.LEARNING_RATE[optimizer]
    rule = optax.sgd(rate) if optimizer == "SGD" else optax.adam(rate, eps=peer.EPSILON)

    def network(values, x, y):
        for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
            x = jax.nn.relu(x @ weight + bias)
        scores = x @ values[-2] + values[-1]
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).sum() / batch

    def linear(values, x, y):
        return jnp.square(x @ values[0] - y).sum() / 2 / batch

    loss = linear if num_parameters else network

    def replica(values, state, x, y):
        value, gradients = jax.value_and_grad(loss)(values, x, y)
        value, gradients = jax.lax.psum((value, gradients), "r")
        updates, state = rule.update(gradients, state, values)
        return optax.apply_updates(values, updates), state, value

    function = jax.jit(
        jax.shard_map(
            replica, mesh=mesh, in_specs=(P(), P(), P("r"), P("r")), out_specs=(P(), P(), P()),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )  # fmt: skip
    values = jax.device_put(peer.start_of(num_parameters), whole)
    held = [values, jax.device_put(rule.init(values), whole)]
    x, y = jax.device_put(images, split), jax.device_put(labels, split)

    def call():
        *held[:], value = function(*held, x, y)
        jax.block_until_ready((held, value))

    return peer.Work(call, parameters=lambda: held[0], images=images, labels=labels)


with contextlib.suppress(BrokenPipeError):
    peer.serve(make)
