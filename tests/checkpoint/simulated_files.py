"""A file system in memory that stands for `os`: it fails where told, and crashes as disks do.

What was written and not synced may be lost or torn, any part of it and in any order: the model of
ALICE (Pillai et al., 2014) and CrashMonkey. Syncing a file keeps its data, not its name; syncing a
folder keeps the names in it.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from aioreplica.checkpoint import LocalStorage

ROOT = Path("/disk")


@dataclass(eq=False)
class Inode:
    """A file's data, or a folder's names."""

    data: bytearray | None = None
    names: "dict[str, Inode]" = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """One change of the disk; `is_synced` once it is sure to survive."""

    kind: str
    inode: Inode
    name: str = ""
    target: Inode | None = None
    offset: int = 0
    data: bytes = b""
    old_name: str = ""
    is_synced: bool = False

    def apply(self, copies: dict[Inode, Inode], *, is_torn: bool = False) -> None:
        mine = copies[self.inode]
        if self.kind == "write":
            assert mine.data is not None
            end = self.offset + len(self.data)
            mine.data.extend(bytes(max(0, end - len(mine.data))))
            half = len(self.data) // 2
            data = self.data[:half] + bytes(len(self.data) - half) if is_torn else self.data
            mine.data[self.offset : end] = data
        elif self.kind == "truncate":
            assert mine.data is not None
            del mine.data[self.offset :]
            mine.data.extend(bytes(self.offset - len(mine.data)))
        elif self.kind == "link":
            assert self.target is not None
            mine.names[self.name] = copies[self.target]
            mine.names.pop(self.old_name, None)
        else:
            mine.names.pop(self.name, None)


class Fault:
    """Makes one call go wrong: it fails, is dropped, writes half, or flips a bit of a write."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind = kind
        self.at = at
        self.num_calls = 0
        self.was_met = False

    def meets(self, call: str) -> str | None:
        if self.kind == "flip" and call != "write":
            return None
        self.num_calls += 1
        if self.num_calls - 1 != self.at:
            return None
        self.was_met = True
        if self.kind == "fail":
            raise OSError(errno.ENOSPC, f"No space left on device ({call})")
        return self.kind


class SimulatedFiles:
    """The calls of `os` that a LocalStorage makes."""

    def __init__(self) -> None:
        self.root = Inode(names={})
        self.changes: list[Change] = []
        self.fault: Fault | None = None
        self._open: dict[int, list[Any]] = {}
        self._next = 100
        self._lock = threading.RLock()
        self._inodes: list[Inode] = [self.root]

    # ---- calls ---------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0) -> int:
        with self._lock:
            folder, name = self._parent(path)
            inode = self.root if path == ROOT else folder.names.get(name)
            if flags & os.O_CREAT:
                self._strike("create")
                if inode is not None and flags & os.O_EXCL:
                    raise FileExistsError(errno.EEXIST, "File exists", str(path))
                if inode is None:
                    inode = self._new(Inode(bytearray()))
                    self._change(Change("link", folder, name, inode))
            if inode is None:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            self._next += 1
            self._open[self._next] = [inode, 0]
            return self._next

    def write(self, fd: int, data: memoryview) -> int:
        with self._lock:
            kind, entry, stored = self._strike("write"), self._open[fd], bytes(data)
            if kind == "truncate":
                stored = stored[: len(data) // 2]
            elif kind == "flip":
                stored = bytes([stored[0] ^ 1]) + stored[1:]
            if kind != "drop":
                self._change(Change("write", entry[0], offset=entry[1], data=stored))
            entry[1] += len(data)
            return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._lock:
            self._strike("write")
            self._change(Change("write", self._open[fd][0], offset=offset, data=bytes(data)))
            return len(data)

    def ftruncate(self, fd: int, length: int) -> None:
        with self._lock:
            self._strike("write")
            self._change(Change("truncate", self._open[fd][0], offset=length))

    def fsync(self, fd: int) -> None:
        with self._lock:
            if self._strike("fsync") is None:
                for change in self.changes:
                    change.is_synced |= change.inode is self._open[fd][0]

    def close(self, fd: int) -> None:
        with self._lock:
            del self._open[fd]

    def replace(self, old: Path, new: Path) -> None:
        with self._lock:
            (folder, name), kind = self._parent(old), self._strike("replace")
            if kind is None:
                target = self._find(old)
                self._change(Change("link", folder, new.name, target, old_name=name))

    def mkdir(self, path: Path) -> None:
        with self._lock:
            folder, name = self._parent(path)
            if path == ROOT or name in folder.names:
                raise FileExistsError(errno.EEXIST, "File exists", str(path))
            if self._strike("mkdir") is None:
                self._change(Change("link", folder, name, self._new(Inode())))

    def unlink(self, path: Path) -> None:
        with self._lock:
            folder, name = self._parent(path)
            if name not in folder.names:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            if self._strike("unlink") is None:
                self._change(Change("unlink", folder, name))

    def rmdir(self, path: Path) -> None:
        with self._lock:
            folder, name = self._parent(path)
            if self._find(path).names:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
            if self._strike("rmdir") is None:
                self._change(Change("unlink", folder, name))

    def stat(self, path: Path) -> Any:
        with self._lock:
            return self._status(self._find(path))

    lstat = stat

    def fstat(self, fd: int) -> Any:
        return self._status(self._open[fd][0])

    def listdir(self, path: Path) -> list[str]:
        with self._lock:
            return list(self._find(path).names)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        [buffer] = buffers
        part = self._open[fd][0].data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    # ---- crashes -------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._open)

    def crash_after(
        self, num_changes: int, kept: Collection[Change], *, is_torn: bool = False
    ) -> "SimulatedFiles":
        """Return the disk after a crash: what was synced, and those of the rest that are kept.

        Of a write that was not synced and `is_torn`, the second half is zeros.
        """
        disk = SimulatedFiles()
        copies = {
            inode: Inode(None if inode.data is None else bytearray()) for inode in self._inodes
        }
        disk.root = copies[self.root]
        disk._inodes = [*copies.values()]
        for change in self.changes[:num_changes]:
            if change.is_synced or change in kept:
                change.apply(copies, is_torn=is_torn and not change.is_synced)
        return disk

    def _parent(self, path: Path) -> tuple[Inode, str]:
        return (self.root if path == ROOT else self._find(path.parent)), path.name

    def _find(self, path: Path) -> Inode:
        inode = self.root
        for name in path.relative_to(ROOT).parts if path != ROOT.parent else ():
            if name not in inode.names:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            inode = inode.names[name]
        return inode

    def _status(self, inode: Inode) -> Any:
        if inode.data is None:
            return SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0)
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=len(inode.data))

    def _new(self, inode: Inode) -> Inode:
        self._inodes.append(inode)
        return inode

    def _change(self, change: Change) -> None:
        self.changes.append(change)
        change.apply({inode: inode for inode in self._inodes})

    def _strike(self, call: str) -> str | None:
        return None if self.fault is None else self.fault.meets(call)


