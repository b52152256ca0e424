"""The same training as a program of jax by hand and as compiled steps of the library.

By hand it is what a user of jax writes: `shard_map` over the devices, `psum` of the gradients, a
`lax.scan` over the stacked batches or a call for each, buffers donated. Both begin with the batches
as NumPy arrays, and end when the weights and the loss of the last step are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import aioreplica as ar

Array = npt.NDArray[Any]
CHUNK, NUM_CHUNKS = 64, 8
"""Steps of a chunk, after which the weights are there for everybody, and chunks of a sample."""

RATES = {"SGD": 0.01, "Adam": 0.001}
EPSILON = 1e-8
"""Of Adam, beside the root of the unbiased mean: in another place or size it moves weights with a
tiny gradient by half a rate less or more."""


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One model and how it is trained.

    Attributes:
        name: Of the model.
        sizes: Of its layers; the first is that of an example.
        batch_size: Examples of a step, over all replicas.
        num_replicas: How many replicas share them.
        optimizer: "SGD" or "Adam".
    """

    name: str
    sizes: tuple[int, ...]
    batch_size: int
    num_replicas: int
    optimizer: str

    def weights(self) -> list[Array]:
        """Return the weights to begin with."""
        rng = np.random.default_rng(0)
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return [(rng.normal(size=p) / np.sqrt(p[0])).astype(np.float32) for p in pairs]

    def batches(self) -> list[tuple[list[Array], list[Array]]]:
        """Return the batches of a chunk: a part of images and labels for each replica."""
        rng = np.random.default_rng(1)
        found = []
        for _ in range(CHUNK):
            x = rng.normal(size=(self.batch_size, self.sizes[0])).astype(np.float32)
            y = rng.integers(0, self.sizes[-1], self.batch_size).astype(np.int32)
            found.append((np.split(x, self.num_replicas), np.split(y, self.num_replicas)))
        return found


def loss_of(weights: Sequence[Any], x: Any, y: Any) -> Any:
    """Return the summed cross entropy of a network."""
    *hidden, last = weights
    for weight in hidden:
        x = jnp.maximum(x @ weight, 0)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x @ last), y[:, None], axis=1)
    return -jnp.sum(chosen)


@final
class ByHand:
    """A training written with jax alone.

    Args:
        case: What is trained.
        scans: Whether one call runs a chunk of steps.
        kind: Of the devices, as jax names it.
    """

    def __init__(self, case: Case, *, scans: bool, kind: str = "cpu") -> None:
        self._case, self._scans = case, scans
        self._mesh = Mesh(np.array(jax.devices(kind)[: case.num_replicas]), ("i",))
        zeros = [np.zeros_like(w) for w in case.weights()] if case.optimizer == "Adam" else []
        carry = (case.weights(), zeros, [each.copy() for each in zeros], np.float32(0))
        self._carry = jax.device_put(carry, NamedSharding(self._mesh, Spec()))
        self._call = jax.jit(
            jax.shard_map(
                self._run,
                mesh=self._mesh,
                in_specs=(Spec(), Spec("i"), Spec("i")),
                out_specs=(Spec(), Spec("i")),
                check_vma=False,
            ),
            donate_argnums=0,
        )
        self._batches = case.batches()

    async def sample(self, num_chunks: int = NUM_CHUNKS) -> float:
        """Run some chunks of steps; return the microseconds of each step."""
        begin = perf_counter()
        for _ in range(num_chunks):
            self._run_chunk()
        return (perf_counter() - begin) / CHUNK / num_chunks * 1e6

    def _run_chunk(self) -> None:
        if self._scans:
            columns = list(zip(*self._batches, strict=True))
            x, y = (
                self._put([np.stack(parts) for parts in zip(*column, strict=True)])
                for column in columns
            )
            self._carry, loss = self._call(self._carry, x, y)
        else:
            for parts in self._batches:
                self._carry, loss = self._call(self._carry, *map(self._put, parts))
                if self._case.num_replicas > 1:  # several in flight may end the process
                    jax.block_until_ready(self._carry)
        jax.block_until_ready(self._carry)
        np.asarray(loss)

    @property
    def weights(self) -> list[Array]:
        """The weights now."""
        return [np.asarray(each) for each in self._carry[0]]

    def _put(self, parts: Sequence[Array]) -> Any:
        devices = self._mesh.devices.flat
        shards = [jax.device_put(p[None], d) for p, d in zip(parts, devices, strict=True)]
        shape = (len(parts), *parts[0].shape)
        sharding = NamedSharding(self._mesh, Spec("i"))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _run(self, carry: Any, x: Any, y: Any) -> tuple[Any, Any]:
        if self._scans:
            carry, losses = jax.lax.scan(self._step, carry, (x[0], y[0]))
            return carry, losses[None, -1]
        carry, loss = self._step(carry, (x[0], y[0]))
        return carry, loss[None]

    def _step(self, carry: Any, batch: Any) -> tuple[Any, Any]:
        weights, first, second, step = carry
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        if self._case.num_replicas > 1:
            gradients = jax.lax.psum(gradients, "i")
        gradients = [each / self._case.batch_size for each in gradients]
        rate, step = RATES[self._case.optimizer], step + 1
        if self._case.optimizer == "SGD":
            moved = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
            return (moved, first, second, step), loss
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, gradients, strict=True)]
        root = jnp.sqrt(1 - 0.999**step)
        rate, epsilon = rate * root / (1 - 0.9**step), EPSILON * root
        moved = [
            w - rate * m / (jnp.sqrt(v) + epsilon)
            for w, m, v in zip(weights, first, second, strict=True)
        ]
        return (moved, first, second, step), loss


@final
class Ours:
    """The same as compiled steps.

    Args:
        case: What is trained.
        strategy: Its replicas.
    """

    def __init__(self, case: Case, strategy: ar.Strategy) -> None:
        with strategy.scope():
            self.variables = [ar.Variable(each) for each in case.weights()]
            kind = getattr(ar.optimizers, case.optimizer)
            settings = {"epsilon": EPSILON} if case.optimizer == "Adam" else {}
            self._optimizer = kind(RATES[case.optimizer], **settings)
        self._strategy = strategy
        self._batches = [(ar.PerReplica(x), ar.PerReplica(y)) for x, y in case.batches()]
        self._step = self._new_step()

    def _new_step(self) -> Callable[..., None]:
        variables, optimizer = self.variables, self._optimizer

        def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
            def loss() -> ar.Weighted:
                return ar.Weighted(loss_of([each.value for each in variables], x, y), len(x))

            value = optimizer.blocking.minimize(loss, variables, backend="jax")
            ctx.set_last_step_output("loss", value.total)

        return step

    async def sample(self, num_chunks: int = NUM_CHUNKS) -> float:
        """Run some chunks of steps; return the microseconds of each step."""
        begin = perf_counter()
        count = num_chunks * CHUNK
        batches = iter(self._batches * num_chunks)
        await self._strategy.run_steps(self._step, batches, count, compile="jax", every=CHUNK)
        return (perf_counter() - begin) / count * 1e6

    @property
    def weights(self) -> list[Array]:
        """The weights now."""
        return [each.value for each in self.variables]
