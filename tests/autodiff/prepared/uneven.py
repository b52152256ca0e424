"""A loader with processes of its own, whose last batch is short, in one process."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def make(num_workers=1):
    torch.manual_seed(2)
    x, y = torch.randn(27, 4), torch.randn(27, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    context = "spawn" if num_workers else None
    loader = DataLoader(
        TensorDataset(x, y), 10, num_workers=num_workers, multiprocessing_context=context
    )
    return model, optimizer, loader


def train(model, optimizer, loader):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    model, optimizer, loader = make()
    train(model, optimizer, loader)
    return model
