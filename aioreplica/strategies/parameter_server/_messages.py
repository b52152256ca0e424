"""Messages of closures and the coordinator to parameter servers, and statistics of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ...optimizers import ScaleRule
from ...values import IndexedSlices
from ._partition import ServedRows

Array: TypeAlias = npt.NDArray[Any]
Key: TypeAlias = tuple[int, int]
"""A shard: the number of its variable, and which shard of it."""

Slot: TypeAlias = tuple[int, str]
"""What an optimizer keeps beside a shard: the optimizer's number and the name of the slot."""

FROM_COORDINATOR = -1
"""In place of the number of a closure, where the coordinator writes."""


@final
class Spec(NamedTuple):
    """Description of a variable for closures.

    Attributes:
        variable_id: Its number in the strategy.
        name: Its name.
        shape: Of the whole variable.
        dtype: Of its elements.
        trainable: Whether optimizers update it by default.
        shards: Where its rows are.
        slot: Which slot of that variable it is, None for the variable itself.
    """

    variable_id: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    shards: tuple[ServedRows, ...]
    slot: Slot | None = None

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the shape of one shard."""
        if len(self.shards) == 1:
            return self.shape
        shard = self.shards[index]
        return (shard.end - shard.begin, *self.shape[1:])


@final
class Stamp(NamedTuple):
    """Says whose push it is.

    Attributes:
        epoch: Counts how often the servers were restored.
        closure: Number of the closure.
        oldest: Every closure below this one is over: what it pushes is dropped.
        attempt: Tells one run of a closure from another.
        is_over: Whether the closure was over before this run, which is for its result alone: what
            it pushes is dropped.
    """

    epoch: int
    closure: int
    oldest: int
    attempt: str = ""
    is_over: bool = False


@final
class Write(NamedTuple):
    """An `assign`, `assign_add` and so on of a shard.

    Attributes:
        key: The shard.
        ordinal: Which push it is of those that the closure makes to the shard.
        verb: The method's name.
        value: An array of the shard's shape, or IndexedSlices.
    """

    key: Key
    ordinal: int
    verb: str
    value: Any


@final
class Count(NamedTuple):
    """Counts an update."""

    key: Key
    ordinal: int


@final
class Gradient(NamedTuple):
    """The gradient of a shard, to be applied by an optimizer's rule.

    Attributes:
        key: The shard.
        ordinal: As in `Write`.
        optimizer: The optimizer's number, which is that of its `iterations`.
        gradient: An array, IndexedSlices, or a Weighted of one.
        iteration: How many updates were done before; None if a `Count` of the same push says that.
        read_version: The version of the shard that it was computed from, None if it was not read.
        recipe: Which settings of the optimizer, those of when the closure was scheduled.
    """

    key: Key
    ordinal: int
    optimizer: int
    gradient: Any
    iteration: int | None
    read_version: int | None
    recipe: int = 0


@final
class Judgement(NamedTuple):
    """Says whether the gradients of a step were finite, to a loss scale that follows them.

    Attributes:
        key: The scale.
        ordinal: As in `Write`.
        num_finite: The number of finite steps since it changed, on the same server.
        rule: How it follows.
        is_finite: Whether they were.
        used: The scale that they had, if they were not; a smaller one has answered to that.
    """

    key: Key
    ordinal: int
    num_finite: Key
    rule: ScaleRule
    is_finite: bool
    used: float | None


Item: TypeAlias = Write | Count | Gradient | Judgement


@final
class Pull(NamedTuple):
    """Asks for a shard.

    Attributes:
        key: The shard.
        known_version: The one that the caller has; -1 for none.
        rows: Only these rows of the shard; None for all.
        slot: A slot of the shard in its place.
    """

    key: Key
    known_version: int = -1
    rows: Array | None = None
    slot: Slot | None = None


@final
class ShardRows(NamedTuple):
    """Rows that a server makes for itself.

    Attributes:
        call: The function of two row numbers, packed.
        begin: The first row.
        shape: Of the shard.
        dtype: Of its elements.
    """

    call: Any  # Any: Packed, of a module that needs this one
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@final
class NewShard(NamedTuple):
    """A shard that a server is to keep.

    Attributes:
        key: Names it.
        value: Its first value, or how it is made.
        name: Name of the variable.
        trainable: Whether it can be trained.
        constraint: Applied to the shard after each update; None for nothing.
    """

    key: Key
    value: Array | ShardRows
    name: str
    trainable: bool
    constraint: Any


@final
class SlotSpec(NamedTuple):
    """Description of a slot beside a shard.

    Attributes:
        key: The shard.
        slot: Which one.
        shape: Its own; that of the shard, but for some of torch's.
        dtype: Of its elements.
    """

    key: Key
    slot: Slot
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@final
@dataclass(slots=True)
class ServerStatistics:
    """Counters of a parameter server.

    Attributes:
        pulls: Shards that were asked for.
        pushes: Writes, counts and gradients that took effect.
        bytes_pulled: Sent.
        bytes_pushed: Received.
        dropped: Pushes that had been seen before, or whose closure was over.
        stale: Gradients that were too old to be applied.
        retries: Runs of closures that pushed here after another run of the same closure had.
        max_staleness: How many versions old a gradient was at most.
        staleness_sum: Added up over all gradients that were applied.
        gradients: How many these are.
    """

    pulls: int = 0
    pushes: int = 0
    bytes_pulled: int = 0
    bytes_pushed: int = 0
    dropped: int = 0
    stale: int = 0
    retries: int = 0
    max_staleness: int = 0
    staleness_sum: int = 0
    gradients: int = 0


@final
class ServerImage(NamedTuple):
    """All that a parameter server knows at a time, for a copy of it.

    Attributes:
        shards: The shards, with their values, and how many writes each has had.
        optimizers: By number: their recipes, pickled, and which settings these are.
        former: Recipes of earlier settings, and the first closure that does not have them, by
            optimizer and settings.
        slots: By shard and optimizer, then by name.
        records: The other fields, by name.
    """

    shards: tuple[tuple[NewShard, int], ...]
    optimizers: dict[int, tuple[bytes, int]]
    former: dict[tuple[int, int], tuple[bytes, int]]
    slots: dict[tuple[Key, int], dict[str, Array]]
    records: dict[str, object]


def num_bytes(value: Any) -> int:
    """Return the size of an array, of IndexedSlices, or of what a Weighted holds."""
    value = getattr(value, "total", value)
    if isinstance(value, IndexedSlices):
        return value.nbytes
    return int(np.asarray(value).nbytes)


@final
@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """Counters of a coordinator and its parameter servers.

    Numbers from `pulls` on are those of the servers, as they were asked last: at a `join`, and
    after every few closures.

    Attributes:
        queue_depth: Closures that wait.
        num_running: Closures under way.
        num_finished: Closures that ended well.
        num_failed: Closures that raised.
        num_cancelled: Closures that were cancelled because another one had failed.
        num_retries: Runs that pushed to a server after another run of the same closure had, summed
            over the servers. A run that was lost before it pushed, and one that comes after its
            closure is over, are not seen.
        pulls: Shards that were asked for.
        pushes: Writes and gradients that took effect.
        bytes_pulled: Sent by the servers.
        bytes_pushed: Received by them.
        pushes_dropped: Pushes that had been seen before, or whose closure was over.
        pushes_stale: Gradients older than `max_staleness` allows.
        max_staleness: How many versions old a gradient was at most.
        mean_staleness: The same on average.
    """

    queue_depth: int
    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_retries: int
    pulls: int
    pushes: int
    bytes_pulled: int
    bytes_pushed: int
    pushes_dropped: int
    pushes_stale: int
    max_staleness: int
    mean_staleness: float


def summed(
    depth: int, num_running: int, counts: Mapping[str, int], reports: Sequence[ServerStatistics]
) -> CoordinatorStatistics:
    """Return the counters of a coordinator together with those of all its servers."""
    gradients = sum(each.gradients for each in reports)
    return CoordinatorStatistics(
        depth,
        num_running,
        counts["finished"],
        counts["failed"],
        counts["cancelled"],
        sum(each.retries for each in reports),
        sum(each.pulls for each in reports),
        sum(each.pushes for each in reports),
        sum(each.bytes_pulled for each in reports),
        sum(each.bytes_pushed for each in reports),
        sum(each.dropped for each in reports),
        sum(each.stale for each in reports),
        max((each.max_staleness for each in reports), default=0),
        sum(each.staleness_sum for each in reports) / gradients if gradients else 0.0,
    )
