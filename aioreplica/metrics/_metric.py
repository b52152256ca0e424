"""The metric interface: local updates without communication, an exact result over all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import is_array_api_obj

from ..collectives import reduce_across
from ..context import PLACE
from ..devices.backends import find_backends
from ..errors import ContextError
from ..tree import Array
from ..typing import ReduceOp, VariableAggregation, VariableSynchronization
from ..values import Variable, is_floating, workers_of


class Metric(ABC):
    """Totals in float64 sync-on-read variables; subclasses say what is added and what comes out.

    Make one in `strategy.scope()`, update it in the step (async or plain), read it outside. An
    update is local to its replica: no collective, nothing to await. `result()` outside the
    replicas adds their totals up first, so it is exact however examples are divided; in a replica
    it is that of the replica alone. Updates outside the replicas count once.

    Args:
        name: Names it in variables and errors.
        totals: Names of the totals.
        shape: That of each total.

    Source:
        tf.keras.metrics.Metric.
    """

    def __init__(self, name: str, totals: tuple[str, ...], shape: tuple[int, ...] = ()) -> None:
        if not isinstance(name, str):
            raise TypeError(f"The name of a metric must be a str, got {name!r}.")
        self._name = name
        self._known: tuple[Array, ...] | None = None
        self._totals = tuple(
            Variable(
                np.zeros(shape),
                trainable=False,
                name=_free_name(f"{name}/{total}"),
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for total in totals
        )

    @property
    def name(self) -> str:
        """Name, as given."""
        return self._name

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The totals."""
        return self._totals

    @abstractmethod
    def result(self) -> float | Array:
        """Return the metric over everything since the last reset."""

    async def read(self) -> Any:
        """Return `result()` over the replicas of all workers; every worker has to call it.

        Under a strategy of one worker, `result()`. Outside the replicas only. Runs that were
        called before it count, those behind it do not.

        Raises:
            ContextError: If called inside a replica.
            Exception: What the other workers' failures raise, see `strategy.run`.

        Cancellation:
            Changes nothing.
        """
        if self._own_index() is not None:
            raise ContextError(
                f"Metric {self._name!r} was read in a replica. Call `result()` there for the "
                "replica's own, and read it outside the step."
            )
        workers = workers_of(self._totals[0])
        if workers is None:
            return self.result()
        text = f"{self._name!r} {[list(total.shape) for total in self._totals]}"
        async with workers.operation("metric.read", text) as turn:
            local = [reduce(np.add, parts) for parts in self._columns()]  # behind the runs before
            totals = await reduce_across(turn, ReduceOp.SUM, local)
        whole = copy(self)  # whose totals are those of all workers
        whole._known = tuple(totals)
        return whole.result()

    def reset_state(self) -> None:
        """Start anew: on all replicas, or, inside a replica, on that one."""
        self._write(dict.fromkeys(self._totals, 0.0), is_added=False)

    def totals(self) -> tuple[Array, ...]:
        """Return the totals of one version: in a replica its own, elsewhere over all replicas.

        Shapes:
            Each has that of the metric.

        Determinism:
            Added up in ascending replica id.
        """
        if self._known is not None:
            return self._known
        index = self._own_index()
        columns = self._columns()
        if index is not None:
            return tuple(parts[index] for parts in columns)
        workers = workers_of(self._totals[0])
        if workers is not None and workers.has_others:
            raise ContextError(
                f"Metric {self._name!r} has totals on other workers, which cannot be read without "
                "waiting. Use `await metric.read()`, on every worker."
            )
        return tuple(reduce(np.add, parts) for parts in columns)

    def _columns(self) -> list[tuple[Array, ...]]:
        """Return the components of all totals, of one version."""
        while True:
            version = self._totals[0].store.version
            columns = [variable.components for variable in self._totals]
            if self._totals[0].store.version == version:
                return columns

    def add(self, *amounts: float | Array) -> None:
        """Add to the totals, all in one write."""
        self._write(dict(zip(self._totals, amounts, strict=True)), is_added=True)

    def __repr__(self) -> str:
        workers = workers_of(self._totals[0])
        if workers is not None and workers.has_others and self._own_index() is None:
            return f"<{type(self).__name__} {self._name} | read with `await metric.read()`>"
        result = self.result()
        shown = f"{result:g}" if np.ndim(result) == 0 else f"shape {np.shape(result)}"
        return f"<{type(self).__name__} {self._name} | {shown}>"

    def _write(self, amounts: Mapping[Variable, float | Array], *, is_added: bool) -> None:
        index = self._own_index()
        store, workers = self._totals[0].store, workers_of(self._totals[0])
        counting = 0 if workers is None or workers.rank == 0 else -1
        while True:  # replicas of a plain step function write from several threads
            bases = {variable: variable.components for variable in amounts}
            changes = {
                variable: _changed(parts, index, amounts[variable], counting, is_added=is_added)
                for variable, parts in bases.items()
            }
            if store.write(changes, bases, is_local=index is not None):
                return

    def _own_index(self) -> int | None:
        """Return the component of the replica that runs here; None outside."""
        place = PLACE.get()
        strategy = self._totals[0].store.owner
        is_plain = strategy is None and (place.strategy is None or place.strategy.has_plain_values)
        if place.replica is not None and (is_plain or place.strategy is strategy):
            return place.replica.local_replica_id
        if place.update_replica_id is not None or not (
            is_plain or place.strategy is None or place.strategy is strategy
        ):
            raise ContextError(
                f"Metric {self._name!r} belongs to {strategy!r} but was used in "
                f"{place.describe()}. Make it in that strategy's scope."
            )
        return None


