"""Restoring: what of a checkpoint goes where, found first; then everything is put there at once."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial as bound
from typing import Any, final

import numpy as np

from ..collectives import SLOT_BYTES, no_data
from ..errors import CheckpointError, ContextError
from ..input import DistributedDataset, Stateful
from ..tree import Array, Tree, decode
from ..typing import VariableAggregation
from ..values import DividedVariable, Division, Variable, between_steps, workers_of
from ._format import DamagedError, EntryRecord, Manifest, dtype_of
from ._lane import run_all
from ._reading import (
    NUM_LOOKS,
    FoundStep,
    changing_error,
    gathered,
    newest_whole,
    no_step_error,
)
from ._retry import new_stop
from ._state import (
    NUMBERS,
    SCALARS,
    Deferring,
    DescribedState,
    Entry,
    State,
    dtype_name,
    read_state,
)
from ._storage import Storage
from ._tensors import read_tensors

Arrays = Mapping[str, Sequence[Array]]

NUM_LISTED = 8


@final
class MisfitError(CheckpointError):
    """Raised when a checkpoint is that of another state."""


@final
@dataclass(frozen=True, slots=True)
class Restored:
    """Result of restoring a state from a checkpoint.

    Attributes:
        step: The step that was restored.
        missing: Keys of the state that the checkpoint has nothing for; they are as they were.
        unclaimed: Keys of the checkpoint that nothing in the state took.
        deferred: Keys whose values wait for an object to be made: slots of an optimizer.
        damaged: Newer steps that were passed over, and why.
    """

    step: int
    missing: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()


async def restore_step(
    storage: Storage, state: object, step: int | None, *, partial: bool
) -> Restored:
    """Restore a step, or the newest one that is not damaged.

    Raises:
        CheckpointError: If there is none, all are damaged, one cannot be read, or it does not fit
            the state.
    """
    damaged: dict[int, FoundStep] = {}
    num_lost = 0  # steps that another manager has removed or replaced while they were read
    while num_lost < NUM_LOOKS:
        before = damaged
        look = bound(newest_whole, storage, before, step)
        [(found, damaged)] = await run_all([look], new_stop(storage))
        num_lost += any(damaged.get(one) is not each for one, each in before.items())
        if found is None:
            raise _nothing_left(storage, step, _saved(damaged))
        assert found.manifest is not None  # it is whole
        try:
            plan = await _restore_from(storage, found.manifest, state, is_partial=partial)
        except DamagedError as error:
            damaged[found.step] = replace(found, damage=str(error))
            continue
        return Restored(
            found.step,
            tuple(plan.missing),
            tuple(plan.unclaimed),
            tuple(plan.deferred),
            tuple((one, each.damage) for one, each in _saved(damaged).items()),
        )
    raise changing_error(storage)


def _saved(passed: Mapping[int, FoundStep]) -> dict[int, FoundStep]:
    return {step: each for step, each in passed.items() if each.is_saved}


def _nothing_left(
    storage: Storage, step: int | None, damaged: Mapping[int, FoundStep]
) -> CheckpointError:
    if not damaged:
        return no_step_error(storage, step)
    listed = "; ".join(f"step {one}: {each.damage}" for one, each in damaged.items())
    return CheckpointError(f"No step in {storage} can be restored. {listed}.")


async def _restore_from(
    storage: Storage, manifest: Manifest, state: object, *, is_partial: bool
) -> Plan:
    added: Collection[str] = ()
    if isinstance(state, DescribedState) and state.adapt is not None:
        manifest, added = state.adapt(manifest)
    found = read_state(state)
    manifest = gathered(found, manifest)
    plan = make_plan(found, manifest, partial=is_partial, added=added)
    ranges = plan.ranges()
    read = bound(read_tensors, storage, manifest, plan.keys, ranges)
    arrays = await read_together(found, manifest.step, read)
    async with between_steps(read_state(state).gates):
        now = read_state(state)
        # Steps may have made slots meanwhile.
        plan = make_plan(now, manifest, partial=is_partial, added=added)
        if any(ranges.get(key, part) != part for key, part in plan.ranges().items()):
            raise ContextError(
                f"The workers have changed while step {manifest.step} was restored, and with them "
                "what this one needs. Nothing was changed; restore again."
            )
        for each in now.elsewhere():
            each.require_cluster()
        apply_plan(now, plan, manifest, arrays, with_steps=not is_partial)
        for each in now.elsewhere():
            await each.send_out(now.variables.values(), now.composites.values())
    return plan


async def read_together(
    state: State, step: int, read: Callable[[], Awaitable[dict[str, list[Array]]]]
) -> dict[str, list[Array]]:
    """Read what this worker needs; damage that one worker finds is damage for all of them.

    Raises:
        DamagedError: As `read_tensors`, on all workers.
        MergeMismatchError: If they read different steps.
        WorkerLostError: If another worker cannot read.
    """
    workers = next(filter(None, map(workers_of, state.variables.values())), None)
    if workers is None:
        return await read()
    arrays: dict[str, list[Array]] = {}
    async with workers.operation("CheckpointManager.restore", f"reading step {step}") as turn:
        damage = ""
        try:
            arrays = await read()
        except DamagedError as error:
            damage = str(error)
        slots = await turn.exchange(damage.encode()[:SLOT_BYTES], no_data)
    for rank, slot in enumerate(slots):
        found = slot.rstrip(b"\0").decode("utf-8", "replace")
        if found:
            raise DamagedError(f"{found}, as worker {rank} has found")
    return arrays


@final
@dataclass(slots=True)
class Plan:
    """Plan of which tensor of a checkpoint restores which part of the state.

    Attributes:
        direct: Entries of the state that have one in the checkpoint.
        deferred: Keys of the checkpoint for parts that are not made yet, with their owners.
        divisions: Divisions among workers of what is deferred, of which each takes its part.
        forgotten: Parts that were not made yet when the state was saved.
        kept: Parts of objects, by key, that stay as they are: those of what the checkpoint does
            not have.
        missing: As in `Restored`.
        unclaimed: As in `Restored`.
    """

    direct: list[Entry] = field(default_factory=list)
    deferred: dict[str, Variable | None] = field(default_factory=dict)
    divisions: dict[str, Division] = field(default_factory=dict)
    forgotten: list[Entry] = field(default_factory=list)
    kept: dict[str, Entry] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """The entries of the checkpoint that have to be read."""
        return [*(entry.key for entry in self.direct), *self.deferred]

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return which elements of divided variables this worker needs, by key."""
        needed = {
            entry.key: entry.thing.division_now()
            for entry in self.direct
            if isinstance(entry.thing, DividedVariable)
        }
        return {key: each.ranges[each.rank] for key, each in {**needed, **self.divisions}.items()}


