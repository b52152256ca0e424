"""From what sources yield to batches for all replicas: split, dealt out, or one source each."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, final

import numpy as np

from ..devices import INLINE_BYTES, device, run_on_host, run_together
from ..devices.backends import Backend, find_backends
from ..tree import Array, Tree, TreeSpec, flatten, unflatten
from ..values import new_per_replica
from ._batches import BatchReader, columns_of, cut_leaves, spec_of, split_sizes
from ._options import InputOptions
from ._read_ahead import ReadAhead
from ._source import Item, Pass, Source, Start

# ---- batches that a step may write into ------------------------------------------------------


def _detached(source: Source, what: str) -> Source:
    """Return a source of copies, if the batches of `source` are the user's own arrays.

    A step that wrote into them would change the next epoch. Always, and not only where torch is
    loaded: below `INLINE_BYTES` a copy costs less than the wait for a batch.
    """
    if not source.is_kept:
        return source
    found, _ = flatten(columns_of(source.like()))
    num_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in found)
    is_inline = source.is_inline and num_bytes < INLINE_BYTES

    def read(start: Start) -> Pass:
        return _copies(source.read(start), BatchReader(what, source.label), is_inline=is_inline)

    return replace(source, read=read, is_inline=is_inline, is_kept=False)


async def _copies(
    items: Pass, reader: BatchReader, *, is_inline: bool
) -> AsyncGenerator[Item, None]:
    """Copy each batch, a large one on a thread unless nothing reads ahead."""
    async with aclosing(items):
        async for item in items:
            arrays, spec = reader.read(item.value)
            if is_inline or sum(array.nbytes for array in arrays) < INLINE_BYTES:
                copies = _copy_all(arrays)
            else:
                copies = await run_on_host(_copy_all, arrays)
            yield item._replace(value=unflatten(spec, copies))


def _copy_all(arrays: list[Array]) -> list[Array]:
    return [array.copy(order="K") for array in arrays]


# ---- one global batch for all replicas -------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Sharing:
    """Rule by which a global batch is shared out.

    Attributes:
        remainder: What becomes of examples that cannot be shared out evenly.
        num_parts: Over how many replicas a batch is split.
        local: Which of the parts are this worker's.
    """

    remainder: str
    num_parts: int
    local: range

    def sizes(self, num_examples: int, reader: BatchReader) -> tuple[int, ...] | None:
        """Return the size of every part, or None if the batch is left out.

        Raises:
            ValueError: If that is what an uneven batch is.
        """
        share, rest = divmod(num_examples, self.num_parts)
        if rest and self.remainder == "error":
            raise ValueError(
                f"{reader.name} has {num_examples} examples, which {self.num_parts} replicas "
                "cannot share evenly, and remainder='error'. Use a multiple of "
                f"{self.num_parts}, or remainder='weight'."
            )
        if self.remainder == "drop":
            return (share,) * self.num_parts if share else None
        return split_sizes(num_examples, self.num_parts)


def split_source(
    source: Source, options: InputOptions, sharing_now: Callable[[], Sharing], joiner: Joiner
) -> Source:
    """Return a source whose items are those of `source`, split over the replicas.

    How, is asked at the beginning of each pass: workers may be fewer by then.
    """
    source = _detached(source, "global batch")
    is_inline = source.is_inline and not joiner.places

    def read(start: Start) -> Pass:
        split = _split(source.read(start), sharing_now(), joiner, source.label, start)
        return split if is_inline else _ahead(split, options, source.label)

    def num_batches() -> int | None:
        num_items, sharing = source.num_items(), sharing_now()
        if not num_items or sharing.remainder != "drop":
            return num_items
        if not source.counts_examples:  # any batch may be too small to be delivered
            return None
        batch_size = source.offset_after(1)
        last = source.offset_after(num_items) - source.offset_after(num_items - 1)
        if batch_size < sharing.num_parts:
            return 0
        return num_items - (last < sharing.num_parts)

    return replace(source, read=read, num_items=num_batches, is_inline=is_inline)


async def _split(
    items: Pass, sharing: Sharing, joiner: Joiner, label: str, start: Start
) -> AsyncGenerator[Item, None]:
    """Split each global batch that is not left out.

    A warning says, once in a pass, that a batch was left out whole. Not for a short one at the
    end, which "drop" is for, unless nothing else came.
    """
    reader = BatchReader("global batch", label)
    left_out, may_warn, has_given = "", True, start.offset > 0
    async with aclosing(items):
        async for item in items:
            if left_out and may_warn:  # it was not the last
                may_warn = False
                warnings.warn(left_out, UserWarning, stacklevel=2)
            arrays, spec = reader.read(item.value)
            joiner.see(arrays, spec)
            num_examples = arrays[0].shape[0]
            sizes = sharing.sizes(num_examples, reader)
            if sizes is None:
                if num_examples:
                    left_out = (
                        f"{reader.name} was left out: {num_examples} examples are too few for "
                        f"{sharing.num_parts} equal parts, and remainder='drop'. Make batches "
                        "larger, or use remainder='weight'."
                    )
                continue
            parts = cut_leaves(arrays, sizes)
            if len(sharing.local) != len(parts):
                parts = [parts[i] for i in sharing.local]
            if joiner.places:
                parts = await joiner.place(parts)
            has_given = True
            yield Item(joiner.join(parts, spec), item.offset, item.own_state)
    if left_out and may_warn and not has_given:
        warnings.warn(left_out, UserWarning, stacklevel=2)


# ---- one batch for each replica --------------------------------------------------------------


def dealt_source(
    source: Source, options: InputOptions, joiner: Joiner, num_replicas: int
) -> Source:
    """Return a source that gives each replica one batch of `source` per step."""
    source = _detached(source, "batch")
    is_inline = source.is_inline and not joiner.places

    def read(start: Start) -> Pass:
        is_whole = not start.offset
        row = ReplicaBatches(
            num_replicas, options.remainder, joiner, source.label, is_whole=is_whole
        )
        dealt = _deal(source.read(start), row)
        return dealt if is_inline else _ahead(dealt, options, source.label)

    def num_batches() -> int | None:
        num_items = source.num_items()
        if num_items is None:
            return None
        rounded_up = -(-num_items // num_replicas)
        return num_items // num_replicas if options.remainder == "drop" else rounded_up

    return replace(source, read=read, num_items=num_batches, is_inline=is_inline)


async def _deal(items: Pass, row: ReplicaBatches) -> AsyncGenerator[Item, None]:
    """Deal one batch to each replica in turn; those at the end may get an empty one."""
    last: Item | None = None
    async with aclosing(items):
        while True:
            while not row.is_complete:
                item = await anext(items, None)
                row.add(item)
                last = item or last
            if last is None or row.is_the_end:
                row.warn_of_nothing()
                return
            value = await row.take()
            if value is not None:
                yield Item(value, last.offset, last.own_state)


def zipped_source(
    sources: Sequence[Source], options: InputOptions, joiner: Joiner, device_names: Sequence[str]
) -> Source:
    """Return a source that gives each replica one batch of its own source per step.

    Its offset counts steps, so batch sizes must stay as they are.

    Args:
        sources: One per local replica.
        options: How they are read.
        joiner: Makes the batches.
        device_names: Where each source is read, if it lives on a device; else empty.
    """
    sources = [_detached(source, "batch") for source in sources]
    is_inline = all(source.is_inline for source in sources) and not joiner.places
    label = sources[0].label

    def read(start: Start) -> Pass:
        passes: list[Pass] = []
        for number, source in enumerate(sources):
            offset = source.offset_after(start.offset)
            place = replace(start, offset=offset, own_state=None, may_be_over=True)
            items = source.read(place)
            if device_names:
                items = _on_device(items, device_names[number])
            passes.append(items if is_inline else _ahead(items, options, label))
        row = ReplicaBatches(
            len(sources), options.remainder, joiner, label, is_whole=not start.offset
        )
        return _Zip(passes, row, start.offset)

    def num_batches() -> int | None:
        counts = [source.num_items() for source in sources]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        return min(known) if options.remainder == "drop" else max(known)

    async def aclose() -> None:
        for source in sources:
            await source.aclose()

    def check_start(start: Start) -> None:
        for source in sources:
            source.check_start(start)

    return Source(
        label,
        read,
        partial(_identity_of, sources),
        partial(_common_identity_of, sources),
        num_items=num_batches,
        like=sources[0].like,
        aclose=aclose,
        is_inline=is_inline,
        check_start=check_start,
    )


def _identity_of(sources: Sequence[Source]) -> tuple[object, ...]:
    entries = tuple(entry for source in sources for entry in source.identity())
    return (*entries, *(source.offset_after(1) for source in sources))


def _common_identity_of(sources: Sequence[Source]) -> tuple[object, ...]:
    batch_size = max(source.offset_after(1) for source in sources)
    return (*sources[0].common_identity(), batch_size)


@final
class _Zip:
    """Takes one batch from each pass until all have ended; one that has ended gives empty ones.

    A class because a generator would end with the first `anext` that is cancelled; the passes below
    and the row keep what they have, so the next one goes on.
    """

    def __init__(self, passes: Sequence[Pass], row: ReplicaBatches, offset: int) -> None:
        self._passes = passes
        self._row = row
        self._offset = offset
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        row = self._row
        while not self._is_over:
            while not row.is_complete:
                row.add(await anext(self._passes[row.length], None))
            if row.is_the_end:
                row.warn_of_nothing()
                break
            value = await row.take()
            self._offset += 1
            if value is not None:
                return Item(value, self._offset)
        self._is_over = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close all passes."""
        self._is_over = True
        await _close_all(self._passes)


