"""A toy model of two layers, like that of torch's tutorial on DDP, in one process."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def train(batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in batches:
        optimizer.zero_grad()
        outputs = model(torch.tensor(inputs))
        loss = nn.functional.mse_loss(outputs, torch.tensor(labels))
        loss.backward()
        optimizer.step()
    return model.state_dict()
