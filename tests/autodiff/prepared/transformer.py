"""A transformer with accumulated and clipped gradients, in one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens)))


def make():
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (48, 6))
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(tokens), batch_size=8)


def train(model, optimizer, loader):
    for number, (tokens,) in enumerate(loader):
        loss = cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]) / 2
        if number % 2 == 0:
            loss.backward()
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def main():
    model, optimizer, loader = make()
    train(model, optimizer, loader)
    return model
