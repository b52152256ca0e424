"""What a distributed dataset reads: its sources, and how their items become batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..tree import unflatten
from ._arrays import BatchReader
from ._assemble import DealStream, OnDeviceStream, Row, Sharing, SplitStream, ZipStream
from ._join import Joiner
from ._options import InputOptions
from ._read_ahead import OnDemandStream, ReadAheadStream
from ._spec import spec_of
from ._stream import Source, Start, Stream


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """A recipe for the batches of a distributed dataset.

    Attributes:
        label: What to call it in messages.
        sources: One, or one per replica.
        assemble: Opens the sources at a place and returns the stream of batches.
        num_batches: Of an epoch, if that is known.
        is_inline: Whether batches are made in microseconds, by the loop itself.
        joiner: Makes the batches.
        counts_steps: Whether a place is a number of steps; then batch sizes must stay as they are.
    """

    label: str
    sources: tuple[Source, ...]
    assemble: Callable[[Start], Stream]
    num_batches: Callable[[], int | None]
    is_inline: bool
    joiner: Joiner
    counts_steps: bool = False

    @property
    def identity(self) -> tuple[Any, ...]:
        """Plain values that differ from those of another dataset, so far as one can tell."""
        entries = tuple(entry for source in self.sources for entry in source.identity)
        if self.counts_steps:
            entries += tuple(source.offset_after(1) for source in self.sources)
        return entries

    def spec(self) -> Any | None:
        """Return the pytree of specs, if a batch was read or the source says so itself."""
        if self.joiner.element_spec is not None:
            return self.joiner.element_spec
        first = self.sources[0].first()
        if first is None:
            return None
        arrays, spec = BatchReader("batch", self.label).read(first)
        return spec_of(unflatten(spec, arrays))

    async def aclose(self) -> None:
        """Close iterators that were given but never used."""
        for source in self.sources:
            await source.aclose()


def split_feed(source: Source, options: InputOptions, sharing: Sharing, joiner: Joiner) -> Feed:
    """Return the feed that splits each global batch of a source over the replicas."""
    is_inline = source.is_inline and not joiner.places

    def assemble(start: Start) -> Stream:
        split = SplitStream(source.open(start), sharing, joiner, source.label)
        return split if is_inline else _buffered(split, options, source.label)

    def num_batches() -> int | None:
        num_items = source.num_items()
        if not num_items or sharing.remainder != "drop":
            return num_items
        if not source.counts_examples:  # any batch may be too small to be delivered
            return None
        batch_size = source.offset_after(1)
        last = source.offset_after(num_items) - source.offset_after(num_items - 1)
        if batch_size < sharing.num_parts:
            return 0
        return num_items - (last < sharing.num_parts)

    return Feed(source.label, (source,), assemble, num_batches, is_inline, joiner)


def dealt_feed(source: Source, options: InputOptions, joiner: Joiner, num_replicas: int) -> Feed:
    """Return the feed that gives each replica one batch of a source per step."""
    is_inline = source.is_inline and not joiner.places

    def assemble(start: Start) -> Stream:
        row = Row(num_replicas, options.remainder, joiner, source.label)
        dealt = DealStream(source.open(start), row)
        return dealt if is_inline else _buffered(dealt, options, source.label)

    def num_batches() -> int | None:
        num_items = source.num_items()
        if num_items is None:
            return None
        rounded_up = -(-num_items // num_replicas)
        return num_items // num_replicas if options.remainder == "drop" else rounded_up

    return Feed(source.label, (source,), assemble, num_batches, is_inline, joiner)


def zipped_feed(
    sources: Sequence[Source], options: InputOptions, joiner: Joiner, device_names: Sequence[str]
) -> Feed:
    """Return the feed that gives each replica one batch of its own source per step.

    Args:
        sources: One per local replica.
        options: How they are read.
        joiner: Makes the batches.
        device_names: Where each source is read, if it lives on a device; else empty.
    """
    is_inline = all(source.is_inline for source in sources) and not joiner.places
    label = sources[0].label

    def assemble(start: Start) -> Stream:
        row = Row(len(sources), options.remainder, joiner, label)
        streams: list[Stream] = []
        for number, source in enumerate(sources):
            place = Start(start.epoch, source.offset_after(start.offset), may_be_over=True)
            stream = source.open(place)
            if device_names:
                stream = OnDeviceStream(stream, device_names[number])
            streams.append(stream if is_inline else _buffered(stream, options, label))
        return ZipStream(streams, row, start.offset)

    def num_batches() -> int | None:
        counts = [source.num_items() for source in sources]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        return min(known) if options.remainder == "drop" else max(known)

    return Feed(label, tuple(sources), assemble, num_batches, is_inline, joiner, counts_steps=True)


def _buffered(stream: Stream, options: InputOptions, label: str) -> Stream:
    if options.per_replica_buffer_size == 0:
        return OnDemandStream(stream, label)
    return ReadAheadStream(stream, options.per_replica_buffer_size, label)
