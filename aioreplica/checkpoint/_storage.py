"""Storage of checkpoints: a small protocol, and the local file system.

All calls may block, so the manager makes them on threads. Paths are relative, with `/`; the manager
makes them of numbers and never of what it has read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from ..errors import CheckpointError
from ._format import DamagedError
from ._lock import FileLock

LOCK = ".lock"
BLOCK_BYTES = 256 * 1024
"""What is summed, written and read back in one go: it stays in a core's cache meanwhile."""
WRITE_BACK_BYTES = 8 * 1024 * 1024
"""After so many bytes the disk is told to begin, so that it works while more are written."""


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`; fail if it is not there then, as far as that can be seen."""

    def finish(self) -> None:
        """Make what was written durable, and close the file."""

    def discard(self) -> None:
        """Close the file, whatever becomes of it. Never raises."""


class Source(Protocol):
    """A file that is being read."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from an offset on; return how many bytes there were."""

    def close(self) -> None:
        """Close the file."""


@runtime_checkable
class Storage(Protocol):
    """Interface of a file system or an object store for a checkpoint manager.

    Every method may raise an OSError. FileNotFoundError from `open` says that there is no such
    file: a step that needs it is damaged. Any other error says that this cannot be told now.
    """

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, "" for the root; none if there is no such folder."""

    def make_folder(self, folder: str) -> None:
        """Make a folder, durably, unless it is there."""

    def create(self, path: str) -> Sink:
        """Begin a new file."""

    def open(self, path: str) -> Source:
        """Open a file for reading."""

    def replace(self, path: str, data: bytes) -> None:
        """Make `data` the content of a file: on failure the old content is left, never a mix.

        The data are durable before they take the name; the name itself is after `sync`.
        """

    def put_new(self, path: str, data: bytes) -> None:
        """Make a small file under a name that nobody has, durably; of two callers one succeeds.

        Raises:
            FileExistsError: If there is one.
        """

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""

    def remove(self, path: str) -> None:
        """Remove a file; no error if there is none."""

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder; no error if there is none."""

    def lock(self) -> Any:  # Any: what is closed to give the lock back
        """Take the directory for one writer: something with `close()`.

        If it has an attribute `is_exclusive` that is true, no other writer can be there, and what
        ended saves have left is removed.

        Raises:
            CheckpointError: If another one has it.
        """


@final
class LocalStorage:
    """A folder of the local file system.

    Links are not followed, and nothing but regular files is read.

    Args:
        directory: The folder; made at the first save.
        calls: The `os` module, or what stands for it in a test.
    """

    def __init__(self, directory: str | os.PathLike[str], *, calls: Any = os) -> None:
        self._directory = Path(directory)
        self._os = calls

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        path = self._path(folder)
        try:
            if folder and not stat.S_ISDIR(self._os.lstat(path).st_mode):
                return []
            return sorted(self._os.listdir(path))
        except FileNotFoundError:
            return []

    def make_folder(self, folder: str) -> None:
        """Make a folder and those above it, and sync the folders that they are in."""
        path = self._path(folder)
        missing: list[Path] = []
        for each in (path, *path.parents):
            if self._is_folder(each):
                break
            missing.append(each)
        for each in reversed(missing):
            with suppress(FileExistsError):
                self._os.mkdir(each)
            self._sync(each.parent)
        if folder and not stat.S_ISDIR(self._os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory of its own", str(path))

    def create(self, path: str) -> Sink:
        """Begin a new file; one of that name must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
        return _LocalSink(self._os, self._os.open(self._directory / path, flags, 0o644), path)

    def open(self, path: str) -> Source:
        """Open a regular file for reading.

        Raises:
            FileNotFoundError: If there is none; or if it is a link, a folder or a pipe.
        """
        name = self._directory / path
        none = FileNotFoundError(errno.ENOENT, "Not a regular file", str(name))
        try:
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _FLAGS
            fd = self._os.open(name, flags)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
                raise none from error
            raise
        try:
            status = self._os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise none
            return _LocalSource(self._os, fd, status.st_size)
        except BaseException:
            self._os.close(fd)
            raise

    def replace(self, path: str, data: bytes) -> None:
        """Write a temporary file, sync it, and give it the name."""
        temporary = f"{path}.tmp"
        self.remove(temporary)
        sink = self.create(temporary)
        try:
            sink.write(memoryview(data))
            sink.finish()
            self._os.replace(self._directory / temporary, self._directory / path)
        except BaseException:
            sink.discard()
            with suppress(OSError):
                self.remove(temporary)
            raise

    def put_new(self, path: str, data: bytes) -> None:
        """Create a file, and sync the folder that it is in.

        Raises:
            FileExistsError: If there is one.
        """
        name = self._directory / path
        fd = self._os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644)
        try:
            try:
                written = self._os.write(fd, data)
            finally:
                self._os.close(fd)
            if written != len(data):
                raise OSError(errno.EIO, f"{written} bytes instead of {len(data)}", str(name))
            self._sync(name.parent)  # the name has to last; the content only informs
        except BaseException:
            with suppress(OSError):
                self.remove(path)
            raise

    def sync(self, folder: str) -> None:
        """Sync a folder."""
        self._sync(self._path(folder))

    def remove(self, path: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            self._os.unlink(self._directory / path)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder."""
        with suppress(FileNotFoundError):
            self._os.rmdir(self._path(folder))

    def lock(self) -> Any:
        """Lock a file in the folder, for as long as the process lives at most.

        Where the file system has no locks, nothing is locked.

        Raises:
            CheckpointError: If another manager has it, of this process or another one.
        """
        try:
            return FileLock(self._path(LOCK))
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._directory} is in use: a checkpoint manager of {error.strerror} saves "
                "there. Close it, or give each one a directory of its own."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return _NoLock()

    def __str__(self) -> str:
        return str(self._directory)

    def __repr__(self) -> str:
        return f"<LocalStorage {self._directory}>"

    def _path(self, relative: str) -> Path:
        return self._directory / relative if relative else self._directory

    def _is_folder(self, path: Path) -> bool:
        try:
            return stat.S_ISDIR(self._os.stat(path).st_mode)
        except FileNotFoundError:
            return False

    def _sync(self, folder: Path) -> None:
        fd = self._os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            self._os.fsync(fd)
        finally:
            self._os.close(fd)


_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
"""What `flock` says on Lustre, NFS and FUSE that are mounted without it."""
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", 0)
"""Linux begins to write pages that it would drop, and drops only those that are written."""


@final
class _NoLock:
    """Stands for a lock where there is none: a second writer is seen by its claims."""

    is_exclusive = False

    def close(self) -> None:
        pass


@final
class _LocalSink:
    """Writes block by block, and reads each back from the page cache, where it is at hand."""

    def __init__(self, calls: Any, fd: int, path: str) -> None:
        self._os = calls
        self._fd: int | None = fd
        self._path = path
        self._block = bytearray(BLOCK_BYTES)
        self._size = 0
        self._handed_over = 0  # bytes that the disk was told of

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), BLOCK_BYTES):
            self._write_block(data[start : start + BLOCK_BYTES])
        if self._size - self._handed_over >= WRITE_BACK_BYTES:
            self._hand_over()

    def _write_block(self, block: memoryview) -> None:
        start, rest = self._size, block
        while rest:
            written = self._os.write(self._fd, rest)
            if written <= 0:
                raise OSError(errno.EIO, "A write wrote nothing", self._path)
            rest = rest[written:]
        self._size += len(block)
        if len(self._block) != len(block):
            self._block = bytearray(len(block))
        count = _read_into(self._os, self._fd, start, memoryview(self._block))
        # One memcmp: two memoryviews would be compared item by item.
        if count != len(block) or self._block != block:
            raise OSError(errno.EIO, "What was written cannot be read back", self._path)

    def _hand_over(self) -> None:
        """Have the kernel begin to write what is new; advice, and no promise."""
        if hasattr(self._os, "posix_fadvise"):
            with suppress(OSError):
                self._os.posix_fadvise(
                    self._fd, self._handed_over, self._size - self._handed_over, _DONTNEED
                )
        self._handed_over = self._size

    def finish(self) -> None:
        self._os.fsync(self._fd)
        fd, self._fd = self._fd, None
        self._os.close(fd)

    def discard(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):
                self._os.close(fd)


@final
class _LocalSource:
    def __init__(self, calls: Any, fd: int, size: int) -> None:
        self._os = calls
        self._fd = fd
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return _read_into(self._os, self._fd, offset, buffer)

    def close(self) -> None:
        self._os.close(self._fd)


def _read_into(calls: Any, fd: int | None, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = calls.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@contextmanager
def opened(storage: Storage, path: str) -> Iterator[Source]:
    """Open a file of a storage for the length of a block."""
    source = storage.open(path)
    try:
        yield source
    finally:
        source.close()


def read_all(storage: Storage, path: str, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises:
        DamagedError: If it is larger.
        OSError: If it cannot be read.
    """
    with opened(storage, path) as source:
        size = source.size
        if size > limit:
            raise DamagedError(f"{path} has {size} bytes, more than {limit}")
        buffer = bytearray(size)
        count = source.read_into(0, memoryview(buffer))
    return bytes(buffer[:count])
