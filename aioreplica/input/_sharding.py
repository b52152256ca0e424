"""Sharding of input over the workers of one sync group: by files, by data, or off."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from os import PathLike
from typing import TypeVar, final

from ..tree import Tree, unflatten
from ._batches import BatchReader
from ._iterables import iterable_source
from ._options import InputContext, count_or_none
from ._source import Item, Pass, Source, Start

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

    def _rounds(self, num_shares: int) -> Generator[Tree, None, None]:
        """Yield an item of each share in turn, while every share has one: as workers read them.

        Example:
            >>> list(Files(["a", "b", "c"], lambda path: [path + "1", path + "2"])._rounds(2))
            ['a1', 'b1', 'a2', 'b2']
        """
        with ExitStack() as stack:
            shares = [self.shard(num_shares, number) for number in range(num_shares)]
            readers = [stack.enter_context(closing(iter(share))) for share in shares]
            for items in zip(*readers, strict=False):
                yield from items

    def __iter__(self) -> Generator[Tree, None, None]:
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


def files_source(
    files: Files, context_now: Callable[[], InputContext] = InputContext, *, is_shared: bool = False
) -> Source:
    """Return Files as a source; its offset counts items, of all workers together.

    Args:
        files: The files.
        context_now: Says at the beginning of each pass which of how many workers this is.
        is_shared: Whether each worker reads its own files, in rounds of one item for each; if not,
            all of them.

    A pass that was begun by more or fewer workers goes on in the order in which those would have
    read. Each worker then reads all of the rest, as nobody knows which items of a file are left,
    and takes its own item of each round. The last round may be short: a worker without an item gets
    an empty batch.
    """
    whole = iterable_source(files, lambda: files, is_async=False)

    def read(start: Start) -> Pass:
        context = context_now() if is_shared else InputContext()
        num_workers, worker = context.num_input_pipelines, context.input_pipeline_id
        num_shares = _shares_of(start) if start.offset else min(num_workers, len(files.paths))
        if num_workers == num_shares == 1:
            return whole.read(start)
        state = None if num_shares == 1 else {"shares": num_shares}
        if num_workers == num_shares and not start.offset % num_shares:
            share = files.shard(num_shares, worker)
            items = iterable_source(share, lambda: share, is_async=False).read(
                replace(start, offset=start.offset // num_shares)
            )
            return _counted(items, num_shares, state)
        rounds = iterable_source(files, lambda: files._rounds(num_shares), is_async=False)
        return _dealt(rounds.read(start), num_workers, worker, state, repr(files))

    def check_start(start: Start) -> None:
        if start.offset and not 1 <= _shares_of(start) <= len(files.paths):
            raise ValueError(
                f"The state was saved with source={start.own_state!r}, but {files!r} cannot be "
                "shared out so. Load what state_dict returned, unchanged."
            )

    names = [str(path) for path in files.paths]
    return replace(
        whole, label=repr(files), read=read, identity=lambda: ("Files", *names),
        common_identity=lambda: ("Files",), check_start=check_start,
    )  # fmt: skip


def _shares_of(start: Start) -> int:
    """Return over how many workers the files were shared out when the pass began; 0 if unknown."""
    if start.own_state is None:
        return 1
    shares = start.own_state.get("shares") if isinstance(start.own_state, Mapping) else None
    return count_or_none(shares) or 0


async def _counted(items: Pass, num_shares: int, state: object) -> AsyncGenerator[Item, None]:
    """Count the items of all workers, which each read as many."""
    async with aclosing(items):
        async for item in items:
            yield Item(item.value, item.offset * num_shares, state)


async def _dealt(
    items: Pass, num_workers: int, worker: int, state: object, label: str
) -> AsyncGenerator[Item, None]:
    """Give one worker its item of each round."""
    taken: list[Item] = []
    async with aclosing(items):
        async for item in items:
            taken.append(item)
            if len(taken) == num_workers:
                yield Item(taken[worker].value, item.offset, state)
                taken = []
    if len(taken) > worker:
        yield Item(taken[worker].value, taken[-1].offset, state)
    elif taken:
        arrays, spec = BatchReader("batch", label).read(taken[0].value)
        yield Item(unflatten(spec, [array[:0] for array in arrays]), taken[-1].offset, state)


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