class SimulatedStorage:
    """A LocalStorage on simulated files; nobody else locks it."""

    def __init__(self, files: SimulatedFiles) -> None:
        self._local = LocalStorage(ROOT, calls=files)
        self.list, self.make_folder = self._local.list, self._local.make_folder
        self.create, self.open = self._local.create, self._local.open
        self.replace, self.sync = self._local.replace, self._local.sync
        self.put_new = self._local.put_new
        self.remove, self.remove_folder = self._local.remove, self._local.remove_folder

    def lock(self) -> Any:
        return SimpleNamespace(close=lambda: None)


SIMPLE = ("list", "make_folder", "put_new", "replace", "sync", "remove", "remove_folder")


class FaultyStorage:
    """A storage whose calls fail: the one with the number `at`, or each from that one on.

    Args:
        storage: The storage that does the work.
        error: Makes what is raised.
        at: The number of the call, from 0 on; None for none.
        is_late: Whether the call has its effect before it fails.
        is_for_good: Whether all later calls fail too.
    """

    def __init__(
        self,
        storage: Any,
        error: Callable[[], Exception],
        at: int | None,
        *,
        is_late: bool = False,
        is_for_good: bool = False,
    ) -> None:
        self.at = at
        self.calls: list[str] = []
        self._error = error
        self._is_late = is_late
        self._is_for_good = is_for_good
        for name in (*SIMPLE, "lock"):
            setattr(self, name, self._faulty(name, getattr(storage, name)))
        self._create = self._faulty("create", storage.create)
        self._open = self._faulty("open", storage.open)

    def create(self, path: str) -> Any:
        sink = self._create(path)
        write, finish = self._faulty("write", sink.write), self._faulty("finish", sink.finish)
        return SimpleNamespace(write=write, finish=finish, discard=sink.discard)

    def open(self, path: str) -> Any:
        source = self._open(path)
        read, close = self._faulty("read", source.read_into), self._faulty("close", source.close)
        return SimpleNamespace(size=source.size, read_into=read, close=close)

    @property
    def was_met(self) -> bool:
        return self.at is not None and len(self.calls) > self.at

    def _faulty(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            is_struck = self.at is not None and (
                number == self.at or (self._is_for_good and number > self.at)
            )
            if is_struck and not self._is_late:
                raise self._error()
            result = call(*args)
            if is_struck:
                raise self._error()
            return result

        return called


def subsets(changes: list[Change], rng: Random) -> Iterator[frozenset[Change]]:
    """Yield what may be kept of unsynced changes: all ways of a few, a choice of those of many."""
    if len(changes) <= 5:
        sizes = range(len(changes) + 1)
        ways = chain.from_iterable(combinations(changes, size) for size in sizes)
        yield from map(frozenset, ways)
        return
    yield frozenset()
    yield frozenset(changes)
    for change in changes:
        yield frozenset([change])
        yield frozenset(changes) - {change}
    for _ in range(24):
        yield frozenset(each for each in changes if rng.random() < 0.5)
