"""The state of a parameter server: shards, slots beside them, and which pushes were seen.

Plain synchronous code, called one method at a time: each update is whole.

Invariants:
    * A push is applied at most once: what `_seen` holds, what is below `_oldest` or in `_over`,
      what is of another epoch, and what comes from a run for a result alone, is dropped.
    * `_seen` holds no closure below `_oldest`.
    * Servers that begin alike and are called alike are alike: a copy is kept that way.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from ...errors import WorkerLostError
from ...optimizers import Optimizer, OptimizerRecipe, merge_gradients, take_step
from ...typing import VariableAggregation
from ...values import PlainVariable, Variable, VariableOptions, combined, fitting, rows_between
from ._messages import (
    FROM_COORDINATOR,
    Array,
    Count,
    Gradient,
    Item,
    Judgement,
    Key,
    NewShard,
    Pull,
    ServerImage,
    ServerStatistics,
    ShardRows,
    Slot,
    SlotSpec,
    Stamp,
    Write,
    num_bytes,
)
from ._splits import Element, Leases

Pulled = tuple[int, Array | None]

TERM = 2**40
"""Versions of a copy that takes the place of a server are higher by this: none comes twice."""

MAX_WRITTEN = 1024
"""Writes of the program that are remembered, as they may come again."""

RECORDS = (
    "_epoch", "_oldest", "_seen", "_attempts", "_restored", "_over", "_written", "_birth",
    "_leases", "_totals",
)  # fmt: skip
"""Fields that a copy has as they are."""


@final
class ParameterServer:
    """Keeps shards of variables and applies what closures push.

    Args:
        server: Its number.
        max_staleness: Gradients that are older, in versions, are dropped; None drops none.
        epoch: Counts how often the servers were restored.
        oldest: The oldest closure that is not over.
        birth: How often a server of this number was made before.
    """

    def __init__(
        self, server: int, max_staleness: int | None = None, epoch: int = 0, oldest: int = 0,
        birth: int = 0,
    ) -> None:  # fmt: skip
        self._server = server
        self._max_staleness = max_staleness
        self._epoch = epoch
        self._oldest = oldest
        self._shards: dict[Key, PlainVariable] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._versions: dict[int, int] = {}
        self._recipes: dict[int, bytes] = {}
        self._former: dict[tuple[int, int], tuple[Optimizer, int, bytes]] = {}
        self._written: dict[str, None] = {}
        self._seen: dict[int, set[tuple[Key, int]]] = {}
        self._attempts: dict[int, set[str]] = {}
        self._restored: dict[int, dict[Key, Mapping[str, Array]]] = {}
        self._over: set[int] = set()
        self._birth = birth
        self._leases: dict[int, Leases] = {}
        self._totals = ServerStatistics()

    # ---- variables -----------------------------------------------------------------------

    def create(self, shards: Sequence[NewShard]) -> None:
        """Keep new shards.

        Raises:
            Exception: What a function raises that makes rows.
        """
        for new in shards:
            value = _made(new) if isinstance(new.value, ShardRows) else frozen(new.value)
            options = VariableOptions(
                new.name, new.trainable, VariableAggregation.NONE, constraint=new.constraint
            )
            self._shards[new.key] = PlainVariable(value, options)

    def learn(self, optimizer: int, data: bytes, version: int = 0, closure: int = 0) -> None:
        """Take an optimizer, or new settings of one whose slots stay.

        Args:
            optimizer: Its number.
            data: Its recipe, pickled.
            version: Which settings these are.
            closure: The first one that has them; those before it have the ones before.
        """
        if self._versions.get(optimizer, -1) >= version:
            return  # told again, by who does not know that it was heard
        recipe: OptimizerRecipe = pickle.loads(data)
        new = recipe.applying()
        old = self._optimizers.get(optimizer)
        if old is not None and old.slot_names == new.slot_names:
            new.settings.slots = old.settings.slots
            before = self._versions[optimizer], self._recipes[optimizer]
            self._former[optimizer, before[0]] = old, closure, before[1]
        self._optimizers[optimizer], self._versions[optimizer] = new, version
        self._recipes[optimizer] = data
        for key, slots in self._restored.pop(optimizer, {}).items():
            self._restore_slots(new, self._shards[key], slots)

    def pull(self, pulls: Sequence[Pull]) -> list[Pulled]:
        """Return version and value of shards; no value where the caller has that version."""
        return [self._pull(pull) for pull in pulls]

    def _pull(self, pull: Pull) -> Pulled:
        shard = self._shards[pull.key]
        version = shard.version
        self._totals.pulls += 1
        if pull.slot is not None:
            shard = self._slot(shard, pull.slot)
        elif pull.known_version == version and pull.rows is None:
            return version, None
        value = shard.components[0]
        if pull.rows is not None:
            value = value[pull.rows]
        self._totals.bytes_pulled += value.nbytes
        return version, value

    def _slot(self, shard: PlainVariable, slot: Slot) -> PlainVariable:
        optimizer, name = slot
        owner = self._optimizers[optimizer]
        owner.settings.slots.make(shard, owner.new_slot)
        found: Any = owner.get_slot(shard, name)
        return found  # type: ignore[no-any-return]  # made without a strategy

    # ---- pushes --------------------------------------------------------------------------

    def push(self, stamp: Stamp, items: Sequence[Item]) -> dict[Key, int]:
        """Apply what a closure pushes; return the counts.

        Returns:
            For each `Count` how many updates there are, this one included.
        """
        if stamp.closure != FROM_COORDINATOR:
            self._totals.bytes_pushed += sum(_size_of(item) for item in items)
            items = self._new_items(stamp, items)
        elif stamp.attempt in self._written:
            return {}
        elif stamp.attempt:
            self._written[stamp.attempt] = None
            for old in [*self._written][:-MAX_WRITTEN]:
                del self._written[old]
        counts: dict[Key, int] = {}
        for item in items:
            self._apply(item, counts)
            if stamp.closure != FROM_COORDINATOR:
                self._seen.setdefault(stamp.closure, set()).add((item.key, item.ordinal))
        return counts

    def _new_items(self, stamp: Stamp, items: Sequence[Item]) -> list[Item]:
        """Return the items that are to be applied; count the others."""
        totals = self._totals
        if stamp.epoch != self._epoch:
            totals.dropped += len(items)
            return []
        self._forget_below(stamp.oldest)
        if _is_over(stamp, self._oldest, self._over):
            totals.dropped += len(items)
            return []
        attempts = self._attempts.setdefault(stamp.closure, set())
        if stamp.attempt not in attempts:
            totals.retries += bool(attempts)
            attempts.add(stamp.attempt)
        seen = self._seen.setdefault(stamp.closure, set())
        fresh = [item for item in items if (item.key, item.ordinal) not in seen]
        totals.dropped += len(items) - len(fresh)
        return fresh

    def _forget_below(self, oldest: int) -> None:
        if oldest > self._oldest:
            self._oldest = oldest
            self._over = {closure for closure in self._over if closure >= oldest}
            former = self._former.items()
            self._former = {key: each for key, each in former if each[1] > oldest}
            for record in (self._seen, self._attempts):
                for closure in [closure for closure in record if closure < oldest]:
                    del record[closure]

    def _apply(self, item: Item, counts: dict[Key, int]) -> None:
        shard = self._shards[item.key]
        if isinstance(item, Gradient):
            self._apply_gradient(item, shard, counts)
            return
        if isinstance(item, Judgement):
            self._judge(item, shard)
            return
        verb, value = ("assign_add", 1) if isinstance(item, Count) else (item.verb, item.value)
        new = combined(shard, verb, shard.components[0], fitting(shard, value))
        shard.store.write({shard: (new,)})
        self._totals.pushes += 1
        if isinstance(item, Count):
            counts[item.key] = int(shard.components[0])

    def _judge(self, item: Judgement, shard: PlainVariable) -> None:
        """Have a loss scale follow a step."""
        scale, counter = float(shard.components[0]), self._shards[item.num_finite]
        if not item.is_finite and item.used is not None and item.used > scale:
            return  # another step has found out already that it was too large
        num_finite = int(counter.components[0])
        scale, num_finite = item.rule.after(scale, num_finite, item.is_finite)
        new = {counter: (frozen(np.int64(num_finite)),)}
        if not num_finite:
            new[shard] = (frozen(np.float64(scale)),)
        shard.store.write(new)
        self._totals.pushes += 1

    def _apply_gradient(self, item: Gradient, shard: PlainVariable, counts: dict[Key, int]) -> None:
        totals = self._totals
        if item.read_version is not None:
            staleness = max(0, shard.version % TERM - item.read_version % TERM)
            totals.max_staleness = max(totals.max_staleness, staleness)
            if self._max_staleness is not None and staleness > self._max_staleness:
                totals.stale += 1
                return
            totals.staleness_sum += staleness
        iteration = item.iteration
        if iteration is None:
            key = (item.optimizer, 0)
            done = counts.get(key)
            iteration = int(self._shards[key].components[0]) if done is None else done
            iteration = max(0, iteration - 1)
        newest = self._optimizers[item.optimizer]
        optimizer = self._former.get((item.optimizer, item.recipe), (newest,))[0]
        iterations = optimizer.settings.iterations
        iterations.store.write({iterations: (frozen(np.int64(iteration)),)})
        merged = merge_gradients([shard], [[item.gradient]], is_mean=False)
        pending = take_step(optimizer, merged, None, None, is_blocking=True)
        assert pending is None
        self._totals.pushes += 1
        self._totals.gradients += 1

    # ---- checkpoints -----------------------------------------------------------------------

    def slots(self) -> list[SlotSpec]:
        """Return every slot that there is."""
        return [
            SlotSpec(key, (number, name), slot.shape, slot.dtype)
            for number, optimizer in self._optimizers.items()
            for key, slots in _slots_of(optimizer, self._shards)
            for name, slot in slots.items()
        ]

    def load(
        self, values: Mapping[Key, Array], slots: Mapping[tuple[Key, int], Mapping[str, Array]],
        epoch: int, oldest: int, optimizers: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Take values of a checkpoint.

        Args:
            values: By shard.
            slots: By shard and optimizer, then by name.
            epoch: From now on; pushes of another one are dropped.
            oldest: The oldest closure that is not over.
            optimizers: Those that were restored: slots of these shards that are not given are
                forgotten.
        """
        for key, value in values.items():
            shard = self._shards[key]
            shard.store.write({shard: (frozen(value),)})
            for number in optimizers:
                if number in self._optimizers:
                    self._optimizers[number].settings.slots.made.pop(shard)
                self._restored.get(number, {}).pop(key, None)
        for (key, number), given in slots.items():
            known = self._optimizers.get(number)
            if known is not None:
                self._restore_slots(known, self._shards[key], given)
            else:  # until a closure brings it
                self._restored.setdefault(number, {})[key] = given
        self._epoch = epoch
        self._oldest = oldest
        self._over.clear()
        self._seen.clear()
        self._attempts.clear()

    def _restore_slots(
        self, optimizer: Optimizer, shard: PlainVariable, values: Mapping[str, Array]
    ) -> None:
        table = optimizer.settings.slots
        table.made.pop(shard)
        table.restored[shard] = dict(values)
        table.make(shard, optimizer.new_slot)

    # ---- copies ----------------------------------------------------------------------------

    def image(self) -> ServerImage:
        """Return all that it knows; what is pushed later changes nothing of it."""
        shards = [(_described(key, shard), shard.version) for key, shard in self._shards.items()]
        return ServerImage(
            tuple(shards),
            {number: (data, self._versions[number]) for number, data in self._recipes.items()},
            {key: (data, closure) for key, (_, closure, data) in self._former.items()},
            {
                (key, number): {name: slot.components[0] for name, slot in slots.items()}
                for number, optimizer in self._optimizers.items()
                for key, slots in _slots_of(optimizer, self._shards)
            },
            copy.deepcopy({name: getattr(self, name) for name in RECORDS}),
        )

    def take_over(self, image: ServerImage) -> None:
        """Know what another one has known."""
        self.create([shard for shard, _ in image.shards])
        for shard, version in image.shards:
            _count_writes(self._shards[shard.key], version)
        for number, (data, version) in image.optimizers.items():
            self.learn(number, data, version)
        for (number, version), (data, closure) in image.former.items():
            recipe: OptimizerRecipe = pickle.loads(data)
            former = recipe.applying()
            former.settings.slots = self._optimizers[number].settings.slots
            self._former[number, version] = former, closure, data
        for (key, number), slots in image.slots.items():
            self._restore_slots(self._optimizers[number], self._shards[key], slots)
        for name, record in image.records.items():
            setattr(self, name, record)

    def begin_term(self) -> None:
        """Take the place of another one, which may have had versions that are not known here."""
        for shard in self._shards.values():
            _count_writes(shard, (shard.version // TERM + 1) * TERM + shard.version % TERM)

    # ---- the rest --------------------------------------------------------------------------

    def leases(self) -> dict[int, Leases]:
        """Return what is left of each iterator, while no closure is under way."""
        return {number: each.as_learned() for number, each in self._leases.items()}

    def lease(self, leases: Mapping[int, Leases], birth: int) -> None:
        """Know this of iterators, and nothing else."""
        self._leases, self._birth = dict(leases), birth

    def take(
        self, stamp: Stamp, iterator: int, num_splits: int, birth: int, ordinal: int, index: int,
        ended: Element | None,
    ) -> Element | None:  # fmt: skip
        """Lease an element of an iterator to a closure; None if nothing is left for it.

        Raises:
            WorkerLostError: If the server that knew what was taken is gone.
        """
        if birth != self._birth:
            raise WorkerLostError(
                "What was taken from an iterator of per-worker datasets was lost with a parameter "
                "server. Make a new iterator, and begin the epoch anew."
            )
        leases = self._leases.setdefault(iterator, Leases(num_splits))
        if stamp.is_over:
            leases.settle(0, finished=(stamp.closure,))  # which may not have been told yet
        if _is_over(stamp, self._oldest, self._over) and not leases.has_learned(stamp.closure):
            return None
        if ended is not None:
            leases.end(stamp.closure, *ended)
        return leases.take(stamp.closure, ordinal, index)

    def report(
        self, oldest: int, failed: Sequence[int] = (), dropped: Sequence[int] = (),
        finished: Sequence[int] = (),
    ) -> ServerStatistics:  # fmt: skip
        """Learn which closures are over; return what was done so far.

        Args:
            oldest: The oldest closure that is not over.
            failed: Those that have ended badly; some may be above `oldest`.
            dropped: Iterators that nobody has any more.
            finished: Those above `oldest` that have ended well.
        """
        for leases in self._leases.values():
            leases.settle(oldest, frozenset(failed), frozenset(finished))
        for iterator in dropped:
            self._leases.pop(iterator, None)
        self._forget_below(oldest)
        self._over.update(number for number in (*failed, *finished) if number >= self._oldest)
        return replace(self._totals)

    def __repr__(self) -> str:
        pushes = self._totals.pushes
        return f"<ParameterServer {self._server} | {len(self._shards)} shards, {pushes} pushes>"


def _is_over(stamp: Stamp, oldest: int, over: set[int]) -> bool:
    return stamp.is_over or stamp.closure < oldest or stamp.closure in over


def _described(key: Key, shard: PlainVariable) -> NewShard:
    return NewShard(key, shard.components[0], shard.name, shard.trainable, shard.constraint)


def _slots_of(
    optimizer: Optimizer, shards: Mapping[Key, PlainVariable]
) -> Iterator[tuple[Key, dict[str, Variable]]]:
    table = optimizer.settings.slots
    for key, shard in shards.items():
        made = table.made.get(shard)
        if made is not None:
            yield key, dict(zip(table.names_of(shard), made, strict=True))


def _count_writes(shard: PlainVariable, num_writes: int) -> None:
    shard._cell = shard._cell._replace(num_writes=num_writes)


def _made(new: NewShard) -> Array:
    from ...devices.processes import loads_pair  # it needs cloudpickle

    rows: Any = new.value
    (fn, _), _ = loads_pair(rows.call.whole, rows.call.buffers, None)
    return rows_between(fn, new.name, rows.begin, rows.shape, rows.dtype)


def _size_of(item: Item) -> int:
    if isinstance(item, Gradient):
        return num_bytes(item.gradient)
    return num_bytes(item.value) if isinstance(item, Write) else 8


def frozen(value: Any) -> Array:
    """Return a read-only copy of a value."""
    array = np.array(value)
    array.flags.writeable = False
    return array