async def _close_all(passes: Sequence[Pass]) -> None:
    """Close all passes, and raise the first error after the last was closed."""
    error: BaseException | None = None
    for items in passes:
        try:
            await items.aclose()
        except BaseException as caught:  # noqa: BLE001 - raised below, once all are closed
            error = error or caught
    if error is not None:
        raise error


async def _on_device(items: Pass, device_name: str) -> AsyncGenerator[Item, None]:
    """Read a source that lives on a device: there `ar.current_device()` is that device."""
    try:
        while True:
            with device(device_name):
                item = await anext(items, None)
            if item is None:
                return
            yield item
    finally:
        with device(device_name):
            await items.aclose()


def _ahead(items: Pass, options: InputOptions, label: str) -> Pass:
    return ReadAhead(items, options.per_replica_buffer_size, label)


@final
class ReplicaBatches:
    """One batch per replica on its way to become one step's batch; kept if a wait is cancelled.

    Args:
        num_replicas: Local replicas.
        remainder: What becomes of a step in which replicas get different numbers of examples.
        joiner: Makes the batch.
        label: Names the source in errors.
        is_whole: Whether the pass begins at its beginning.
    """

    def __init__(
        self, num_replicas: int, remainder: str, joiner: Joiner, label: str, *, is_whole: bool
    ) -> None:
        self._num_replicas = num_replicas
        self._remainder = remainder
        self._joiner = joiner
        self._label = label
        self._is_whole = is_whole
        self._reader = BatchReader("batch", label)
        self._parts: list[list[Array] | None] = []
        self._like: list[list[Array] | None] = [None] * num_replicas
        self._spec: TreeSpec | None = None
        self._num_steps = 0

    @property
    def length(self) -> int:
        """Number of replicas that have got something, or are known to get nothing."""
        return len(self._parts)

    @property
    def is_complete(self) -> bool:
        """True if each replica has got something, or is known to get nothing."""
        return len(self._parts) == self._num_replicas

    def add(self, item: Item | None) -> None:
        """Give a batch to the next replica, or nothing."""
        if item is None:
            self._parts.append(None)
            return
        arrays, self._spec = self._reader.read(item.value)
        self._joiner.see(arrays, self._spec)
        self._like[len(self._parts)] = [np.empty_like(array[:0]) for array in arrays]
        self._parts.append(arrays)

    async def take(self) -> Tree | None:
        """Return the step's batch and begin the next; None if it is left out.

        Raises:
            ValueError: If replicas get different numbers of examples and that is an error.
        """
        assert self._spec is not None  # it is not the end
        full = self._even(self._filled())
        if full is None:
            self._parts = []
            return None
        placed = await self._joiner.place(full) if self._joiner.places else full
        self._parts = []
        self._num_steps += 1
        return self._joiner.join(placed, self._spec)

    @property
    def is_the_end(self) -> bool:
        """True if no replica has got a batch, or not all of them where parts must be equal."""
        is_missing = [part is None for part in self._parts]
        return any(is_missing) if self._remainder == "drop" else all(is_missing)

    def warn_of_nothing(self) -> None:
        """Warn if there were batches, and a whole pass has given no step: for "drop" only."""
        if self._is_whole and self._spec is not None and not self._num_steps:
            warnings.warn(
                f"{self._label} gave no step: there was no batch with examples for each of "
                f"{self._num_replicas} replicas, and remainder='drop'. Give each replica one, or "
                "use remainder='weight'.",
                UserWarning,
                stacklevel=2,
            )

    def _filled(self) -> list[list[Array]]:
        """Return the parts, empty arrays in place of what is missing."""
        template = next(like for like in self._like if like is not None)
        return [
            part if part is not None else (own or template)
            for part, own in zip(self._parts, self._like, strict=True)
        ]

    def _even(self, parts: list[list[Array]]) -> list[list[Array]] | None:
        """Return what the replicas get of parts of different sizes; None if that is nothing."""
        sizes = [part[0].shape[0] for part in parts]
        share = min(sizes)
        if self._remainder == "drop":
            return [[array[:share] for array in part] for part in parts] if share else None
        if self._remainder == "weight" or share == max(sizes):
            return parts
        raise ValueError(
            f"Step {self._num_steps} of {self._label} gives the replicas {sizes} examples, "
            "and remainder='error'. Make all batches equal, or use remainder='weight'."
        )


