"""Snapshots for other processes: one file, replaced whole, that readers map.

The publisher writes a new file beside the old one and renames it, so a path always leads to a whole
file, and a file is never written again once it has the name. Who has mapped the old one keeps it:
the system removes it with the last mapping. The inode therefore tells versions apart as long as one
is held, and a checksum tells what a crash of the machine has left.

Whoever writes into the file itself would kill readers: to read a page behind the end of a file is
a SIGBUS. So size and time of the last write are compared before each read, and what has changed is
let go. While nothing is new the publisher sets the file's times to what they are, which changes
only the time of that (`st_ctime`): readers see that it lives.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Self, final

from ..errors import CheckpointError
from ..tree import Array
from ._example import dump_tensors, load_tensors
from ._journal import checked_seconds
from ._migration import Migration, Schema

FORMAT = "aioreplica.snapshot"
FORMAT_WITH_SPEC = "aioreplica.snapshot, with a spec version"
"""Of files of another spec version than 1: older software would read them as of that."""


@final
class PublishedSnapshot(Mapping[str, Array]):
    """Read-only arrays of one version by the keys of the state, mapped from a file.

    The arrays stay as they are while they are held, whatever is published meanwhile.
    """

    __slots__ = ("_arrays", "_published_at", "_version")

    # Two snapshots are equal if they are one: comparing arrays gives no truth value.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a mixin sets None

    def __init__(self, version: int, arrays: Mapping[str, Array], published_at: float) -> None:
        self._version = version
        self._arrays = arrays
        self._published_at = published_at

    @property
    def version(self) -> int:
        """The version of the learner that published it."""
        return self._version

    @property
    def age_s(self) -> float:
        """Seconds since it was published, by the clock of the machine."""
        return max(0.0, time() - self._published_at)

    def __getitem__(self, key: str) -> Array:
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<PublishedSnapshot | version {self._version}, {len(self)} arrays>"


@final
class SnapshotReader:
    """Reads what a learner of another process publishes with `publish_to`.

    A read sees one version whole. All methods are plain calls, from any thread, that take
    microseconds while there is nothing new; reading a new version maps its file and compares its
    checksum. A file that is missing or damaged is told of in `error`, and the version before stays.

    Args:
        path: Where it is published; a file in `/dev/shm` is in memory only.
        max_age_s: How old what is read may be before `is_current` is false, see `age_s`; a learner
            gives a sign of life every 5 seconds. None for any age.
        spec_version: As for `OnlineLearner`. A file of a newer program is not read.
        migrate: As for `OnlineLearner`: an older file has the keys of this version. One in which
            something `added` is missing is not read.

    Attributes:
        error: Why the newest file could not be read; "" if it could.

    Raises:
        ValueError: If a number is out of range, or `migrate` lacks a step.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     publish_snapshot(f"{folder}/model", 7, {"w": np.ones(2)})
        ...     with SnapshotReader(f"{folder}/model") as reader:
        ...         snapshot = reader.read()
        >>> snapshot.version, snapshot["w"]
        (7, array([1., 1.]))
    """

    __slots__ = (
        "_damaged", "_file", "_heard_at", "_lock", "_max_age_s", "_path", "_schema", "_snapshot",
        "_stamp", "error",
    )  # fmt: skip

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_age_s: float | None = None,
        spec_version: int = 1,
        migrate: Mapping[int, Migration] | None = None,
    ) -> None:
        self.error = ""
        self._schema = Schema(spec_version, migrate)
        self._path = Path(path)
        self._max_age_s = None if max_age_s is None else checked_seconds("max_age_s", max_age_s)
        self._lock = threading.Lock()
        self._snapshot: PublishedSnapshot | None = None
        self._stamp: _Stamp | None = None  # of the file that is held
        self._damaged: _Stamp | None = None  # of one that cannot be read, and need not be again
        self._heard_at = -math.inf
        self._file: int | None = None  # open, so that its inode is not used again meanwhile

    def read(self) -> PublishedSnapshot:
        """Return the newest snapshot; the same object while nothing newer is published.

        Raises:
            FileNotFoundError: If nothing was published yet.
            CheckpointError: If the file is not what was published, and no version before it is
                held.
        """
        with self._lock:
            try:
                status = os.stat(self._path)  # noqa: PTH116 - a third of the time
                stamp = _stamp_of(status)
                snapshot = self._snapshot
                if snapshot is None or stamp != self._stamp:
                    snapshot = self._open(stamp)
                self._heard_at = max(self._heard_at, status.st_ctime)
                self.error = ""
            except OSError as error:
                snapshot = self._held_in_spite_of(error)
            return snapshot

    def _open(self, stamp: _Stamp) -> PublishedSnapshot:
        if self._stamp is not None and stamp[:2] == self._stamp[:2]:
            self._let_go()  # it was written over, in place
        if stamp == self._damaged:
            raise CheckpointError(self.error)
        file = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(file)
            snapshot = _load(file, status, self._path, self._schema)
        except BaseException as error:
            os.close(file)
            if isinstance(error, CheckpointError):
                self._damaged = stamp
            raise
        self._let_go()
        self._file, self._stamp = file, _stamp_of(status)
        self._snapshot, self._damaged = snapshot, None
        return snapshot

    def _held_in_spite_of(self, error: OSError) -> PublishedSnapshot:
        """Return the version that is held, as the file is no good; raise the error without one."""
        self.error = str(error)
        if self._file is not None and _stamp_of(os.fstat(self._file)) != self._stamp:
            self._let_go()  # it was written over, and then replaced
        if self._snapshot is None:
            raise error
        return self._snapshot

    @property
    def is_published(self) -> bool:
        """True if there is something to read."""
        return self._path.exists()

    @property
    def age_s(self) -> float:
        """Seconds since the publisher said that what was read last is the newest; else infinite.

        It says so when it writes the file and, while nothing is new, by touching that. The seconds
        are those of the clock of the machine.
        """
        return max(0.0, time() - self._heard_at)

    @property
    def is_current(self) -> bool:
        """True if something was read, and that is not older than `max_age_s`."""
        has_read = self._snapshot is not None
        return has_read and (self._max_age_s is None or self.age_s <= self._max_age_s)

    def close(self) -> None:
        """Let the last snapshot go; those handed out stay valid. Idempotent."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        self._snapshot = self._stamp = None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._let_go()  # takes no lock: a collection may come at any place

    def __repr__(self) -> str:
        version = "-" if self._snapshot is None else self._snapshot.version
        return f"<SnapshotReader {self._path} | version {version}>"


