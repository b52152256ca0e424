"""Learn word embeddings from the text of this Python, with gradients of a few rows each.

    python examples/sparse_embeddings.py --replicas 4

A step predicts words from the words around them, and touches only the rows of the words it saw:
each replica sends those as `ar.IndexedSlices`, which are joined and added up row by row, so the
traffic does not grow with the vocabulary. The update is a plain gradient step.
"""

import argparse
import asyncio
import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import aioreplica as ar

Floats, Words = NDArray[np.float64], NDArray[np.int64]
WINDOW, NEGATIVES = 2, 4


@dataclass(frozen=True)
class Result:
    """What training leaves behind: a loss per epoch, the embeddings, and what was sent."""

    losses: list[float]
    vocabulary: list[str]
    embeddings: Floats
    rows_per_step: float

    def nearest(self, word: str, count: int = 4) -> list[str]:
        unit = self.embeddings / np.linalg.norm(self.embeddings, axis=1, keepdims=True)
        order = np.argsort(-unit @ unit[self.vocabulary.index(word)], kind="stable")
        return [self.vocabulary[i] for i in order[1 : count + 1]]


def load_words() -> list[str]:
    """Return the words of the documentation of some modules."""
    texts = []
    for module in (argparse, asyncio, contextlib, io, re):
        members = (getattr(module, name) for name in sorted(vars(module)))
        texts += [module.__doc__ or "", *(getattr(m, "__doc__", None) or "" for m in members)]
    return re.findall(r"[a-z]{2,}", " ".join(map(str, texts)).lower())


def examples_of(words: Sequence[str]) -> tuple[list[str], tuple[Words, Words]]:
    """Return the vocabulary, and (contexts, targets) of every place in the text."""
    counts = Counter(words)
    vocabulary = sorted(word for word, count in counts.items() if count >= 5)
    ids = {word: i for i, word in enumerate(vocabulary)}
    text = np.array([ids[word] for word in words if word in ids])
    around = [offset for offset in range(-WINDOW, WINDOW + 1) if offset]
    places = np.arange(WINDOW, len(text) - WINDOW)
    return vocabulary, (np.stack([text[places + o] for o in around], 1), text[places])


def sparse_gradients(
    inputs: Floats, outputs: Floats, contexts: Words, candidates: Words
) -> tuple[float, ar.IndexedSlices, ar.IndexedSlices]:
    """Return the loss and its gradients: candidates[:, 0] are right, the others are not."""
    hidden = inputs[contexts].mean(axis=1)
    vectors = outputs[candidates]
    scores = np.einsum("nd,ncd->nc", hidden, vectors)
    sign = np.where(np.arange(candidates.shape[1]) == 0, 1.0, -1.0)
    loss = np.sum(np.logaddexp(0, -sign * scores))
    slope = -sign / (1 + np.exp(sign * scores))
    of_hidden = np.einsum("nc,ncd->nd", slope, vectors) / contexts.shape[1]
    of_vectors = slope[:, :, None] * hidden[:, None, :]
    rows = np.repeat(of_hidden, contexts.shape[1], axis=0)
    return (
        float(loss),
        ar.IndexedSlices(rows, contexts.ravel(), inputs.shape),
        ar.IndexedSlices(of_vectors.reshape(-1, hidden.shape[1]), candidates.ravel(), inputs.shape),
    )


async def train(
    *, replicas: int = 4, epochs: int = 3, dimensions: int = 16, learning_rate: float = 0.05,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Result:  # fmt: skip
    """Train on the given number of CPU devices; `report` is told each epoch's number and loss."""
    vocabulary, data = examples_of(load_words())
    batches = ar.ArrayDataset(data, batch_size=64, shuffle=True, seed=0)
    rng = np.random.default_rng(0)
    losses: list[float] = []
    sent: list[int] = []
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            shape = (len(vocabulary), dimensions)
            inputs = ar.Variable(rng.normal(0, 0.3, shape), name="inputs")
            outputs = ar.Variable(rng.normal(0, 0.3, shape), name="outputs")

        async def step(contexts: Words, targets: Words) -> float:
            ctx = ar.get_replica_context()
            wrong = ctx.rng("negatives").integers(0, len(vocabulary), (len(targets), NEGATIVES))
            candidates = np.concatenate([targets[:, None], wrong], axis=1)
            loss, *gradients = await ctx.run_on_device(
                sparse_gradients, inputs.value, outputs.value, contexts, candidates
            )
            total, slices = await ctx.all_reduce("sum", (loss, gradients))
            if ctx.replica_id_in_sync_group == 0:
                sent.append(sum(len(part.indices) for part in slices))
            for variable, part in zip((inputs, outputs), slices, strict=True):
                await ctx.update(variable, subtract_rows, (part, learning_rate))
            return total

        async with strategy.distribute_dataset(batches) as train_set:
            for epoch in range(epochs):
                total = 0.0
                async for batch in train_set:
                    total += strategy.local_results(await strategy.run(step, args=batch))[0]
                losses.append(total / len(data[1]))
                report(epoch, losses[-1])
        await strategy.check_in_sync([inputs, outputs])
    return Result(losses, vocabulary, inputs.value, float(np.mean(sent)))


async def subtract_rows(variable: ar.Variable, part: ar.IndexedSlices, rate: float) -> None:
    new = variable.value.copy()
    new[part.indices] -= rate * part.values
    await variable.assign(new)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Learn word embeddings with sparse gradients.")
    parser.add_argument("--replicas", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args(arguments)
    ar.set_logical_devices("cpu", max(2, options.replicas))

    def show(epoch: int, loss: float) -> None:
        print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

    result = asyncio.run(train(replicas=options.replicas, epochs=options.epochs, report=show))
    print(f"rows sent per step: {result.rows_per_step:.0f} of {2 * len(result.vocabulary)}")
    for word in ("return", "object"):
        print(f"near {word!r}: {', '.join(result.nearest(word))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