# ---- batches of distributed values -----------------------------------------------------------


@final
class Joiner:
    """Makes batches of distributed values.

    Args:
        device_names: One per local replica.
        has_plain_values: Whether batches stay plain (the default strategy).
        to_devices: Whether arrays are brought to their devices.

    Attributes:
        element_spec: Of the first batch, once that was read.
        places: Whether anything has to be brought to a device.
    """

    __slots__ = ("_backends", "_device_names", "_has_plain_values", "element_spec", "places")

    def __init__(
        self, device_names: Sequence[str], *, has_plain_values: bool, to_devices: bool
    ) -> None:
        self._device_names = tuple(device_names)
        self._has_plain_values = has_plain_values
        self._backends: list[Backend | None] = [None] * len(self._device_names)
        if to_devices and not has_plain_values:
            self._backends = [_backend_of_device(name) for name in self._device_names]
        self.element_spec: Tree = None
        self.places = any(backend is not None for backend in self._backends)

    def see(self, arrays: list[Array], spec: TreeSpec) -> None:
        """Learn from a batch what all of them look like on the host."""
        if self.element_spec is None:
            self.element_spec = spec_of(unflatten(spec, arrays))

    async def place(self, parts: list[list[Array]]) -> list[list[Any]]:
        """Return the parts on their devices.

        Not copied by the devices' own threads: a device loop keeps those, and waits for batches.
        """
        on_devices = zip(self._backends, parts, self._device_names, strict=True)
        return await run_together([partial(_put_all, *each) for each in on_devices])

    def join(self, parts: Sequence[Sequence[object]], spec: TreeSpec) -> Tree:
        """Return the batch: PerReplica leaves, or the plain parts of the only replica."""
        if self._has_plain_values:
            return unflatten(spec, list(parts[0]))
        names = self._device_names
        columns = zip(*parts, strict=True)
        return unflatten(spec, [new_per_replica(column, names) for column in columns])


def _backend_of_device(name: str) -> Backend | None:
    """Return the backend of a device; None for the host's own, where arrays are already."""
    kind = name.partition(":")[0]
    for backend in find_backends():
        if backend.num_devices(kind) > 0:
            return None if backend.name == "numpy" else backend
    return None


def _put_all(backend: Backend | None, leaves: list[Array], device: str) -> list[Any]:
    """Copy to a device, and wait until that is done: who reads it is on another stream."""
    if backend is None:
        return leaves
    with backend.scope(device):
        placed = [backend.put(leaf, device) for leaf in leaves]
        if backend.has_streams:
            for leaf in placed:
                backend.keep(leaf)
            backend.synchronise(device)
    return placed
