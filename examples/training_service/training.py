"""How a job is trained: the model, its step, and the loop that saves it in the background."""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import autograd.numpy as np
from numpy.typing import NDArray

import aioreplica as ar
from aioreplica.checkpoint import Storage
from aioreplica.errors import CheckpointError

from .faults import is_passing
from .programs import Program, stride_of

Array = NDArray[Any]


class Training:
    """A classifier with one hidden layer, its optimizer, its data, and the curve of its loss.

    Made in the scope of a strategy. Everything that a step changes is in `state`, and all of it is
    changed by the step itself, the curve too: a checkpoint is a cut between two steps.
    """

    def __init__(self, settings: Any, data: tuple[Array, Array]) -> None:
        examples, labels = data
        rng = np.random.default_rng(settings.seed)
        sizes = (examples.shape[1], settings.hidden, int(labels.max()) + 1)
        self.settings = settings
        self.batches = ar.ArrayDataset(
            (examples, labels), settings.batch_size, shuffle=True, seed=settings.seed
        )
        self.weights = [
            ar.Variable(rng.normal(0, fan_in**-0.5, (fan_in, fan_out)), name=f"weights{layer}")
            for layer, (fan_in, fan_out) in enumerate(pairwise(sizes))
        ]
        self.biases = [ar.Variable(np.zeros(n), name=f"bias{i}") for i, n in enumerate(sizes[1:])]
        self.optimizer = ar.optimizers.Adam(
            settings.learning_rate, loss_scale=ar.optimizers.DynamicLossScale()
        )
        self.num_steps = settings.epochs * len(self.batches)
        self.stride = stride_of(self.num_steps)
        self.losses = np.full(-(-self.num_steps // self.stride), np.nan)
        self.place: dict[str, Any] = {"step": 0, "sum": 0.0}  # of losses that have no value yet
        self.report: Callable[[], None] = lambda: None

    @property
    def step_number(self) -> int:
        """How many steps are done."""
        return int(self.place["step"])

    def state(self, dataset: Any) -> dict[str, Any]:
        """What a checkpoint has to hold for the next step to be the same in every bit.

        The numbers of `ctx.rng` follow from the step's number, which is saved with the variables.
        """
        return {
            "weights": self.weights,
            "biases": self.biases,
            "optimizer": self.optimizer,  # its slots and loss scale too
            "dataset": dataset,
            "losses": self.losses,
            "place": self.place,
        }

    async def step(self, examples: Array, labels: Array) -> None:
        """Train on a replica's part of a batch."""
        ctx = ar.get_replica_context()
        kept = 1 - self.settings.dropout
        mask = ctx.rng("dropout").random((len(labels), self.settings.hidden)) < kept
        loss = await self.optimizer.minimize(lambda: self.loss(examples, labels, mask / kept))
        total = await ctx.all_reduce("sum", loss)
        if ctx.replica_id_in_sync_group == 0:
            self.count(float(total.mean()))
            self.report()

    def count(self, loss: float) -> None:
        """Write the loss of a step down; a value of the curve when it is complete."""
        place = self.place
        place["step"] += 1
        place["sum"] = place.get("sum", 0.0) + loss
        done = place["step"]
        num_summed = done % self.stride or self.stride
        if num_summed == self.stride or done == self.num_steps:
            self.losses[(done - 1) // self.stride] = place["sum"] / num_summed
            place["sum"] = 0.0

    def loss(self, examples: Array, labels: Array, mask: Array) -> ar.Weighted:
        """Cross entropy, summed, and the number of examples: the parts may differ in size."""
        hidden = np.dot(examples, self.weights[0].value) + self.biases[0].value
        scores = np.dot(np.maximum(hidden, 0) * mask, self.weights[1].value) + self.biases[1].value
        highest = np.max(scores, axis=1, keepdims=True)
        log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
        return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))

    def digest(self) -> str:
        """A hash of the model: equal exactly if it is equal in every bit."""
        digest = hashlib.sha256()
        for variable in [*self.weights, *self.biases]:
            digest.update(variable.value.tobytes())
        return digest.hexdigest()


async def train(
    program: Program,
    settings: Any,
    storage: Storage,
    devices: tuple[str, ...],
    *,
    turn: Callable[[], AbstractAsyncContextManager[None]],
    begin: Callable[[Training, int | None], None],
    grace_s: float,
    saved: Callable[[], Awaitable[None]],
    not_saved: Callable[[Exception, int], Awaitable[None]],
) -> Training:
    """Train from the newest checkpoint in a storage to the end.

    Args:
        program: What to train.
        settings: Those of the program.
        storage: Has the checkpoints.
        devices: Where.
        turn: Waits for the devices, and holds them for a step.
        begin: Called before the first step, with the step that was restored.
        grace_s: How long the step under way may take when the training is cancelled.
        saved: Waited for once a checkpoint is known to be saved.
        not_saved: Waited for after one that was not saved because the machine lacks something,
            such as room; with the count of those in turn. Training goes on, and the state at the
            end is tried again.

    Cancellation:
        The step under way ends, and what it has changed is saved.
    """
    data = await ar.run_on_host(program.load, settings)
    async with ar.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            training = Training(settings, data)
        async with (
            ar.CheckpointManager(storage, max_to_keep=2) as manager,
            strategy.distribute_dataset(training.batches) as dataset,
        ):
            state = training.state(dataset)
            begin(training, await manager.restore(state) if manager.steps() else None)

            async def next_step(batches: Any) -> bool:
                """Train on the next batch, if there is one. Devices first, then the batch."""
                async with turn():
                    batch = await anext(batches, None)
                    if batch is None:
                        return False
                    options = ar.RunOptions(seed=settings.seed)
                    await strategy.run(training.step, batch, options=options)
                    return True

            failures, is_behind = 0, False  # one is being saved in the background

            async def save(*, wait: bool) -> bool:
                nonlocal failures, is_behind
                try:
                    await manager.save(training.step_number, state, wait=wait)
                except CheckpointError as error:
                    if not is_passing(error):
                        raise
                    failures, is_behind = failures + 1, False
                    await not_saved(error, failures if wait else 0)
                    return False
                failures = 0
                for _ in range(is_behind + wait):
                    await saved()
                is_behind = not wait
                return True

            async def work() -> None:
                for _ in range(dataset.epoch, settings.epochs):
                    batches = aiter(dataset)
                    while await next_step(batches):
                        if training.step_number % settings.save_every == 0:
                            await save(wait=False)
                while not await save(wait=True):
                    pass

            await manager.save_on_cancel(
                work(), state, lambda: training.step_number, grace_s=grace_s
            )
    return training
