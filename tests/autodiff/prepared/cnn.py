"""A convolutional network with batch norm, a GradScaler and a OneCycle schedule, in one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def make():
    torch.manual_seed(0)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(0, 4, (48,))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(images, labels), batch_size=16)


def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
    for _ in range(3):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()


def main():
    model, optimizer, loader = make()
    train(model, optimizer, loader)
    return model
