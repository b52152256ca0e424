"""A small transformer with dropout that learns the next token, in one process.

Each batch is taken in parts, and each part has a seed of its own.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

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


def train(
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    num_parts: int,
    seed_of: Callable[[int, int], int],
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        parts = zip(
            np.array_split(inputs, num_parts), np.array_split(targets, num_parts), strict=True
        )
        for part, (some, wanted) in enumerate(parts):
            torch.manual_seed(seed_of(number, part))
            scores = model(torch.tensor(some))
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1), torch.tensor(wanted).flatten(), reduction="sum"
            )
            (loss / targets.size).backward()
        optimizer.step()
    return model.state_dict()