def _changed(
    parts: tuple[Array, ...],
    index: int | None,
    amount: float | Array,
    counting: int,
    *,
    is_added: bool,
) -> tuple[Array, ...]:
    new = list(parts)
    for i in range(len(parts)) if index is None else (index,):
        counts = index is not None or i == counting  # what is added outside counts once
        if not counts and is_added:
            continue
        value = np.empty(parts[i].shape)
        value[...] = parts[i] + amount if is_added else amount
        value.flags.writeable = False
        new[i] = value
    return tuple(new)


def _free_name(name: str) -> str | None:
    """Return the name, or one with a number: variables must have names of their own."""
    strategy = PLACE.get().strategy
    free, number = name, 0
    while strategy is not None and strategy.variable_table.has(free):
        number += 1
        free = f"{name}_{number}"
    return free


def weighted_total(
    name: str, values: object, sample_weight: object, *given: object
) -> tuple[float, float]:
    """Return the sum of values times weights, and the sum of weights.

    Args:
        name: That of the metric.
        values: What is summed.
        sample_weight: As for `weights_like`.
        given: As for `weights_like`; the values are among it.

    Raises:
        TypeError: If something is not a number.
        ValueError: If the weights cannot be broadcast to the values.
    """
    array = numbers(name, "values", values)
    is_masked = any(isinstance(each, np.ma.MaskedArray) for each in (values, *given))
    if sample_weight is None and not is_masked:
        return float(np.sum(array)), float(array.size)
    weights = weights_like(name, array, sample_weight, values, *given)
    is_counted = weights != 0  # what has no weight may hold anything
    return float(np.sum(array[is_counted] * weights[is_counted])), float(np.sum(weights))


def weights_like(name: str, array: Array, sample_weight: Any, *given: object) -> Array:
    """Return a weight for each element of an array, 1 for None, 0 for what is masked.

    Args:
        name: That of the metric.
        array: What is weighted.
        sample_weight: A weight per element, or per example.
        given: What the user passed, of the array's shape: elements that one of them masks, as a
            `numpy.ma.MaskedArray`, have no weight.

    Raises:
        TypeError: If the weights are not numbers.
        ValueError: If they cannot be broadcast to the array.
    """
    weights = (
        np.ones(()) if sample_weight is None else numbers(name, "sample_weight", sample_weight)
    )
    try:
        weights = np.broadcast_to(weights.reshape(_aligned(weights, array)), array.shape)
        for each in given:
            if isinstance(each, np.ma.MaskedArray):
                weights = np.where(np.ma.getmaskarray(each), 0.0, weights)
        return weights
    except ValueError:
        raise ValueError(
            f"Metric {name!r} got values of shape {array.shape} and sample_weight of shape "
            f"{np.shape(sample_weight)}, which cannot be broadcast to that."
        ) from None


def as_array(value: object) -> Array:
    """Return what may be of another library, on another device, or masked; what is masked is 0.

    Arrays that no backend serves are taken if NumPy can convert them.
    """
    if is_array_api_obj(value) and not isinstance(value, (np.ndarray, np.generic)):
        owner = next((each for each in find_backends() if each.owns(value)), None)
        value = value if owner is None else owner.get(value)
    return np.asarray(np.ma.filled(value, 0) if isinstance(value, np.ma.MaskedArray) else value)


def numbers(name: str, what: str, value: object) -> Array:
    """Return numbers as an array of float64: those of half precision, and of other libraries, too.

    What is masked is 0.

    Raises:
        TypeError: If they are not numbers.
    """
    array = as_array(value)
    if array.dtype.kind not in "iub" and not is_floating(array.dtype):
        raise TypeError(
            f"Metric {name!r} needs numbers as {what}, got {value!r} (dtype {array.dtype})."
        )
    return array.astype(np.float64, copy=False)


def class_ids(name: str, what: str, value: object, num_classes: int) -> npt.NDArray[np.intp]:
    """Return class ids as integers.

    Raises:
        TypeError: If they are not integers.
        ValueError: If one is out of range.
    """
    array = as_array(value)
    if array.dtype.kind not in "iub" and array.size:  # an empty list has the dtype of floats
        raise TypeError(
            f"Metric {name!r} needs class ids as {what}, got dtype {array.dtype}. Pass integers "
            f"from 0 to {num_classes - 1}: of scores, scores.argmax(axis=-1)."
        )
    wrong = array[(array < 0) | (array >= num_classes)]
    if wrong.size:
        raise ValueError(
            f"Metric {name!r} got {what} {wrong.flat[0]}, but there are {num_classes} classes: "
            f"0 to {num_classes - 1}."
        )
    return array.astype(np.intp, copy=False)


def _aligned(weights: Array, array: Array) -> tuple[int, ...]:
    """Weights belong to the leading axes: one per example of a batch."""
    return (*weights.shape, *(1,) * (array.ndim - weights.ndim))
