"""How a job is trained: the model, its step, and the loop that saves it in the background."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import autograd.numpy as np
from numpy.typing import NDArray

import aioreplica as ar

from .programs import Program

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
        self.losses = np.full(self.num_steps, np.nan)
        self.place = {"step": 0}
        self.report: Callable[[], None] = lambda: None

    @property
    def step_number(self) -> int:
        """How many steps are done."""
        return self.place["step"]

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
            self.losses[self.place["step"]] = total.mean()
            self.place["step"] += 1
            self.report()

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
    folder: Path,
    devices: tuple[str, ...],
    *,
    turn: Callable[[], AbstractAsyncContextManager[None]],
    begin: Callable[[Training, int | None], None],
) -> Training:
    """Train from the newest checkpoint in a folder to the end.

    Args:
        program: What to train.
        settings: Those of the program.
        folder: Has the checkpoints.
        devices: Where.
        turn: Waits for the devices, and holds them for a step.
        begin: Called before the first step, with the step that was restored.

    Cancellation:
        The step under way ends, and what it has changed is saved.
    """
    data = await ar.run_on_host(program.load, settings)
    async with ar.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            training = Training(settings, data)
        async with (
            ar.CheckpointManager(folder, max_to_keep=2) as manager,
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

            async def work() -> None:
                for _ in range(dataset.epoch, settings.epochs):
                    batches = aiter(dataset)
                    while await next_step(batches):
                        if training.step_number % settings.save_every == 0:
                            await manager.save(training.step_number, state, wait=False)
                await manager.save(training.step_number, state)

            await manager.save_on_cancel(work(), state, lambda: training.step_number)
    return training
