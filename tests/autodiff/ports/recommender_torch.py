"""A recommender that factorizes ratings, with sparse gradients of embeddings, in one process."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

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


def train(batches: Sequence[tuple[np.ndarray, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.1, eps=1e-7
    )
    for users, items, ratings in batches:
        optimizer.zero_grad()
        scores = model(torch.tensor(users), torch.tensor(items))
        loss = nn.functional.mse_loss(scores, torch.tensor(ratings))
        loss.backward()
        optimizer.step()
    return model.state_dict()
