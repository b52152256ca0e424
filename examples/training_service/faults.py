"""What goes wrong with a job: whether it may go away by itself, and how it is told."""

import errno
import sys
from collections.abc import Iterator
from contextlib import suppress

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
PASSING = NO_ROOM | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
"""Errors of a machine that lacks something for a while: room, files, memory."""


class RefusedError(Exception):
    """A job that is not taken now, and may be later.

    Attributes:
        status: The status of the answer.
        retry_after_s: When to ask again.
    """

    def __init__(self, status: int, text: str, retry_after_s: int) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


def is_passing(error: BaseException) -> bool:
    """Tell whether each cause of an error is one that may be gone at the next try."""
    return _all_have(error, PASSING)


def is_no_room(error: BaseException) -> bool:
    """Tell whether each cause of an error is that the disk is full."""
    return _all_have(error, NO_ROOM)


def describe(error: BaseException) -> str:
    """Return the text of an error; of a group, those of what is in it, each once."""
    texts = [f"{type(each).__name__}: {each}" for each in _leaves(error)]
    return "; ".join(dict.fromkeys(texts))


def say(text: str) -> None:
    """Print to stderr, which may be a file on a full disk, or closed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _all_have(error: BaseException, numbers: frozenset[int]) -> bool:
    return all(
        any(_number_of(each) in numbers for each in _causes(leaf)) for leaf in _leaves(error)
    )


def _number_of(error: BaseException) -> int | None:
    """Return the number that the system has for an error, also where Python keeps it back."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return errno.EAGAIN
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
