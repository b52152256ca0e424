"""Files as a dataset: read one after the other, and shared out over workers whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, final

from ._iterable_source import IterableSource
from ._sharding import shard_items
from ._stream import Source, Start, Stream


@final
class Files:
    """What `read(path)` yields for each path in turn.

    Args:
        paths: Files in the order to read them.
        read: Returns an iterable for a path, such as a generator; it is closed before the next
            file is opened.

    Raises:
        ValueError: If there is no path.
        TypeError: If `paths` is a single path or `read` is no function.

    Example:
        >>> files = Files(["a", "b"], lambda path: [path + "1", path + "2"])
        >>> list(files)
        ['a1', 'a2', 'b1', 'b2']
    """

    def __init__(
        self,
        paths: Sequence[str | PathLike[str]],
        read: Callable[[str | PathLike[str]], Iterable[Any]],
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

    def __iter__(self) -> Iterator[Any]:
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


@final
class FilesSource(Source):
    """Files as a source; its offset counts items over all files."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._source = IterableSource(files, lambda: files, is_async=False)

    @property
    def label(self) -> str:
        """The files' description."""
        return repr(self.files)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The names of the files."""
        return ("Files", *(str(path) for path in self.files.paths))

    def open(self, start: Start) -> Stream:
        """Return the rest of a pass; what was delivered is read again."""
        return self._source.open(start)
