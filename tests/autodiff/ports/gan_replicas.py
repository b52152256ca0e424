"""A GAN of points on a ring: two networks, two optimizers, one loss scale, on several replicas."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import aioreplica as ar


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2),
        nn.Linear(16, outputs),
    )  # fmt: skip


def bce(scores: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        scores, torch.full_like(scores, label), reduction="sum"
    )


async def train(
    strategy: ar.Strategy, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    with strategy.scope():
        generator = ar.autodiff.torch_module(network(4, 2), name="generator")
        discriminator = ar.autodiff.torch_module(network(2, 1), name="discriminator")
        scale = ar.optimizers.DynamicLossScale(1024.0, growth_interval=3)
        generator_optimizer = ar.optimizers.Adam(0.001, loss_scale=scale)
        discriminator_optimizer = ar.optimizers.Adam(0.001, loss_scale=scale)

    async def step(real: np.ndarray, noise: np.ndarray) -> None:
        def discriminator_loss() -> ar.Weighted:
            fake = generator(noise).detach()
            loss = bce(discriminator(real), 1.0) + bce(discriminator(fake), 0.0)
            return ar.Weighted(loss, len(real))

        await discriminator_optimizer.minimize(discriminator_loss, discriminator.variables)

        def generator_loss() -> ar.Weighted:
            loss = bce(discriminator(generator(noise)), 1.0)
            return ar.Weighted(loss, len(noise))

        await generator_optimizer.minimize(generator_loss, generator.variables)

    async with strategy.distribute_dataset(batches) as dataset:
        async for batch in dataset:
            await strategy.run(step, args=batch)
    return [generator.state_dict(), discriminator.state_dict()]
