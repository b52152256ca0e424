"""A toy model of two layers, like that of torch's tutorial on DDP, on several replicas."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import aioreplica as ar


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


async def train(
    strategy: ar.Strategy, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope():
        model = ar.autodiff.torch_module(ToyModel())
        optimizer = ar.optimizers.SGD(0.05)

    async def step(inputs: np.ndarray, labels: np.ndarray) -> None:
        def loss() -> ar.Weighted:
            outputs = model(inputs)
            total = nn.functional.mse_loss(outputs, torch.tensor(labels), reduction="sum")
            return ar.Weighted(total, labels.size)

        await optimizer.minimize(loss, model.variables)

    async with strategy.distribute_dataset(batches) as dataset:
        async for batch in dataset:
            await strategy.run(step, args=batch)
    return model.state_dict()
