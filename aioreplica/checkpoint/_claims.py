"""Claims and pins: names in the root of a directory, so that one listing tells what is there.

A save makes `claim-<sequence>-<step>` before anything else, under a name that nobody has, and lists
the directory after that. So of two writers at least one sees the other, also where nothing can be
locked. The newest claim whose step has its manifest is the step that was saved last. A claim says
nothing about whether its step was saved: the manifest does.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, final
from uuid import uuid4

from ..errors import CheckpointError
from ._format import STEP_FOLDER, DamagedError
from ._storage import Storage, read_all

_STEP = "([0-9]{10}|[1-9][0-9]{10,17})"
_CLAIM = re.compile(f"claim-([0-9]{{10}}|[1-9][0-9]{{10,18}})-{_STEP}")
_PIN = re.compile(f"pin-{_STEP}")
_MAX_MARK_BYTES = 4096


class Claim(NamedTuple):
    """Name that a save takes before it writes.

    Attributes:
        sequence: Counts the saves into the directory.
        step: The step that it saves.
    """

    sequence: int
    step: int

    @property
    def name(self) -> str:
        """The file.

        Example:
            >>> Claim(7, 300).name
            'claim-0000000007-0000000300'
        """
        return f"claim-{self.sequence:010d}-{self.step:010d}"


def pin_name(step: int) -> str:
    """Return the file whose presence keeps a step.

    Example:
        >>> pin_name(300)
        'pin-0000000300'
    """
    return f"pin-{step:010d}"


@final
@dataclass(frozen=True, slots=True)
class Listing:
    """Names in the root of a directory, read at once.

    Attributes:
        folders: Steps that have a folder, saved or not.
        claims: The newest first.
        pins: Steps to be kept.
    """

    folders: frozenset[int]
    claims: tuple[Claim, ...]
    pins: frozenset[int]

    def stale_claims(self) -> list[str]:
        """Return the claims of steps that are not there: of ended saves, or of saves that begin."""
        return [claim.name for claim in self.claims if claim.step not in self.folders]

    def names_of(self, step: int) -> list[str]:
        """Return the names that a step has here beside its folder: they go behind it."""
        claims = [claim.name for claim in self.claims if claim.step == step]
        return [*claims, pin_name(step)] if step in self.pins else claims


def read_listing(storage: Storage) -> Listing:
    """List the root of a directory, once; blocks.

    Raises:
        CheckpointError: If it cannot be listed.
    """
    try:
        names = storage.list("")
    except (OSError, MemoryError) as error:
        raise not_listed(storage, error) from error
    folders, pins, claims = set(), set(), []
    for name in names:
        if match := STEP_FOLDER.fullmatch(name):
            folders.add(int(match[1]))
        elif match := _CLAIM.fullmatch(name):
            claims.append(Claim(int(match[1]), int(match[2])))
        elif match := _PIN.fullmatch(name):
            pins.add(int(match[1]))
    claims.sort(reverse=True)
    return Listing(frozenset(folders), tuple(claims), frozenset(pins))


def not_listed(storage: Storage, error: Exception) -> CheckpointError:
    """Return the error of a directory that cannot be listed."""
    why = str(error).rstrip(".") or type(error).__name__
    return CheckpointError(
        f"The steps in {storage} cannot be listed: {why}. Try again when it can be read."
    )


def make_claim(storage: Storage, claim: Claim) -> None:
    """Take the name of a claim; blocks.

    Raises:
        CheckpointError: If another writer has it.
        OSError: If it cannot be made.
    """
    mark = f"process {os.getpid()}, {uuid4().hex}\n".encode()
    try:
        storage.put_new(claim.name, mark)
    except FileExistsError as error:
        # A try whose answer was lost has made it: it has this very mark.
        if mark_of(storage, claim) != mark:
            raise another_writer(storage, claim) from error
    except BaseException:
        if mark_of(storage, claim) == mark:  # it was made all the same
            with suppress(Exception):
                storage.remove(claim.name)
        raise


def another_writer(storage: Storage, claim: Claim) -> CheckpointError:
    """Return the error of a claim that somebody else has made; blocks."""
    who = mark_of(storage, claim).decode(errors="replace").partition(",")[0].strip()
    return CheckpointError(
        f"another manager saves there: {claim.name} was made by {who or 'it'}. One at a time may: "
        "end the other, or give each one a directory of its own; then close this one (`aclose`) "
        "and save again"
    )


def mark_of(storage: Storage, claim: Claim) -> bytes:
    """Return the text that its maker has put into a claim, b"" if it cannot be read; blocks."""
    with suppress(OSError, DamagedError):
        return read_all(storage, claim.name, _MAX_MARK_BYTES)
    return b""


def is_gone(storage: Storage, claim: Claim, mark: str) -> bool:
    """Tell whether a claim was given up, or its step replaced: nothing uses its files; blocks."""
    try:
        return read_all(storage, claim.name, _MAX_MARK_BYTES).decode(errors="replace") != mark
    except FileNotFoundError:
        return True
    except Exception:  # noqa: BLE001 - whatever it is, that cannot be told
        return False
