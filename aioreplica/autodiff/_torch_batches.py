"""The batches of a loader, split over replicas that read them in a plain loop.

The first replica of a process reads, on its own thread, and brings the parts to a meeting; so a
replica that left the loop, or computes another number of steps, is found there.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..context import PLACE
from ..errors import ContextError
from ..input import split_sizes
from ..replica import BlockingCollectives, RunningReplica
from ..tree import Tree, flatten, paths, unflatten
from ..values import new_per_replica

if TYPE_CHECKING:
    from ._torch_replicas import Averaging

OVER = object()
"""In place of a batch: the epoch has no more."""


@final
class Batches:
    """One replica's parts of the batches that a loader gives.

    Args:
        loader: Source of global batches. The first replica of the process reads it, on its thread.
        averaging: That of the replica's module.
        num_local: How many replicas this process has.
    """

    def __init__(self, loader: Any, averaging: Averaging, num_local: int) -> None:
        self._loader = loader
        self._averaging = averaging
        self._num_local = num_local

    def __len__(self) -> int:
        """Return how many batches an epoch has.

        Raises:
            TypeError: If the loader has no length.
        """
        return len(self._loader)

    def __iter__(self) -> Iterator[Tree]:
        """Begin an epoch.

        Raises:
            ContextError: Outside a plain step function.
            OutOfSyncError: If the replicas' parameters differ, at its beginning or at its end.
            ValueError: If a batch has fewer examples than there are replicas, or workers read
                different batches: that is told when gradients are averaged, or at the end.
            TypeError: If a batch cannot be split.
        """
        replica = PLACE.get().replica
        if not isinstance(replica, RunningReplica):
            raise ContextError(
                f"Batches of ar.prepare were read in {PLACE.get().describe()}, but they are those "
                "of a replica. Read them in the plain function that strategy.run is given."
            )
        blocking = replica.blocking
        if blocking.num_replicas_in_sync == 1:
            yield from self._loader
            return
        if asyncio._get_running_loop() is not None:
            raise ContextError(
                "Batches of ar.prepare were read in an `async def` step, whose event loop would "
                "wait for the other replicas. Make the function that strategy.run is given a plain "
                "one; it runs on a thread of its own."
            )
        averaging = self._averaging
        averaging.begin_epoch()
        averaging.saw(_num_batches(self._loader))
        has_workers = blocking.num_replicas_in_sync > self._num_local
        averaging.check_in_sync(replica, "beginning of an epoch", takes_first_values=has_workers)
        reads_here = replica.local_replica_id == 0
        first = replica.replica_id_in_sync_group - replica.local_replica_id
        local: BlockingCollectives = blocking
        if has_workers:
            self._draw_as_worker_0(blocking, is_reader=reads_here)
            # Each worker reads by itself; what it reads is compared when gradients are averaged.
            local = blocking.group(range(first, first + self._num_local))
        reads = iter(self._loader) if reads_here else None
        while True:
            parts = _Parts(compares=has_workers)
            if reads is not None:
                parts.read(next(reads, OVER), blocking.num_replicas_in_sync, first)
            part, checksum = local.meet_as("next batch", _hand_out, (parts,), sys._getframe(1))
            averaging.saw(checksum)
            if part is OVER:
                break
            yield part
        averaging.check_in_sync(replica, "end of an epoch")

    def _draw_as_worker_0(self, blocking: Any, *, is_reader: bool) -> None:
        """Give the generators that a loader shuffles with the states they have on worker 0."""
        own = getattr(self._loader, "generator", None)
        generators = [torch.default_generator, *([own] if own is not None else [])]
        states = blocking.broadcast([each.get_state().numpy() for each in generators], 0)
        for generator, state in zip(generators, states, strict=True):
            if is_reader:
                generator.set_state(torch.tensor(state, device="cpu"))

    def __repr__(self) -> str:
        return f"<Batches of {type(self._loader).__name__} | a part for each replica>"


@final
class _Parts:
    """Parts of a batch that the first replica of a process brings for all; others bring none.

    Args:
        compares: Whether workers compare what they have read.
    """

    def __init__(self, *, compares: bool) -> None:
        self._compares = compares
        self._parts: Sequence[object] = ()
        self._first = self._fingerprint = 0

    def read(self, batch: object, num_replicas: int, first: int) -> None:
        """Split a batch; `first` is the replica that reads it."""
        self._parts = (OVER,) * num_replicas if batch is OVER else split(batch, num_replicas)
        self._first = first
        if self._compares:
            self._fingerprint = -1 if batch is OVER else fingerprint(batch)

    def of_process(self, num_local: int) -> tuple[Tree, ...]:
        """Return the parts of the replicas here, each with the fingerprint of the whole batch."""
        here = self._parts[self._first : self._first + num_local]
        return tuple((part, self._fingerprint) for part in here)


def _hand_out(_strategy: object, brought: Any) -> object:
    return new_per_replica(brought.values[0].of_process(len(brought.values)))


def fingerprint(batch: object) -> int:
    """Return a checksum of how many rows a batch has, and of its first and last ones."""
    found = 0
    for leaf in flatten(batch)[0]:
        found = zlib.crc32(_ends(leaf), zlib.crc32(str(tuple(leaf.shape)).encode(), found))
    return found


def _ends(leaf: Any) -> Any:
    """Return the first and the last row as bytes: of arrays that torch has no dtype for, too.

    Objects have none that are the same in all processes.
    """
    if isinstance(leaf, np.ndarray):
        return b"" if leaf.dtype.hasobject else leaf[[0, -1]].tobytes()
    rows = torch.as_tensor(leaf, device="cpu")[[0, -1]]
    return rows.contiguous().view(-1).view(torch.uint8).numpy().data


def _num_batches(loader: Any) -> int:
    """Return how many batches a loader says that it has; 0 if it does not say."""
    try:
        return len(loader)
    except TypeError:  # of an IterableDataset
        return 0


def split(batch: object, num_replicas: int) -> list[Tree]:
    """Cut the tensors and arrays of a batch along the leading axis, a part for each replica.

    Raises:
        TypeError: If it holds something else.
        ValueError: If leading axes differ, or are too short.
    """
    found, spec = flatten(batch)
    lengths = set()
    for i, leaf in enumerate(found):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) or leaf.ndim == 0:
            raise TypeError(
                f"A batch of ar.prepare is split over {num_replicas} replicas, but holds a "
                f"{type(leaf).__name__} without a leading axis at {paths(batch)[i] or 'its root'}, "
                f"{leaf!r:.80}. Have the loader's collate_fn give tensors or arrays whose first "
                "axis counts the examples; of lists, every element would have one."
            )
        lengths.add(leaf.shape[0])
    if len(lengths) != 1:
        raise ValueError(
            f"A batch of ar.prepare has leading axes of lengths {sorted(lengths)}. All of its "
            "tensors need one length, that of the batch."
        )
    (num_examples,) = lengths
    if num_examples < num_replicas:
        raise ValueError(_short_text(num_examples, num_replicas))
    parts, start = [], 0
    for size in split_sizes(num_examples, num_replicas):
        cut = slice(start, start + size)
        parts.append(unflatten(spec, [leaf[cut] for leaf in found]))
        start += size
    return parts


def require_loader(loader: object, num_replicas: int) -> None:
    """Check that batches can be read from a loader in every epoch, and split.

    Raises:
        TypeError: If it ends for good, or is none.
        ValueError: If it is split already, or a batch would be too short.
    """
    if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
        raise TypeError(
            "ar.prepare takes batches that can be read once per epoch, got "
            f"{type(loader).__name__}. Pass a DataLoader, a list, or an object with __iter__."
        )
    if not isinstance(loader, DataLoader):
        return
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "This DataLoader has a DistributedSampler, but ar.prepare splits each batch over the "
            "replicas itself. Pass one without it, with shuffle=True and global batches."
        )
    size, sampler = loader.batch_size, loader.sampler
    if size is None or not isinstance(sampler, Sized):
        return
    last = 0 if loader.drop_last else len(sampler) % size
    for short in (size, last):
        if 0 < short < num_replicas:
            raise ValueError(_short_text(short, num_replicas))


def _short_text(num_examples: int, num_replicas: int) -> str:
    return (
        f"A batch has {num_examples} examples for {num_replicas} replicas, and one without any has "
        "no loss. Make batches larger, or leave the last out with drop_last=True."
    )