_Stamp = tuple[int, int, int, int]


def _stamp_of(status: os.stat_result) -> _Stamp:
    """Return the file, its size, and when it was written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _load(file: int, status: os.stat_result, path: Path, schema: Schema) -> PublishedSnapshot:
    try:
        if status.st_size == 0:
            raise ValueError("it is empty")
        data = memoryview(mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ))
        metadata, arrays, begin = load_tensors(data)
        if metadata.get("format") not in {FORMAT, FORMAT_WITH_SPEC}:
            raise ValueError(f"its format is {metadata.get('format')!r}")
        if zlib.crc32(data[begin:]) != int(metadata["crc32"]):
            raise ValueError("it fails its checksum")
        version, spec_version = int(metadata["snapshot"]), int(metadata.get("spec_version", 1))
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a published snapshot, or was damaged by a crash: {error}. Start the "
            "learner that publishes it, or read another path."
        ) from None
    own = schema.arrays(arrays, spec_version, f"The published snapshot {path}")
    return PublishedSnapshot(version, own, status.st_mtime)


def publish_snapshot(
    path: str | os.PathLike[str],
    version: int,
    arrays: Mapping[str, Array],
    *,
    spec_version: int = 1,
) -> None:
    """Publish arrays to every `SnapshotReader`; blocks while it writes.

    Publish to a path from one process at a time, and never write into the file itself. Who holds
    its version maps it, and is killed where a page of the mapping is gone.

    Args:
        path: The file. Another one, `path.tmp`, is written first and renamed.
        version: What readers get as `version`.
        arrays: By name, of numeric dtypes.
        spec_version: That of the names, see `SnapshotReader`.

    Raises:
        ValueError: If the spec version is less than 1.
        OSError: If the file cannot be written; what was published before stays.
        TypeError: If a dtype cannot be stored.
    """
    crc32 = 0
    _, *contents = dump_tensors({}, arrays)
    for part in contents:
        crc32 = zlib.crc32(part, crc32)
    metadata = {"format": FORMAT, "snapshot": str(version), "crc32": str(crc32)}
    if Schema(spec_version).version > 1:
        metadata |= {"format": FORMAT_WITH_SPEC, "spec_version": str(spec_version)}
    target = Path(path)
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in dump_tensors(metadata, arrays):
                file.write(part)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def touch_snapshot(path: Path) -> None:
    """Let readers see that the publisher lives; blocks.

    Raises:
        OSError: If the file is not there, or its times cannot be set.
    """
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as they are; `st_ctime` is now
