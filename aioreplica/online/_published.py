"""Snapshots for other processes: one file, replaced whole, that readers map.

The publisher writes a new file beside the old one and renames it, so a path always leads to a whole
file, and a file is never written again once it has the name. Who has mapped the old one keeps it:
the system removes it with the last mapping. The inode therefore tells versions apart as long as one
is held, and a checksum tells what a crash of the machine has left.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self, final

from ..errors import CheckpointError
from ._example import Array, dump_tensors, load_tensors

FORMAT = "aioreplica.snapshot"


@final
class PublishedSnapshot(Mapping[str, Array]):
    """Read-only arrays of one version by the keys of the state, mapped from a file.

    The arrays stay as they are while they are held, whatever is published meanwhile.
    """

    __slots__ = ("_arrays", "_version")

    # Two snapshots are equal if they are one: comparing arrays gives no truth value.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a mixin sets None

    def __init__(self, version: int, arrays: Mapping[str, Array]) -> None:
        self._version = version
        self._arrays = arrays

    @property
    def version(self) -> int:
        """The version of the learner that published it."""
        return self._version

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
    checksum.

    Args:
        path: Where it is published; a file in `/dev/shm` is in memory only.

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

    __slots__ = ("_file", "_inode", "_lock", "_path", "_snapshot")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._snapshot: PublishedSnapshot | None = None
        self._inode: tuple[int, int] | None = None
        self._file: int | None = None  # open, so that its inode is not used again meanwhile

    def read(self) -> PublishedSnapshot:
        """Return the newest snapshot; the same object while nothing newer is published.

        Raises:
            FileNotFoundError: If nothing was published yet.
            CheckpointError: If the file is not what was published.
        """
        with self._lock:
            status = os.stat(self._path)  # noqa: PTH116 - a third of the time
            snapshot = self._snapshot
            if snapshot is None or self._inode != (status.st_dev, status.st_ino):
                snapshot = self._open()
            return snapshot

    def _open(self) -> PublishedSnapshot:
        file = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(file)
            snapshot = _load(file, status.st_size, self._path)
        except BaseException:
            os.close(file)
            raise
        self._let_go()
        self._file, self._inode = file, (status.st_dev, status.st_ino)
        self._snapshot = snapshot
        return snapshot

    @property
    def is_published(self) -> bool:
        """True if there is something to read."""
        return self._path.exists()

    def close(self) -> None:
        """Let the last snapshot go; those handed out stay valid. Idempotent."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        self._snapshot = self._inode = None
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


def _load(file: int, size: int, path: Path) -> PublishedSnapshot:
    try:
        if size == 0:
            raise ValueError("it is empty")
        data = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ))
        metadata, arrays, begin = load_tensors(data)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}")
        if zlib.crc32(data[begin:]) != int(metadata["crc32"]):
            raise ValueError("it fails its checksum")
        return PublishedSnapshot(int(metadata["snapshot"]), arrays)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a published snapshot, or was damaged by a crash: {error}. Start the "
            "learner that publishes it, or read another path."
        ) from None


def publish_snapshot(
    path: str | os.PathLike[str], version: int, arrays: Mapping[str, Array]
) -> None:
    """Publish arrays to every `SnapshotReader`; blocks while it writes.

    Publish to a path from one process at a time.

    Args:
        path: The file. Another one, `path.tmp`, is written first and renamed.
        version: What readers get as `version`.
        arrays: By name, of numeric dtypes.

    Raises:
        OSError: If the file cannot be written; what was published before stays.
        TypeError: If a dtype cannot be stored.
    """
    crc32 = 0
    _, *contents = dump_tensors({}, arrays)
    for part in contents:
        crc32 = zlib.crc32(part, crc32)
    metadata = {"format": FORMAT, "snapshot": str(version), "crc32": str(crc32)}
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
