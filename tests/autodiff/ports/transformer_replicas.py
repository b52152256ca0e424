"""A small transformer with dropout that learns the next token, on several replicas.

Each replica's seeds are those of its steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import aioreplica as ar

VOCABULARY, WIDTH, LENGTH = 17, 16, 8


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("places", torch.sin(torch.arange(LENGTH * WIDTH).reshape(LENGTH, -1)))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.dropout(self.tokens(tokens) + self.places)
        return self.out(self.layers(x, mask, is_causal=True))


async def train(
    strategy: ar.Strategy, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope():
        model = ar.autodiff.torch_module(Transformer())
        optimizer = ar.optimizers.SGD(0.05, momentum=0.9)

    async def step(some: np.ndarray, wanted: np.ndarray) -> None:
        def loss() -> ar.Weighted:
            scores = model(some)
            total = nn.functional.cross_entropy(
                scores.flatten(0, 1), torch.tensor(wanted).flatten(), reduction="sum"
            )
            return ar.Weighted(total, wanted.size)

        await optimizer.minimize(loss, model.variables)

    async with strategy.distribute_dataset(batches) as dataset:
        async for batch in dataset:
            await strategy.run(step, args=batch)
    return model.state_dict()