def relabelled(manifest: Manifest, now: Callable[[str], str | None]) -> Manifest:
    """Return a manifest whose entries have other keys, and slots those of their variables.

    Args:
        manifest: The manifest.
        now: Gives the other key, None to leave an entry out.
    """
    entries: dict[str, EntryRecord] = {}
    for key, record in manifest.entries.items():
        owner = now(record.owner) if record.owner else ""
        made_by = now(record.object) if record.object else ""
        own = f"{made_by}/slots/{owner}/{record.part}" if record.owner else now(key)
        if own is not None and owner is not None and made_by is not None:
            entries[own] = replace(record, owner=owner, object=made_by)
    return replace(manifest, entries=entries)


def make_plan(
    state: State, manifest: Manifest, *, partial: bool, added: Collection[str] = ()
) -> Plan:
    """Find out what of a checkpoint goes where.

    Args:
        state: The state.
        manifest: That of the checkpoint.
        partial: Whether either side may have what the other has not.
        added: Keys of the state, or first parts of some, that the checkpoint may lack.

    Raises:
        CheckpointError: If a shape, dtype or kind differs; or, unless `partial`, if an entry of
            either side has none on the other.
    """
    plan, problems, starts = Plan(), [], tuple(f"{key}/" for key in added)
    objects = {record.object for record in manifest.entries.values()}
    owners = state.owners()
    plan.kept = _kept(state, manifest, objects) if partial else {}
    for key, entry in state.entries.items():
        record = manifest.entries.get(key)
        if record is not None:
            problems += _problems(entry, record)
            plan.direct.append(entry)
        elif key in plan.kept:
            plan.missing.append(key)
        elif entry.owner is not None and entry.object in objects:
            plan.forgotten.append(entry)
        elif entry.composite is None or isinstance(entry.thing, Variable):
            plan.missing.append(key)
    for key, record in manifest.entries.items():
        if key in state.entries:
            continue
        composite = state.composites.get(record.object)
        owner = owners.get(record.owner)
        if (
            isinstance(composite, Deferring)
            and (owner is not None or not record.owner)
            and composite.awaits_entry(owner, record.part)
        ):
            plan.deferred[key] = owner
            if record.kind == "variable":
                division = composite.division_of(owner, record.shape, dtype_of(record.dtype))
                if division is not None:
                    plan.divisions[key] = division
        else:
            plan.unclaimed.append(key)
    if problems:
        raise MisfitError(
            f"Step {manifest.step} does not fit the state: {_listed(problems)}. Nothing was "
            "changed."
        )
    plan.missing = [key for key in plan.missing if not f"{key}/".startswith(starts)]
    if (plan.missing or plan.unclaimed) and not partial:
        raise MisfitError(
            f"Step {manifest.step} does not match the state. Only in the state: "
            f"{_listed(plan.missing)}. Only in the checkpoint: {_listed(plan.unclaimed)}. Nothing "
            "was changed; restore(state, partial=True) takes what matches."
        )
    return plan


