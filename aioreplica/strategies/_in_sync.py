"""check_in_sync: whether the components of variables are the same, bit by bit.

Components are compared by hash, so the cost is one pass over each, and nothing at all where they
are one shared array (which they are unless components were updated one by one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..collectives import gather_across
from ..devices import INLINE_BYTES, run_on_host
from ..errors import ContextError, OutOfSyncError
from ..tree import Array
from ..values import Variable, is_own
from ._runtime import Runtime

if TYPE_CHECKING:
    from ..cluster import Workers

Named: TypeAlias = tuple[str, tuple[Array, ...]]

_X87_BYTES = 10  # of an extended-precision number; the rest of its 12 or 16 is never written


async def check_in_sync(runtime: Runtime, variables: Iterable[Variable]) -> None:
    """Check that the components of each variable are equal on all replicas, bit by bit.

    All components are those of one moment: that of the call, or with several workers that of its
    turn behind the runs before it. NaN equals a NaN of the same bits; 0.0 and -0.0 differ.
    Sync-on-read variables are passed over: theirs are meant to differ.

    Args:
        runtime: The strategy that made them.
        variables: The variables to check, such as `strategy.trainable_variables`.

    Raises:
        OutOfSyncError: Naming the first variable that differs, and where.
        TypeError: If `variables` is not an iterable of variables.
        ValueError: If it is empty.
        ContextError: If called inside a replica, or a variable belongs to another strategy.

    Cancellation:
        Changes nothing; hashing that has started is waited for. Tells the other workers, once its
        turn has begun.
    """
    runtime.require_cross_replica(
        "check_in_sync", "ctx.merge_call(merge_fn) and check inside the merge function"
    )
    checked = [variable for variable in _checked(runtime, variables) if variable.is_mirrored]
    if runtime.workers is not None:
        await _check_workers(runtime.workers, checked)
    else:
        await _check_here([(variable.name, variable.components) for variable in checked])


async def _check_here(held: Sequence[Named]) -> None:
    """Compare the components of each variable on this worker, by hash.

    Raises:
        OutOfSyncError: For the first one that differs.
    """
    apart = [(name, parts) for name, parts in held if len(set(map(id, parts))) > 1]
    num_bytes = sum(part.nbytes for _, parts in apart for part in parts)
    if num_bytes < INLINE_BYTES:
        error = _first_difference(apart)
    else:
        error = await run_on_host(_first_difference, apart)
    if error is not None:
        raise error


async def _check_workers(workers: Workers, variables: Sequence[Variable]) -> None:
    """Compare components here, then the first one of each variable over the workers, by hash.

    Raises:
        OutOfSyncError: On all workers, naming the first replica of the worker that differs.
    """
    names = ", ".join(variable.name for variable in variables)
    async with workers.operation("check_in_sync", names) as turn:
        held = [(variable.name, variable.components) for variable in variables]
        await _check_here(held)  # of an error the others hear
        firsts = [parts[0] for _, parts in held]
        if sum(part.nbytes for part in firsts) < INLINE_BYTES:
            digests = list(map(_digest, firsts))
        else:
            digests = await run_on_host(lambda: list(map(_digest, firsts)))
        mine = np.frombuffer(b"".join(digests), np.uint8)
        [rows] = await gather_across(turn, [mine.reshape(1, -1)], 0)
        for index, (name, parts) in enumerate(held):
            place = slice(16 * index, 16 * index + 16)
            found = [row[0, place].tobytes() for row in rows]
            differs = next((rank for rank, each in enumerate(found) if each != found[0]), None)
            if differs is None:
                continue
            own = parts[0].reshape(1, *parts[0].shape)
            [arrays] = await gather_across(turn, [own], 0, what=name)
            replica_id = differs * workers.num_local_replicas
            raise _difference(name, replica_id, arrays[0][0], arrays[differs][0])


def _checked(runtime: Runtime, variables: object) -> list[Variable]:
    if isinstance(variables, Variable) or not isinstance(variables, Iterable):
        raise TypeError(
            f"check_in_sync needs a list of variables, got {variables!r} "
            f"({type(variables).__name__})."
        )
    checked = list(variables)
    if not checked:
        raise ValueError(
            "check_in_sync needs at least one variable, got none. Create variables in "
            "strategy.scope()."
        )
    for variable in checked:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"check_in_sync needs a list of variables, but it holds {variable!r} "
                f"({type(variable).__name__})."
            )
        if not is_own(variable, runtime):
            raise ContextError(
                f"{variable!r} does not belong to {runtime!r}. Check it through its own strategy."
            )
    return checked


def _first_difference(held: Sequence[Named]) -> OutOfSyncError | None:
    """Return the error for the first variable out of sync, None if there is none."""
    for name, parts in held:
        digests: dict[int, bytes] = {}
        for replica_id, part in enumerate(parts):
            if id(part) not in digests:
                digests[id(part)] = _digest(part)
            if digests[id(part)] != digests[id(parts[0])]:
                return _difference(name, replica_id, parts[0], part)
    return None


def _digest(array: Array) -> bytes:
    digest = blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(_bits(array)).data)
    return digest.digest()


def _bits(array: Array) -> Array:
    """Return the bytes that make up each element, one row per element."""
    width = array.dtype.itemsize
    rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, width)
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        return rows
    numbers = rows.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :_X87_BYTES]
    return numbers.reshape(array.size, -1 if array.size else 0)


def _difference(name: str, replica_id: int, first: Array, other: Array) -> OutOfSyncError:
    advice = (
        "Write one value to all replicas (await variable.assign(variable.value)), and look for an "
        "extended.update that depends on the replica."
    )
    if first.shape != other.shape or first.dtype != other.dtype:
        return OutOfSyncError(
            f"Variable {name!r} is out of sync: replica {replica_id} holds {other.dtype} "
            f"{other.shape} but replica 0 holds {first.dtype} {first.shape}. {advice}",
            variable=name,
            replica_id=replica_id,
            max_difference=float("inf"),
        )
    differs = (_bits(first) != _bits(other)).any(axis=1)
    positions = np.flatnonzero(differs)
    index = tuple(int(i) for i in np.unravel_index(int(positions[0]), first.shape))
    largest = _largest(first.reshape(-1)[positions], other.reshape(-1)[positions])
    return OutOfSyncError(
        f"Variable {name!r} is out of sync: replica {replica_id} holds {other[index]} at index "
        f"{index} but replica 0 holds {first[index]}. {len(positions)} of {first.size} elements "
        f"differ, by at most {largest:g}. {advice}",
        variable=name,
        replica_id=replica_id,
        index=index,
        max_difference=largest,
    )


def _largest(first: Array, other: Array) -> float:
    """Return the largest distance of two flat arrays; infinity where a NaN meets something else."""
    if first.dtype.kind in "iub":
        unsigned = np.dtype(f"u{first.dtype.itemsize}")  # holds every distance, where int64 may not
        high, low = np.maximum(first, other), np.minimum(first, other)
        return float((high.astype(unsigned) - low.astype(unsigned)).max())
    wide = np.result_type(first.dtype, np.float64) if first.dtype.kind in "fc" else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(first.astype(wide) - other.astype(wide))
    return float(np.where(np.isnan(distance), np.inf, distance).max())
