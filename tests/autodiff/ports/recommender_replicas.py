"""A recommender that factorizes ratings, with sparse gradients of its embeddings, on replicas."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import aioreplica as ar

USERS, ITEMS, WIDTH = 50, 30, 8


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.user_bias = nn.Embedding(USERS, 1, sparse=True)
        self.item_bias = nn.Embedding(ITEMS, 1, sparse=True)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scores = torch.sum(self.users(users) * self.items(items), 1)
        return scores + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0]


async def train(
    strategy: ar.Strategy, batches: Sequence[tuple[np.ndarray, ...]]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope():
        model = ar.autodiff.torch_module(Recommender())
        optimizer = ar.optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-7)

    async def step(users: np.ndarray, items: np.ndarray, ratings: np.ndarray) -> None:
        def loss() -> ar.Weighted:
            scores = model(users, items)
            total = nn.functional.mse_loss(scores, torch.tensor(ratings), reduction="sum")
            return ar.Weighted(total, len(ratings))

        await optimizer.minimize(loss, model.variables)

    async with strategy.distribute_dataset(batches) as dataset:
        async for batch in dataset:
            await strategy.run(step, args=batch)
    return model.state_dict()
