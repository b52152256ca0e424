"""Support of torch's DataLoader beyond its being an iterable; never imports torch."""

from __future__ import annotations

import sys
import warnings
from typing import Any

CURE = (
    "Use torchdata's StatefulDataLoader, which keeps its own state; or a sampler whose order "
    "follows from the epoch; or ar.ArrayDataset(..., shuffle=True)."
)


def warn_if_shuffled(dataset: Any) -> None:
    """Warn if `dataset` is a DataLoader that will not give again what it gave before.

    Reading it again up to a place then skips examples that were not seen, and repeats others.
    """
    torch = sys.modules.get("torch.utils.data")
    if torch is None or not isinstance(dataset, torch.DataLoader):
        return
    sampler = dataset.sampler
    random = (torch.RandomSampler, torch.SubsetRandomSampler, torch.WeightedRandomSampler)
    if isinstance(sampler, random):
        warnings.warn(
            f"The DataLoader draws its order anew in each pass ({type(sampler).__name__}), so "
            f"going on in the middle of one repeats some examples and skips others. {CURE}",
            UserWarning,
            stacklevel=4,
        )


def shut_down_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, which has no public method for it.

    Without it they live as long as the iterator, which the traceback of an error keeps. Workers
    that the user wants to persist belong to the loader, which uses them again.
    """
    torch = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(torch, "_MultiProcessingDataLoaderIter", None)
    if kind is None or not isinstance(iterator, kind):
        return
    if not getattr(iterator, "_persistent_workers", False):
        iterator._shutdown_workers()
