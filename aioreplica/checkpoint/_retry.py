"""Failed calls of a storage that are made again, after pauses that grow."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from random import Random
from time import monotonic, sleep
from typing import TypeAlias, TypeVar, cast, final

from .._functions import is_async, require_no_yield
from ..errors import CheckpointError
from ._lane import Stop
from ._storage import Sink, Source, Storage

T = TypeVar("T")

FIRST_S, LONGEST_S = 0.1, 10.0
"""The first pause, and the longest one."""
TICK_S = 0.05
"""A pause is given up so soon after its save or restore was cancelled."""

_FINAL = frozenset(
    {
        errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC,
        errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG,
        errno.EINVAL, errno.ELOOP, errno.EFBIG, errno.ENOTSUP,
    }
)  # fmt: skip
"""Errors that are answers: the next try gets the same one."""


def may_pass(error: OSError) -> bool:
    """Tell whether an error of a storage may be gone at the next try.

    Example:
        >>> may_pass(TimeoutError()), may_pass(PermissionError()), may_pass(OSError("SlowDown"))
        (True, False, True)
    """
    answers = (
        FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError,
        IsADirectoryError, BlockingIOError, CheckpointError,
    )  # fmt: skip
    return not isinstance(error, answers) and error.errno not in _FINAL


Retry: TypeAlias = Callable[[OSError, int, float], float | None]
"""Told an error, how often the call was tried, and for how many seconds; returns the next pause."""


def as_retry(given: object) -> Retry | None:
    """Return the rule that a manager is given; of a number of seconds, the usual one.

    Raises:
        TypeError: If it is neither a number nor a plain function.
        ValueError: If the number is not above 0.
    """
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not given > 0:
            raise ValueError(f"retry must be a number of seconds above 0, got {given!r}.")
        return partial(_usual, Random(os.getpid()), float(given))
    if not callable(given) or is_async(given):
        raise TypeError(f"retry must be a number of seconds or a plain function, got {given!r}.")
    require_no_yield(given, "CheckpointManager(retry=)", "Return a number of seconds or None.")
    return cast("Retry", given)


def _usual(
    random: Random, limit_s: float, error: OSError, num_tries: int, seconds: float
) -> float | None:
    """Return a pause that doubles, shortened by chance; None for answers, and behind the limit.

    By chance, so that many processes do not come back at the same moment.
    """
    pause_s = min(FIRST_S * 2.0 ** min(num_tries - 1, 30), LONGEST_S) * (1 - random.random() / 2)
    return pause_s if may_pass(error) and seconds + pause_s <= limit_s else None


@final
class RetriedStorage:
    """A storage whose failed calls are made again, for one save or restore.

    Attributes:
        bare: The storage itself.
        stop: Ends pauses.
        num_retried: How many calls were made again.
        last: The error of the last of these, as text.
    """

    def __init__(self, bare: Storage, retry: Retry) -> None:
        self.bare = bare
        self.stop = Stop()
        self.num_retried = 0
        self.last = ""
        self._retry = retry

    def again(self, call: Callable[[], T]) -> T:
        """Make a call, and make it again while that is worth it; blocks.

        Raises:
            OSError: What it raised last.
            StoppedError: If its result is not wanted any more.
        """
        started, num_tries = None, 0
        while True:
            try:
                return call()
            except OSError as error:
                now, num_tries = monotonic(), num_tries + 1
                started = now if started is None else started
                pause_s = self._retry(error, num_tries, now - started)
                if pause_s is None:
                    if num_tries > 1:
                        tried = f"It was tried {num_tries} times in {now - started:.1f} s."
                        error.add_note(tried)
                    raise
                if isinstance(pause_s, bool) or not isinstance(pause_s, (int, float)):
                    raise TypeError(
                        f"retry must return a number of seconds or None, got {pause_s!r}."
                    ) from error
                self.num_retried += 1
                self.last = str(error) or type(error).__name__
            self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        end = monotonic() + seconds
        while True:
            self.stop.check()
            left = end - monotonic()
            if left <= 0:
                return
            sleep(min(left, TICK_S))

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        return self.again(partial(self.bare.list, folder))

    def make_folder(self, folder: str) -> None:
        """Make a folder."""
        self.again(partial(self.bare.make_folder, folder))

    def create(self, path: str) -> Sink:
        """Begin a new file, once: who writes it begins again."""
        return self.bare.create(path)

    def open(self, path: str) -> Source:
        """Open a file; it is opened again when reading fails."""
        return _RetriedSource(self, path)

    def replace(self, path: str, data: bytes) -> None:
        """Put the content of a file in place."""
        self.again(partial(self.bare.replace, path, data))

    def put_new(self, path: str, data: bytes) -> None:
        """Make a file that is not there; an earlier try may have made it."""
        self.again(partial(self.bare.put_new, path, data))

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""
        self.again(partial(self.bare.sync, folder))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.again(partial(self.bare.remove, path))

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder."""
        self.again(partial(self.bare.remove_folder, folder))

    def lock(self) -> object:
        """Take the directory."""
        return self.again(self.bare.lock)

    def __str__(self) -> str:
        return str(self.bare)


@final
class _RetriedSource:
    def __init__(self, storage: RetriedStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._source: Source | None = storage.again(partial(storage.bare.open, path))
        self.size = self._source.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._storage.again(partial(self._read, offset, buffer))

    def _read(self, offset: int, buffer: memoryview) -> int:
        if self._source is None:
            self._source = self._storage.bare.open(self._path)
        try:
            return self._source.read_into(offset, buffer)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()


def new_stop(storage: Storage) -> Stop:
    """Return what stops threads that use a storage, in a pause, too."""
    stop = Stop()
    if isinstance(storage, RetriedStorage):
        storage.stop = stop
    return stop
