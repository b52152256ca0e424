"""The frame that every cross-worker operation begins with, and what follows from the frames of all.

A frame has a size that all workers know and is not a pickle, so they can exchange it whatever each
of them is about to do. Pure decision code: frames go in, one decision comes out, the same on every
worker.

Layout, little-endian: magic and version, kind, length of the slot, run, sequence, stage, digest of
what has to be equal, name of the step function, slot; then the room for arrays that are reduced if
all frames agree (`Workers.room`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..collectives import SLOT_BYTES

MAGIC = b"arF3"
NAME_BYTES = 64
DIGEST_BYTES = 16
_HEADER = struct.Struct(f"<4sBHqqi{DIGEST_BYTES}s{NAME_BYTES}s")
_HEADER_AND_SLOT = _HEADER.size + SLOT_BYTES
FRAME_BYTES = -(-_HEADER_AND_SLOT // 64) * 64  # so that arrays behind it are aligned


@final
@unique
class FrameKind(IntEnum):
    """Kind of a frame: a collective, a failure, a close."""

    COLLECTIVE = 1
    FAILED = 2
    CLOSED = 3


_COLLECTIVE = MAGIC + bytes([FrameKind.COLLECTIVE])


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """Message of one worker at the beginning of an operation.

    Attributes:
        kind: What it has come for.
        run: Number of the run, from 0.
        function: Name of the step function.
        sequence: Number of the collective in the run.
        stage: Which exchange of that collective.
        digest: A hash of what has to be equal on all workers; see `digest_of`.
        slot: Small data; the cause if it has failed, or was closed by an error.

    Example:
        >>> frame = Frame(FrameKind.COLLECTIVE, 3, "step", 1, slot=b"abc")
        >>> Frame.decode(frame.encode()) == frame
        True
    """

    kind: FrameKind
    run: int
    function: str = ""
    sequence: int = 0
    stage: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    slot: bytes = b""

    def encode(
        self, room: int = 0, arrays: Sequence[npt.NDArray[Any]] = ()
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes that are sent.

        Args:
            room: How many bytes there are behind the frame, the same on all workers.
            arrays: What is put there.

        Raises:
            ValueError: If the slot is too long.
        """
        if len(self.slot) > SLOT_BYTES:
            raise ValueError(f"A slot holds {SLOT_BYTES} bytes, got {len(self.slot)}.")
        data = np.zeros(FRAME_BYTES + room, np.uint8)
        _HEADER.pack_into(
            data.data, 0, MAGIC, self.kind, len(self.slot), self.run, self.sequence, self.stage,
            self.digest, _name_of(self.function),
        )  # fmt: skip
        if self.slot:
            data[_HEADER.size : _HEADER.size + len(self.slot)] = np.frombuffer(self.slot, np.uint8)
        start = FRAME_BYTES
        for array in arrays:
            data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += array.nbytes
        return data

    @staticmethod
    def decode(data: npt.NDArray[np.uint8]) -> Frame:
        """Read what was sent.

        Raises:
            ValueError: If it is not a frame of this release.
        """
        raw = data[:FRAME_BYTES].tobytes()
        if len(raw) != FRAME_BYTES or not raw.startswith(MAGIC):
            raise ValueError(
                f"A worker sent {raw[:8]!r} where a frame was expected: it runs another release of "
                "aioreplica, or uses the communicator for something else. Install one release "
                "everywhere, and give the strategy a communicator of its own."
            )
        _, kind, length, run, sequence, stage, digest, name = _HEADER.unpack_from(raw)
        slot = raw[_HEADER.size : _HEADER.size + length]
        function = name.rstrip(b"\0").decode("utf-8", "replace")
        return Frame(FrameKind(kind), run, function, sequence, stage, digest, slot)


@final
@dataclass(frozen=True, slots=True)
class Agreed:
    """All workers are in the same operation.

    Attributes:
        slots: Their small data, in rank order.
    """

    slots: list[bytes]


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's step has failed; there is nothing to wait for.

    Attributes:
        rank: The worker; the first of them if several have.
        run: Its run.
        function: Its step function.
        cause: What it raised.
    """

    rank: int
    run: int
    function: str
    cause: str


@final
@dataclass(frozen=True, slots=True)
class Closed:
    """A worker has closed its strategy.

    Attributes:
        ranks: Which ones have.
        cause: What the first of them was closed by; empty if by none.
    """

    ranks: tuple[int, ...]
    cause: str = ""


@final
@dataclass(frozen=True, slots=True)
class Differs:
    """Workers have come for different operations: they exchange rows next."""


Decision: TypeAlias = Agreed | Failed | Closed | Differs


def decide(frames: Sequence[Frame]) -> Decision:
    """Say what follows from the frames of all workers, in rank order.

    A worker that has closed outweighs one that has failed, which outweighs a difference: the
    others follow from it.

    Example:
        >>> here = Frame(FrameKind.COLLECTIVE, 0, "step", 1)
        >>> decide([here, here])
        Agreed(slots=[b'', b''])
        >>> decide([here, Frame(FrameKind.FAILED, 0, "step", slot=b"ValueError: x")])
        Failed(rank=1, run=0, function='step', cause='ValueError: x')
    """
    closed = tuple(i for i, frame in enumerate(frames) if frame.kind is FrameKind.CLOSED)
    if closed:
        return Closed(closed, frames[closed[0]].slot.decode("utf-8", "replace"))
    for rank, frame in enumerate(frames):
        if frame.kind is FrameKind.FAILED:
            cause = frame.slot.decode("utf-8", "replace")
            return Failed(rank, frame.run, frame.function, cause)
    first = frames[0]
    if all(_key_of(frame) == _key_of(first) for frame in frames):
        return Agreed([frame.slot for frame in frames])
    return Differs()


def slots_if_one_collective(rows: npt.NDArray[np.uint8]) -> list[bytes] | None:
    """Return the slots of all frames if it can be seen at a glance that they agree.

    If not, None, and `decide` says whether they do: slots may differ in length.

    Example:
        >>> here = Frame(FrameKind.COLLECTIVE, 0, "step", 1, slot=b"ab").encode()
        >>> slots_if_one_collective(np.stack([here, here]))
        [b'ab', b'ab']
    """
    data = rows[:, :_HEADER_AND_SLOT].tobytes()
    header = data[: _HEADER.size]
    starts = range(0, len(data), _HEADER_AND_SLOT)
    if not header.startswith(_COLLECTIVE):
        return None
    length = int.from_bytes(header[len(_COLLECTIVE) : len(_COLLECTIVE) + 2], "little")
    if not all(data.startswith(header, start) for start in starts):
        return None
    return [data[start + _HEADER.size : start + _HEADER.size + length] for start in starts]


def arrays_behind(
    row: npt.NDArray[np.uint8], like: Sequence[npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """Return the arrays that a worker has put behind its frame."""
    found = []
    start = FRAME_BYTES
    for array in like:
        found.append(row[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return found


def digest_of(*texts: str) -> bytes:
    """Return a hash of texts that differs if one of them does."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def cut_text(text: str, size: int) -> bytes:
    """Return text as UTF-8 of at most `size` bytes, without half a character at the end."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()


@lru_cache(maxsize=64)
def _name_of(function: str) -> bytes:
    return cut_text(function, NAME_BYTES)


def _key_of(frame: Frame) -> tuple[object, ...]:
    return frame.run, frame.function, frame.sequence, frame.stage, frame.digest