def _kept(state: State, manifest: Manifest, objects: Collection[str]) -> dict[str, Entry]:
    """Return the parts of objects that a partial restore leaves alone.

    A part that is not in a checkpoint was not made yet when that was saved, unless its variable is
    not there either; or its object, of which one with parts of no variable always leaves some: an
    optimizer counts its updates, while an accumulator without sums leaves nothing.
    """
    owners = state.owners()
    whole = {each.object for each in state.entries.values() if each.owner is None} - {*objects}
    return {
        key: each
        for key, each in state.entries.items()
        if key not in manifest.entries
        and isinstance(each.composite, Deferring)
        and (
            each.object in whole
            or (each.owner_key in owners and each.owner_key not in manifest.entries)
        )
    }


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - NUM_LISTED} more" if len(found) > NUM_LISTED else ""
    return "; ".join(found[:NUM_LISTED]) + more if found else "nothing"


def _problems(entry: Entry, record: EntryRecord) -> list[str]:
    """Say what of an entry does not fit."""
    thing, key = entry.thing, entry.key
    if _is_number_for(thing, record):
        return []
    if isinstance(thing, Variable):
        expected, kind = (thing.shape, dtype_name(thing.dtype, key)), "variable"
    elif isinstance(thing, (np.ndarray, np.generic)):
        expected, kind = (thing.shape, dtype_name(thing.dtype, key)), "array"
    else:
        expected, kind = None, "value"
    if (record.kind == "value") != (kind == "value"):
        return [f"{key!r} is a {kind} here and a {record.kind} there"]
    if expected is not None and expected != (record.shape, record.dtype):
        here = f"shape {expected[0]} and dtype {expected[1]}"
        return [f"{key!r} has {here} here, shape {record.shape} and dtype {record.dtype} there"]
    if isinstance(thing, np.random.Generator):
        mine = type(thing.bit_generator).__name__
        saved = record.value.get("bit_generator") if isinstance(record.value, dict) else None
        return [] if mine == saved else [f"{key!r} is a generator of {mine} here, {saved} there"]
    return []


def _is_number_for(thing: object, record: EntryRecord) -> bool:
    """Tell whether a scalar was saved for a plain number, or a number that a scalar can be."""
    if record.kind == "value" and isinstance(thing, np.generic) and not record.tensors:
        return _as_scalar(thing, value_of("", record, ())) is not None
    is_number = type(thing) in NUMBERS and record.kind == "array" and record.shape == ()
    return is_number and dtype_of(record.dtype).type in SCALARS


