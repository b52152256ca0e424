"""Failed calls of a storage that are made again, after pauses that grow."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from time import monotonic, sleep
from typing import Any, TypeVar, final

from .._functions import is_async, require_no_yield
from ..errors import CheckpointError
from ._lane import Stop
from ._storage import Sink, Source, Storage

T = TypeVar("T")

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


@final
@dataclass(frozen=True, slots=True)
class Retry:
    """Rule for failed calls of a storage: which are made again, and how long.

    Before the second try of a call there is a pause of at most `first_s`, then of twice as much,
    and so on up to `longest_s`; each is shortened by a random part of its half, so that many
    processes do not come back at the same moment. A data file is written again as a whole, and its
    tensors are kept until it is.

    Attributes:
        for_s: So many seconds after its first failure a call is not made again.
        first_s: The first pause.
        longest_s: The longest one.
        is_worth: Tells of an OSError whether another try may help; None takes all but answers:
            that a file is missing or there already, permissions, a full disk, a name or an argument
            that is wrong.

    Raises:
        ValueError: If a number of seconds is not above 0.
        TypeError: If one is not a number, or `is_worth` is not a plain function.
    """

    for_s: float = 60.0
    first_s: float = 0.1
    longest_s: float = 10.0
    is_worth: Callable[[OSError], bool] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("for_s", "first_s", "longest_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} of a Retry must be a number of seconds, got {value!r}.")
            if not value > 0:
                raise ValueError(f"{name} of a Retry must be above 0, got {value!r}.")
        if self.is_worth is not None:
            if not callable(self.is_worth) or is_async(self.is_worth):
                raise TypeError(
                    f"is_worth of a Retry must be a plain function, got {self.is_worth!r}."
                )
            require_no_yield(self.is_worth, "is_worth of a Retry", "Return True or False.")


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
        self._random = Random(os.getpid())

    def again(self, call: Callable[[], T]) -> T:
        """Make a call, and make it again while that is worth it; blocks.

        Raises:
            OSError: What it raised last.
            StoppedError: If its result is not wanted any more.
        """
        retry, started, num_tries = self._retry, None, 0
        while True:
            try:
                return call()
            except OSError as error:
                now, num_tries = monotonic(), num_tries + 1
                started = now if started is None else started
                pause_s = min(retry.first_s * 2.0 ** min(num_tries - 1, 30), retry.longest_s)
                pause_s *= 1.0 - self._random.random() / 2
                if not self._is_worth(error) or now + pause_s - started > retry.for_s:
                    if num_tries > 1:
                        tried = f"It was tried {num_tries} times in {now - started:.1f} s."
                        error.add_note(tried)
                    raise
                self.num_retried += 1
                self.last = str(error) or type(error).__name__
            self._pause(pause_s)

    def _is_worth(self, error: OSError) -> bool:
        if self._retry.is_worth is None:
            return may_pass(error)
        answer = self._retry.is_worth(error)
        if not isinstance(answer, bool):
            raise TypeError(f"is_worth of a Retry must return True or False, got {answer!r}.")
        return answer

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

    def lock(self) -> Any:
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
