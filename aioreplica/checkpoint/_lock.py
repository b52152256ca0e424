"""A lock on a file: one writer of a directory or a journal."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import final
from weakref import WeakSet

from .._gil import has_gil
from ..context import REGISTRY

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@final
class FileLock:
    """An exclusive lock, which the kernel takes back when the process ends.

    A forked child lets its copy go: it would keep the lock when its parent has ended. Without
    POSIX locks the file is made and nothing is locked.

    Args:
        path: The file; made if it is not there, and left there.

    Attributes:
        is_exclusive: Whether the system keeps others out.

    Raises:
        BlockingIOError: If another lock is on it, of this process or another one; its `strerror`
            names the process.
        OSError: If the file cannot be opened or locked.
    """

    __slots__ = ("__weakref__", "_fd", "is_exclusive")

    def __init__(self, path: Path) -> None:
        self.is_exclusive = False
        self._fd: int | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        try:
            try:
                import fcntl
            except ModuleNotFoundError:
                return
            try:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if has_gil() or self._holder() != str(os.getpid()):
                        raise
                    gc.collect()  # who held it may be dropped, and not be freed yet
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder() or "unknown"
                raise BlockingIOError(errno.EWOULDBLOCK, f"process {holder}", str(path)) from None
            self.is_exclusive = True
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            REGISTRY.once("file_locks", _new_table).add(self)
        except BaseException:
            self.close()
            raise

    def _holder(self) -> str:
        assert self._fd is not None
        return os.pread(self._fd, 32, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:  # who held it was dropped
        self.close()

    def __repr__(self) -> str:
        return f"<FileLock | {'free' if self._fd is None else 'held'}>"


def _new_table() -> WeakSet[FileLock]:
    table: WeakSet[FileLock] = WeakSet()

    def let_go() -> None:
        for lock in tuple(table):
            lock.close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=let_go)
    return table
