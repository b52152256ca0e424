"""Sharding of input over the workers of one sync group: by files, by data, or off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import TypeVar, final

from ..tree import Tree
from ._iterables import iterable_source
from ._source import Source

T = TypeVar("T")


@final
class Files:
    """Source of the items that `read(path)` yields for each path in turn.

    Args:
        paths: Files in the order to read them.
        read: Returns an iterable for a path, such as a generator; it is closed before the next
            file is opened.

    Raises:
        ValueError: If there is no path.
        TypeError: If `paths` is a single path or `read` is not a function.

    Example:
        >>> files = Files(["a", "b"], lambda path: [path + "1", path + "2"])
        >>> list(files)
        ['a1', 'a2', 'b1', 'b2']
    """

    def __init__(
        self,
        paths: Sequence[str | PathLike[str]],
        read: Callable[[str | PathLike[str]], Iterable[object]],
    ) -> None:
        if isinstance(paths, (str, bytes, PathLike)):
            raise TypeError(f"Files takes a list of paths, got {paths!r}. Write [{paths!r}].")
        if not callable(read):
            raise TypeError(f"read must be a function of a path, got {read!r}.")
        self._paths = tuple(paths)
        if not self._paths:
            raise ValueError("Files needs at least one path, got none.")
        self._read = read

    @property
    def paths(self) -> tuple[str | PathLike[str], ...]:
        """The files, in order."""
        return self._paths

    def shard(self, num_input_pipelines: int, input_pipeline_id: int) -> Files:
        """Return the files of one worker: every n-th one.

        Raises:
            ValueError: If there are fewer files than workers.
        """
        return Files(shard_items(self._paths, num_input_pipelines, input_pipeline_id), self._read)

    def __iter__(self) -> Iterator[Tree]:
        """Yield what the files hold."""
        for path in self._paths:
            found = iter(self._read(path))
            try:
                yield from found
            finally:
                close = getattr(found, "close", None)
                if callable(close):
                    close()

    def __repr__(self) -> str:
        return f"<Files | {len(self._paths)} from {self._paths[0]}>"


def files_source(files: Files) -> Source:
    """Return Files as a source; its offset counts items over all files."""
    source = iterable_source(files, lambda: files, is_async=False)
    names = [str(path) for path in files.paths]
    return replace(source, label=repr(files), identity=lambda: ("Files", *names))


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


def chosen_sharding(sharding: str, dataset: object, source: Source, num_workers: int) -> str:
    """Return how a dataset is shared out over workers: what was asked for, or fits.

    Raises:
        ValueError: If it was left open, and nothing fits.
    """
    if sharding != "auto":
        return sharding
    if num_workers == 1:
        return "off"
    if isinstance(dataset, Files) and len(dataset.paths) >= num_workers:
        return "file"
    if source.differs:
        raise ValueError(
            f"{source.label} {source.differs}, so it can be shared out over {num_workers} workers "
            "neither by file nor by example. Pass InputOptions(sharding='off') to let each worker "
            "use all that it reads, or sharding='data' if all of them read the same batches."
        )
    return "data"


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


def describe(
    mode: str, label: str, num_input_pipelines: int, input_pipeline_id: int, *, is_auto: bool
) -> str:
    """Return a line that says what a worker reads."""
    by = " (chosen by 'auto')" if is_auto else ""
    who = f"worker {input_pipeline_id} of {num_input_pipelines}"
    what = {
        "off": "reads all of it, and splits each batch over its own replicas",
        "data": "reads all of it, and takes its own replicas' parts of each global batch",
        "file": "reads its own share of the files",
    }[mode]
    return f"{label}: sharding {mode!r}{by}, {who} {what}."
