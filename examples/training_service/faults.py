"""What goes wrong with a job: whether it may go away by itself, and how it is told."""

import errno
from collections.abc import Iterator

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


def _all_have(error: BaseException, numbers: frozenset[int]) -> bool:
    return all(
        any(isinstance(each, OSError) and each.errno in numbers for each in _causes(leaf))
        for leaf in _leaves(error)
    )


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
