"""The writer of a directory: its lock, its claims, the order of the steps, which are removed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from ..errors import CheckpointError
from ._claims import Claim, Listing, another_writer, make_claim, read_listing
from ._lane import Stop
from ._reading import Known, read_known
from ._storage import Storage
from ._writing import folder_of, reason, remove_leftover, remove_step


def steps_to_remove(
    newest_first: Sequence[int],
    *,
    max_to_keep: int | None,
    keep_every: int | None,
    pinned: Container[int] = (),
) -> list[int]:
    """Return the steps that are not kept.

    Args:
        newest_first: All steps, the one saved last first.
        max_to_keep: How many of the newest are kept; None keeps all.
        keep_every: Steps that it divides are kept for good, beside those.
        pinned: Steps that are kept until somebody unpins them, beside those.

    Example:
        >>> steps_to_remove([50, 40, 30, 20, 10], max_to_keep=2, keep_every=20)
        [30, 10]
    """
    if max_to_keep is None:
        return []
    others = [step for step in newest_first if keep_every is None or step % keep_every]
    newest = set(newest_first[:max_to_keep])
    return [step for step in others if step not in newest and step not in pinned]


RECENT = 2
"""So many claims are remembered although they are gone: one may be about to come."""


@final
@dataclass(frozen=True, slots=True)
class Saving:
    """One save.

    Attributes:
        claim: Its claim.
        listing: Names in the directory, once it was made.
        known: The steps with this one, once it is saved.
    """

    claim: Claim
    listing: Listing
    known: Known


@final
class Writer:
    """Knowledge that a manager has of the directory it saves into, from its first save on.

    Every method but `close` blocks, and one save has to end before another begins.

    Args:
        storage: The directory.
        max_to_keep: How many of the newest steps are kept; None keeps all.
        keep_every: Steps that this number divides are kept for good.
    """

    def __init__(self, storage: Storage, max_to_keep: int | None, keep_every: int | None) -> None:
        self._storage = storage
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every
        # The thread of a save whose loop was closed may begin late; not in the child of a fork.
        self._turn = threading.Lock(), os.getpid()
        self._lock: tuple[Any, int] | None = None  # of the storage, and the process with it
        self._known: Known | None = None  # None while that is not sure
        self._fence: int | None = None  # the newest sequence when it took the directory
        self._claims: set[Claim] = set()  # that it has made since
        self._has_cleaned = False

    def begin(self, step: int, storage: Storage) -> Saving:
        """Take the directory, unless it is taken; make a claim, and look for another writer.

        Args:
            step: The step to be saved.
            storage: The directory; its failed calls may be made again.

        Raises:
            CheckpointError: If another writer is there.
            OSError: If something cannot be read or made.
        """
        if self._turn[1] != os.getpid():
            self._turn = threading.Lock(), os.getpid()
        with self._turn[0]:
            return self._begin(step, storage)

    def _begin(self, step: int, storage: Storage) -> Saving:
        if self._lock is None or self._lock[1] != os.getpid():  # or in the child of a fork
            self._take(storage)
        if self._fence is None:
            self._known = read_known(storage)
            self._fence = self._known.newest
        known = self._known or read_known(storage)
        self._known = None  # until the save is known to be there
        claim = Claim(1 + max(known.newest, self._fence), step)
        self._claims.add(claim)  # before: it may be made although that fails
        try:
            make_claim(storage, claim)
        except CheckpointError:
            self._claims.discard(claim)
            raise
        try:
            listing = read_listing(storage)
            for other in listing.claims:
                if other.sequence > self._fence and other not in self._claims:
                    raise another_writer(storage, other)
            recent = {own for own in self._claims if own.sequence >= claim.sequence - RECENT}
            self._claims = recent.union(self._claims.intersection(listing.claims))
            strange = listing.folders - {*known.steps, step} - known.unsaved
            if strange:  # put there by hand
                known = read_known(storage)
                if known.newest > claim.sequence:
                    raise CheckpointError(
                        f"the steps {sorted(strange)} were put there meanwhile. Save again"
                    )
        except BaseException:
            with suppress(Exception):
                storage.remove(claim.name)
            raise
        others = [each for each in known.steps if each in listing.folders and each != step]
        unsaved = (known.unsaved & listing.folders) - {step}
        return Saving(claim, listing, Known((step, *others), unsaved, claim.sequence))

    def _take(self, storage: Storage) -> None:
        self._known = self._fence = None  # another manager may have saved
        self._claims.clear()
        self._has_cleaned = False
        storage.make_folder("")
        self._lock = storage.lock(), os.getpid()

    def end(self, saving: Saving, stop: Stop) -> list[str]:
        """Remove what is not to be kept beside a step that is saved, until told to stop.

        Returns:
            What could not be removed, in words.
        """
        self._known = saving.known
        left: list[str] = []
        for what, remove in self._removals(saving):
            if stop.is_set:
                break
            try:
                remove()
            except (OSError, MemoryError) as error:
                left.append(f"{what} could not be removed from {self._storage}: {reason(error)}.")
        return left

    def _removals(self, saving: Saving) -> Iterator[tuple[str, Callable[[], None]]]:
        storage, listing = self._storage, saving.listing
        for claim in listing.claims:
            if claim.step == saving.claim.step and claim != saving.claim:
                what = f"An earlier claim of step {claim.step}"
                yield what, partial(storage.remove, claim.name)
        for step in steps_to_remove(
            saving.known.steps,
            max_to_keep=self._max_to_keep,
            keep_every=self._keep_every,
            pinned=listing.pins,
        ):
            yield f"Step {step}", partial(remove_step, storage, step, listing.names_of(step))
        if self._has_cleaned:
            return
        self._has_cleaned = True
        # Under a lock that keeps others out: else it could be the save of another writer.
        if not getattr(self._lock and self._lock[0], "is_exclusive", False):
            return  # locks of other storages need not have it
        for step in sorted(saving.known.unsaved):
            folder = folder_of(step)
            what = f"What an ended save has left in {folder}"
            yield what, partial(remove_leftover, storage, folder)
        for claim in listing.claims:
            if claim.step not in saving.known.steps:
                what = f"The claim of an ended save of step {claim.step}"
                yield what, partial(storage.remove, claim.name)

    def close(self) -> None:
        """Let the directory go. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock[0].close()
