"""A GAN of points on a ring: two networks, two optimizers, one gradient scaler, in one process."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2),
        nn.Linear(16, outputs),
    )  # fmt: skip


def bce(scores: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def train(batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    generator = network(4, 2)
    discriminator = network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.001)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for real, noise in batches:
        discriminator_optimizer.zero_grad()
        fake = generator(torch.tensor(noise)).detach()
        loss = bce(discriminator(torch.tensor(real)), 1.0) + bce(discriminator(fake), 0.0)
        scaler.scale(loss).backward()
        scaler.step(discriminator_optimizer)

        generator_optimizer.zero_grad()
        loss = bce(discriminator(generator(torch.tensor(noise))), 1.0)
        scaler.scale(loss).backward()
        scaler.step(generator_optimizer)
        scaler.update()
    return [generator.state_dict(), discriminator.state_dict()]
