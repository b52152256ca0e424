"""Object stores and other remote file systems, through fsspec."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from ._storage import LocalStorage, Sink, Source, Storage


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise what a store raises as an OSError: errors of botocore, aiohttp and others are not."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@final
class FsspecStorage:
    """A folder of any file system that fsspec knows.

    The store has to put an object in place as a whole, as object stores do: the manifest, written
    last, commits a step. There is no lock: only one manager may save into a folder, and a
    second one is seen by its claims.

    Args:
        url: Such as "s3://bucket/run-7".
        **options: Passed on to the file system, such as credentials.

    Raises:
        ImportError: If fsspec, or the package that it needs for the URL, is not installed.

    Example:
        >>> FsspecStorage("memory://run-7")
        <FsspecStorage memory://run-7>
    """

    def __init__(self, url: str, **options: object) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as missing:
            raise ImportError(
                f"Checkpoints in {url} need the fsspec package, which is not installed. Run: "
                'pip install "aioreplica[checkpoint]"',
                name="fsspec",
            ) from missing
        self._url = url
        files, root = fsspec.core.url_to_fs(url, **options)
        self._files: Any = files
        self._root = root.rstrip("/")

    @_as_os_errors()
    def list(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    @_as_os_errors()
    def make_folder(self, folder: str) -> None:
        """Make a folder, where there are such."""
        self._files.makedirs(self._path(folder), exist_ok=True)

    @_as_os_errors()
    def create(self, path: str) -> Sink:
        """Begin a new file, which appears when it is finished."""
        return _RemoteSink(self._files.open(self._path(path), "wb"))

    @_as_os_errors()
    def open(self, path: str) -> Source:
        """Open a file for reading."""
        self._files.invalidate_cache()
        return _RemoteSource(self._files, self._path(path))

    @_as_os_errors()
    def replace(self, path: str, data: bytes) -> None:
        """Put a whole object in place."""
        self._files.pipe_file(self._path(path), data)

    @_as_os_errors()
    def put_new(self, path: str, data: bytes) -> None:
        """Put an object in place unless there is one, in one request where the store can.

        Raises:
            FileExistsError: If there is one.
        """
        name = self._path(path)
        try:
            self._files.pipe_file(name, data, mode="create")
        except (NotImplementedError, TypeError, ValueError):  # this store has no such request
            self._files.invalidate_cache()
            if self._files.exists(name):
                raise FileExistsError(errno.EEXIST, "File exists", name) from None
            self._files.pipe_file(name, data)

    def sync(self, folder: str) -> None:
        """Do nothing: an object that is there stays."""

    @_as_os_errors()
    def remove(self, path: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(path))

    @_as_os_errors()
    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder, where there are such."""
        with suppress(FileNotFoundError):
            self._files.rmdir(self._path(folder))

    def lock(self) -> Any:
        """Return a lock that locks nothing."""
        return _NoLock()

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"<FsspecStorage {self._url}>"

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}" if relative else self._root


@final
class _RemoteSink:
    def __init__(self, file: object) -> None:
        self._file: Any = file

    @_as_os_errors()
    def write(self, data: memoryview) -> None:
        self._file.write(data)

    @_as_os_errors()
    def finish(self) -> None:
        file, self._file = self._file, None
        file.close()

    def discard(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(Exception):  # whatever the store says, the file is not used
                file.discard()


@final
class _RemoteSource:
    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path
        self.size = int(files.size(path))

    @_as_os_errors()
    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self._files.cat_file(self._path, start=offset, end=offset + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""


@final
class _NoLock:
    def close(self) -> None:
        """Do nothing."""


def storage_of(directory: object) -> Storage:
    """Return the storage that a path, a URL or a storage names.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(directory, str) and "://" in directory:
        return FsspecStorage(directory)
    if isinstance(directory, (str, os.PathLike)):
        return LocalStorage(directory)
    if not isinstance(directory, Storage):
        raise TypeError(f"directory must be a path or a Storage, got {directory!r}.")
    return directory
