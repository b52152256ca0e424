"""Chunks of 64 steps: compiled by aioreplica, and programs of jax by hand.

The second argument is jax; how it is done comes with each request.
"""

import contextlib
import sys
from functools import partial

COUNT = int(sys.argv[1])

import aioreplica as ar

ar.set_logical_devices("cpu", max(2, COUNT))  # before jax is imported

import _serve as peer
import numpy as np

from benchmarks._compiled_programs import CHUNK, NUM_CHUNKS, ByHand, Case, Ours
from benchmarks.compiled import MLP, SMALL
from benchmarks.peers._cases import SCAN

SIZES = {"MLP": MLP, "small model": SMALL}
strategy = ar.MirroredStrategy(ar.list_devices("cpu")[:COUNT])


def make(task, mode, model, optimizer, batch):
    case = Case(model, SIZES[model], batch, COUNT, optimizer)
    training = ByHand(case, scans=mode == SCAN) if mode else Ours(case, strategy)
    images, labels = (np.concatenate(parts) for parts in case.batches()[0])

    def parameters():  # the check is of a network with biases
        pairs = ((weight, np.zeros(weight.shape[1])) for weight in training.weights)
        return [array for pair in pairs for array in pair]

    return peer.Work(
        training.sample,
        CHUNK * NUM_CHUNKS,
        checked=partial(training.sample, 1),
        num_checked=CHUNK,
        parameters=parameters,
        images=images,
        labels=labels,
    )


with contextlib.suppress(BrokenPipeError):
    peer.serve(make, partial(strategy.__aenter__))