def _as_scalar(like: np.generic, value: object) -> np.generic | None:
    """Return a number in the dtype of a scalar; None if that would be another number."""
    if type(value) not in {int, float, bool} or type(like) not in SCALARS:
        return None
    try:
        with np.errstate(all="ignore"):
            made: np.generic = like.dtype.type(value)
    except (OverflowError, ValueError):
        return None
    is_rounded = isinstance(made, np.floating) and not np.isinf(made)
    return made if is_rounded or made == value else None


# ---- variables ---------------------------------------------------------------------------


def components_for(variable: Variable, record: EntryRecord, saved: Sequence[Array]) -> Any:
    """Return the components of a variable for those that were saved.

    As many as there are now are taken as they are. Else an on-read variable gets what a reader
    outside the replicas saw, divided over its components if they are added up.

    Source:
        tf.distribute's restore of SyncOnReadVariable.
    """
    here = len(variable._cell.components)
    if isinstance(variable, DividedVariable):
        found, division = aggregated(record, saved), variable.division_now()
        if found.shape == variable.shape:  # of a slot that was not made when it was read
            found = division.part_of(found).copy()
        return (_read_only(found.reshape(division.part_shape)),) * here
    workers = workers_of(variable)
    count = here if workers is None else workers.num_replicas
    if variable.is_mirrored or len(saved) == 1 == count:
        return (aggregated(record, saved),) * here
    if len(saved) == count and record.synchronization == variable.synchronization.value:
        first = 0 if workers is None else workers.first_replica
        return tuple(saved[first : first + here])
    shares = variable._shares("assign", aggregated(record, saved))
    return tuple(map(_read_only, shares))


def aggregated(record: EntryRecord, saved: Sequence[Array]) -> Array:
    """Return what a reader outside the replicas saw of the components of a variable."""
    if len(saved) == 1 or record.aggregation in {
        VariableAggregation.NONE.value, VariableAggregation.ONLY_FIRST_REPLICA.value
    }:  # fmt: skip
        return saved[0]
    total: Any = saved[0]
    for each in saved[1:]:
        total = total + each
    if record.aggregation == VariableAggregation.MEAN.value:
        total = total / len(saved)
        if saved[0].dtype.kind in "iu":
            total = np.rint(total)
    return _read_only(np.asarray(total).astype(saved[0].dtype, copy=False))


def _read_only(array: object) -> Array:
    own: Array = np.asarray(array)
    if own.flags.writeable:
        own.flags.writeable = False
    return own


# ---- applying ----------------------------------------------------------------------------


def apply_plan(
    state: State,
    plan: Plan,
    manifest: Manifest,
    arrays: Arrays,
    *,
    with_steps: bool,
    is_of_this_worker: bool = False,
) -> None:
    """Put everything where it belongs, all or nothing; for who holds the steps back.

    `is_of_this_worker` tells that on-read variables have the components of this worker alone, and
    not those of all; `with_steps` puts the numbers of steps back too.

    Raises:
        DamagedError: If something was read that was never saved. Then nothing has changed.
        Exception: What an object raises that refuses its state. Then nothing has changed.
    """
    changes: dict[int, dict[Variable, Any]] = {}
    values: dict[str, Tree] = {}
    for entry in plan.direct:
        record, saved = manifest.entries[entry.key], arrays[entry.key]
        if isinstance(entry.thing, Variable):
            own = changes.setdefault(id(entry.thing.store), {})
            if is_of_this_worker and not entry.thing.is_mirrored:
                own[entry.thing] = tuple(saved)
            else:
                own[entry.thing] = components_for(entry.thing, record, saved)
        else:
            values[entry.key] = value_of(entry.key, record, saved)
    deferred: dict[int, dict[Any, object]] = {}
    for key, owner in plan.deferred.items():
        record = manifest.entries[key]
        own_parts = deferred.setdefault(id(state.composites[record.object]), {})
        own_parts[owner, record.part] = value_of(key, record, arrays[key])
    _put_all([each for each in plan.direct if each.key in values], values)
    for own in changes.values():
        for variable in own:
            if isinstance(variable, DividedVariable):
                variable.divide_anew()
        next(iter(own)).store.write(own)
    for entry in plan.direct:
        if entry.key in values and entry.composite is not None:
            parts = deferred.setdefault(id(entry.composite), {})
            parts[entry.owner, entry.part] = values[entry.key]
    for entry in plan.kept.values():  # what is made keeps itself
        if not isinstance(entry.thing, Variable):
            parts = deferred.setdefault(id(entry.composite), {})
            parts[entry.owner, entry.part] = entry.thing
    for entry in plan.forgotten:
        if isinstance(entry.composite, Deferring) and entry.owner is not None:
            entry.composite.forget_entries(entry.owner)
    for composite in state.composites.values():
        if isinstance(composite, Deferring):
            composite.load_entries(deferred.get(id(composite), {}))
    if with_steps:
        for gate, number in zip(state.gates, manifest.next_steps, strict=False):
            gate.next_step = number


