"""Who reads what, where several workers feed one sync group: pure functions of worker numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MODES = ("off", "data", "file")


def shard_items(items: Sequence[T], num_input_pipelines: int, input_pipeline_id: int) -> list[T]:
    """Return the items of one worker: every n-th one, beginning with its own number.

    Raises:
        ValueError: If there are fewer items than workers, so that one would get nothing.

    Example:
        >>> shard_items(["a", "b", "c"], 2, 0)
        ['a', 'c']
    """
    if len(items) < num_input_pipelines:
        raise ValueError(
            f"{len(items)} files cannot be shared by {num_input_pipelines} workers: one would get "
            "nothing, and its replicas would wait for data. Write more files, or use "
            "sharding='data'."
        )
    return list(items[input_pipeline_id::num_input_pipelines])


def local_replicas(
    mode: str, num_input_pipelines: int, input_pipeline_id: int, num_local: int, num_in_sync: int
) -> tuple[int, range]:
    """Return over how many replicas a batch is split, and which of the parts are this worker's.

    With "data" every worker reads the same global batches and takes its own replicas' parts. With
    "off" and "file" a worker's batches are its own, and all of their parts are.

    Example:
        >>> local_replicas("data", 2, 1, 4, 8)
        (8, range(4, 8))
        >>> local_replicas("off", 2, 1, 4, 8)
        (4, range(0, 4))
    """
    if mode == "data":
        first = input_pipeline_id * num_local
        return num_in_sync, range(first, first + num_local)
    return num_local, range(num_local)


def describe(mode: str, label: str, num_input_pipelines: int, input_pipeline_id: int) -> str:
    """Return a line that says what a worker reads."""
    who = f"worker {input_pipeline_id} of {num_input_pipelines}"
    what = {
        "off": "reads all of it, and splits each batch over its own replicas",
        "data": "reads all of it, and takes its own replicas' parts of each global batch",
        "file": "reads its own share of the files",
    }[mode]
    return f"{label}: sharding {mode!r}, {who} {what}."
