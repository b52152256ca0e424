"""The frame that every cross-worker operation begins with, and what follows from the frames of all.

A frame has a size that all workers know and is not a pickle, so they can exchange it whatever each
of them is about to do. Pure decision code: frames go in, one decision comes out, the same on every
worker.

Layout, little-endian: magic and version, kind, length of the slot, run, sequence, stage, digest of
what has to be equal, name of the step function, slot; the chain; then the room for arrays that are
reduced if all frames agree (`Workers.room`).

The chain has a link for each operation that is queued behind this one and could go with it, up to
31: its place, and a part of its digest. Workers have queued different numbers of them, so the links
with which all chains begin are what all workers do at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..collectives import SLOT_BYTES, Summands
from ..tree import Array

MAGIC = b"arF6"
NAME_BYTES = 64
DIGEST_BYTES = 16
_HEADER = struct.Struct(f"<4sBHqqi{DIGEST_BYTES}s{NAME_BYTES}s")
_HEADER_AND_SLOT = _HEADER.size + SLOT_BYTES
MAX_FOLLOWERS = 31
_KEPT_CHARACTERS = 4096  # of texts that are kept with their hash; `agree` takes longer ones
MAX_TOLD, MAX_CAUSE = 16, 200  # groups and characters of an alarm: a note has a size
_LINK = struct.Struct("<IH10s")  # the ends of sequence and stage, the beginning of the digest
_U32, _U16 = 0xFFFF_FFFF, 0xFFFF
_LINK_BYTES = _LINK.size
_CHAIN_BYTES = MAX_FOLLOWERS * _LINK_BYTES
# So that arrays behind it are aligned.
FRAME_BYTES = -(-(_HEADER_AND_SLOT + _CHAIN_BYTES) // 64) * 64


@final
@unique
class FrameKind(IntEnum):
    """Kind of a frame: a collective, a failure, a close."""

    COLLECTIVE = 1
    FAILED = 2
    CLOSED = 3


_COLLECTIVE = MAGIC + bytes([FrameKind.COLLECTIVE])


@final
class Frame(NamedTuple):
    """Message of one worker at the beginning of an operation.

    Attributes:
        kind: What it has come for.
        run: Number of the run, from 0.
        function: Name of the step function, to be shown: long ones arrive cut, so their hash is
            part of the digest.
        sequence: Number of the collective in the run.
        stage: Which exchange of that collective; of a failure of which another worker has told in
            an alarm, the rank of that one, from 1.
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
        self,
        room: int = 0,
        behind: Sequence[Summands] = (),
        followers: Sequence[Frame] = (),
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes that are sent.

        Args:
            room: How many bytes there are behind the frame, the same on all workers.
            behind: Whose arrays are put there.
            followers: Frames of what could go with this one, at most `MAX_FOLLOWERS`.

        Raises:
            ValueError: If the slots are too long.
        """
        slot = self.slot
        if followers:
            slot += b"".join([each.slot for each in followers])
        if len(slot) > SLOT_BYTES:
            raise ValueError(f"A slot holds {SLOT_BYTES} bytes, got {len(slot)}.")
        data = np.zeros(FRAME_BYTES + room, np.uint8)
        _HEADER.pack_into(
            data.data, 0, MAGIC, self.kind, len(self.slot), self.run, self.sequence, self.stage,
            self.digest, _name_of(self.function),
        )  # fmt: skip
        if slot:
            data[_HEADER.size : _HEADER.size + len(slot)] = np.frombuffer(slot, np.uint8)
        if followers:
            chain = np.frombuffer(_chain_of(followers), np.uint8)
            data[_HEADER_AND_SLOT : _HEADER_AND_SLOT + len(chain)] = chain
        start = FRAME_BYTES
        for each in behind:
            start = each.put(data, start)
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


@final
@dataclass(frozen=True, slots=True)
class Alarm:
    """Failure of a run on another worker, or its end: it comes to no meeting before all are told.

    Attributes:
        number: Which end of a run it is, as all workers count them.
        origin: Where the run failed first.
        function: Name of the step function; empty if the worker has left.
        cause: What was raised there.
        num_sent: How many frames its sender has sent in each group, by the key; None if too many.
    """

    number: int
    origin: int
    function: str
    cause: str
    num_sent: dict[str, int] | None

    def encode(self) -> str:
        """Return it as text, of which the end may be cut off on the way."""
        counts = self.num_sent or {}
        told = "?" if len(counts) > MAX_TOLD else ",".join(f"{k}={n}" for k, n in counts.items())
        return f"{told}\n{self.origin}\n{self.function[:NAME_BYTES]}\n{self.cause[:MAX_CAUSE]}"

    @staticmethod
    def decode(rank: int, number: int, text: str) -> Alarm:
        """Read what `encode` gave on the worker of that rank."""
        told, _, rest = text.partition("\n")
        origin, _, rest = rest.partition("\n")
        function, is_whole, cause = rest.partition("\n")
        if not is_whole:  # long names in other letters take several bytes each
            return Alarm(number, rank, function or "a step", "see its log", None)
        pairs = (each.partition("=") for each in told.split(",") if each)
        counts = None if told == "?" else {key: int(count) for key, _, count in pairs}
        return Alarm(number, int(origin), function, cause, counts)

    def comes_to(self, group: str, number: int, has_met: bool) -> bool:
        """Tell whether its sender has sent the frame of that number in a group, from 1.

        Args:
            group: The key of the group.
            number: Of the frame.
            has_met: Whether the members have met before.
        """
        if self.num_sent is None:  # who has left closes the splits that it knows, which tells more
            return has_met and not self.function
        return self.num_sent.get(group, 0) >= number


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
    failed = [each for each in enumerate(frames) if each[1].kind is FrameKind.FAILED]
    if failed:  # those by themselves before those that were told of
        rank, frame = min(failed, key=lambda each: each[1].stage > 0)
        cause = frame.slot.decode("utf-8", "replace")
        return Failed(frame.stage - 1 if frame.stage else rank, frame.run, frame.function, cause)
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


def slots_in_common(
    rows: npt.NDArray[np.uint8], own: Frame, followers: Sequence[Frame]
) -> list[list[bytes]]:
    """Return the slots of all workers for each follower that all of them have queued next.

    The frames have to be of one collective. The lengths of slots are part of what is hashed.

    Args:
        rows: The frames of all workers.
        own: The frame of this worker.
        followers: What this worker could do with it.

    Example:
        >>> here, *others = (Frame(FrameKind.COLLECTIVE, 0, "step", i) for i in (1, 2, 3))
        >>> rows = np.stack([here.encode(0, (), others), here.encode(0, (), others[:1])])
        >>> slots_in_common(rows, here, others)
        [[b'', b'']]
    """
    num_bytes = len(followers) * _LINK_BYTES
    chains = rows[:, _HEADER_AND_SLOT : _HEADER_AND_SLOT + num_bytes]
    differs = (chains != chains[0]).any(axis=0)
    count = (int(differs.argmax()) if differs.any() else num_bytes) // _LINK_BYTES
    slots = [row[_HEADER.size : _HEADER_AND_SLOT].tobytes() for row in rows]
    found, start = [], len(own.slot)
    for each in followers[:count]:
        stop = start + len(each.slot)
        found.append([slot[start:stop] for slot in slots])
        start = stop
    return found


def arrays_behind(row: npt.NDArray[np.uint8], runs: Sequence[Sequence[Array]]) -> list[Array]:
    """Return what a worker has put behind its frame, flat: one array per run of one dtype."""
    found = []
    start = FRAME_BYTES
    for run in runs:
        stop = start
        for array in run:
            stop += array.nbytes
        found.append(row[start:stop].view(run[0].dtype))
        start = stop
    return found


def digest_of(*texts: str) -> bytes:
    """Return a hash of texts that differs if one of them does."""
    is_short = sum(map(len, texts)) <= _KEPT_CHARACTERS
    return _kept_digest_of(*texts) if is_short else _new_digest_of(*texts)


def _new_digest_of(*texts: str) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


_kept_digest_of = lru_cache(maxsize=256)(_new_digest_of)


def cut_text(text: str, size: int) -> bytes:
    """Return text as UTF-8 of at most `size` bytes, without half a character at the end."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()


@lru_cache(maxsize=64)
def _name_of(function: str) -> bytes:
    return cut_text(function, NAME_BYTES)


def _chain_of(followers: Sequence[Frame]) -> bytes:
    pack = _LINK.pack
    return b"".join(
        [pack(each.sequence & _U32, each.stage & _U16, each.digest) for each in followers]
    )


def _key_of(frame: Frame) -> tuple[object, ...]:
    return frame.run, frame.function, frame.sequence, frame.stage, frame.digest