def value_of(key: str, record: EntryRecord, saved: Sequence[Array]) -> object:
    """Return what an entry that is not a variable in place holds.

    Raises:
        DamagedError: If no plain data are written like that.
    """
    if record.kind == "value":
        try:
            return decode(record.value, [np.array(array) for array in saved])
        except Exception as error:
            raise DamagedError(f"{key!r} is not plain data: {error!r}") from error
    return aggregated(record, saved) if record.kind == "variable" else np.array(saved[0])


def _put_all(entries: Sequence[Entry], values: Mapping[str, Tree]) -> None:
    """Replace values, all or none.

    A dataset ends its open loop, which is not undone: so it is asked first and comes last.
    """
    for each in entries:
        if isinstance(each.thing, DistributedDataset):
            each.thing._place_of(values[each.key])
    with ExitStack() as undo:
        for each in sorted(entries, key=lambda each: isinstance(each.thing, DistributedDataset)):
            if each.composite is None:
                _put(each, values[each.key], undo.callback)
        undo.pop_all()


def _put(entry: Entry, value: Tree, undo: Callable[..., object]) -> None:
    """Replace one value; `undo` is called with what puts the old one back.

    Raises:
        DamagedError: If it is for a generator, which does not take it.
        Exception: What an object raises that refuses its state.
    """
    thing = entry.thing
    if isinstance(thing, np.random.Generator):
        generator = thing.bit_generator
        undo(_set_generator, generator, generator.state)
        try:
            generator.state = value
        except Exception as error:
            raise DamagedError(
                f"{entry.key!r} is not the state of a generator: {error!r}"
            ) from error
    elif isinstance(thing, np.ndarray) and thing.flags.writeable:
        undo(np.copyto, thing, thing.copy())
        np.copyto(thing, value)
    elif isinstance(thing, list) and isinstance(value, list):
        undo(_fill_list, thing, [*thing])
        _fill_list(thing, value)
    elif isinstance(thing, dict) and isinstance(value, dict):
        undo(_fill_dict, thing, {**thing})
        _fill_dict(thing, value)
    elif entry.container is not None:
        undo(_set_item, entry.container, entry.index, thing)
        if isinstance(thing, np.generic):
            value = value[()] if isinstance(value, np.ndarray) else _as_scalar(thing, value)
        elif type(thing) in NUMBERS and isinstance(value, np.ndarray):
            value = value.item()
        entry.container[entry.index] = value
    elif isinstance(thing, Stateful):
        undo(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
        thing.load_state_dict(value)


def _set_generator(generator: Any, state: object) -> None:
    generator.state = state


def _fill_list(old: list[object], new: list[object]) -> None:
    old[:] = new


def _fill_dict(old: dict[object, object], new: dict[object, object]) -> None:
    old.clear()
    old.update(new)


def _set_item(container: Any, index: object, value: object) -> None:
    container[index] = value
