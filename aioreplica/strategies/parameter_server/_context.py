"""Pulls and pushes of a closure on a worker, and what it has there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final
from uuid import uuid4

import numpy as np

from ...cluster import ClosureWorker
from ...context import CARRIER
from ...errors import ContextError
from ...optimizers import (
    DynamicLossScale,
    FinishedGradients,
    Optimizer,
    checked_pairs,
    finish_gradients,
)
from ...values import Done, Variable, Weighted, local_value
from ._messages import Array, Count, Gradient, Item, Judgement, Key, Pull, Spec, Write
from ._packing import Packed, Reduced, unpack_call
from ._splits import Element, LeasedIterator, SplitReader
from ._variables import ServedVariable, checked_rows, fitting_push, pulls_of, split_value

if TYPE_CHECKING:
    from ._closure import Closure

Wanted: TypeAlias = Variable | tuple[Variable, object]
"""A variable for its value, or with indices of its rows."""


@final
class ClosureContext:
    """Values that a closure has pulled, and the number of its pushes.

    Args:
        closure: Which one.
        worker: Where it runs.

    Attributes:
        closure: As given.
        worker: As given.
        recipes: Which settings its optimizers have, by number.
    """

    def __init__(self, closure: Closure, worker: ClosureWorker) -> None:
        self.closure = closure
        self.worker = worker
        self._index = closure.worker_index
        self._stamp = closure.stamp._replace(attempt=uuid4().hex)
        self._values: dict[int, Array] = {}
        self._rows: dict[int, _PulledRows] = {}
        self._versions: dict[Key, int] = {}
        self._written: set[Key] = set()  # since their versions were noted
        self._ordinals: dict[Key, int] = {}
        self._lock = threading.RLock()
        self._births: dict[int, int] = {}
        self.recipes: dict[int, int] = {}
        self._changed: set[int] = set()  # servers whose copies have to know of it
        self._why_over: str | None = None

    # ---- reading ---------------------------------------------------------------------------

    def value(self, variable: ServedVariable) -> Array:
        """Return the value of a variable, pulled at its first read after a push of this closure."""
        spec = variable.spec
        with self._lock:
            if spec.variable_id not in self._values:
                self._pull_all([variable], [])
            return self._values[spec.variable_id]

    def rows(self, variable: Variable, indices: Array) -> Array:
        """Return some rows of a variable; those that were pulled with others are taken there."""
        if not isinstance(variable, ServedVariable):
            return local_value(variable)[indices]
        spec = variable.spec
        with self._lock:
            whole, pulled = self._values.get(spec.variable_id), self._rows.get(spec.variable_id)
            if whole is not None:
                found: Array = whole[indices]
                return found
            at = None if pulled is None else pulled.places_of(indices)
            if pulled is None or at is None:
                flat, at = np.unique(indices.reshape(-1), return_inverse=True)
                pulled = self._pull_all([], [(variable, flat)])[0]
            return pulled.values[at].reshape(*indices.shape, *spec.shape[1:])

    def pull(self, wanted: Iterable[Wanted]) -> None:
        """Pull values, and rows, of several variables, for who reads them later."""
        wholes, rows = _sorted_out(wanted)
        with self._lock:
            for number in [*rows]:
                if number in wholes or number in self._values:
                    del rows[number]
                elif number in self._rows:
                    variable, indices = rows[number]
                    rows[number] = variable, np.setdiff1d(indices, self._rows[number].indices)
            new = [each for number, each in wholes.items() if number not in self._values]
            for number, pulled in zip(rows, self._pull_all(new, [*rows.values()]), strict=True):
                before = self._rows.get(number)
                self._rows[number] = pulled if before is None else before.joined(pulled)

    def _pull_all(
        self, wholes: Sequence[ServedVariable], rows: Sequence[tuple[ServedVariable, Array]]
    ) -> list[_PulledRows]:
        """Pull with one message to each server; return rows, whose indices come in order, once.

        Of a whole value come the shards that are newer than what was pulled on this worker before.
        """
        kept: _Pulled = self.worker.once(self.closure.strategy_id, "values", _Pulled)
        known = kept.of((self._stamp.epoch, self.closure.num_made))
        held: dict[Key, tuple[int, Any]] = {}  # other closures may change what is known
        requests: dict[int, list[Pull]] = {}
        for variable, indices in (*((each, None) for each in wholes), *rows):
            for server, pulls in pulls_of(variable.spec, indices).items():
                for pull in pulls:
                    held[pull.key] = version, _ = known.get(pull.key, (-1, None))
                    requests.setdefault(server, []).append(pull._replace(known_version=version))
        answers = self._exchange(requests)
        for variable in wholes:
            spec, parts = variable.spec, []
            for key in ((spec.variable_id, i) for i in range(len(spec.shards))):
                version, value = answers[key]
                if value is None:  # there is none newer than what was held
                    value = held[key][1]
                elif version >= known.get(key, (-1, None))[0]:
                    known[key] = version, value
                self._versions[key] = version
                self._written.discard(key)
                parts.append(value)
            value = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
            value.flags.writeable = False
            self._values[spec.variable_id] = value
        return [self._rows_of(variable.spec, indices, answers) for variable, indices in rows]

    def _rows_of(
        self, spec: Spec, indices: Array, answers: Mapping[Key, tuple[int, Array | None]]
    ) -> _PulledRows:
        parts = [np.empty((0, *spec.shape[1:]), spec.dtype)]
        for key in ((spec.variable_id, i) for i in range(len(spec.shards))):
            version, part = answers.get(key, (0, None))
            if part is not None:
                parts.append(part)
                if key not in self._versions or key in self._written:
                    self._versions[key] = version
                    self._written.discard(key)
        return _PulledRows(indices, np.concatenate(parts))

    def _exchange(self, requests: dict[int, list[Pull]]) -> dict[Key, tuple[int, Array | None]]:
        self._require_running()
        servers, answers = self.closure.servers, dict[Key, tuple[int, Array | None]]()
        pending = [(servers[i].begin("pull", pulls), pulls) for i, pulls in requests.items()]
        for finish, pulls in pending:
            answers.update(zip((pull.key for pull in pulls), finish(), strict=True))
        return answers

    def _forget(self, number: int) -> None:
        """Forget what was pulled of a variable, as this closure has written it."""
        self._values.pop(number, None)
        self._rows.pop(number, None)

    # ---- writing ---------------------------------------------------------------------------

    def write(self, variable: ServedVariable, verb: str, value: Any) -> Done:
        """Push a write."""
        fitting = fitting_push(variable, verb, value)
        with self._lock:
            spec = variable.spec
            items: dict[int, list[Item]] = {}
            for i, part in split_value(spec, fitting):
                key = (spec.variable_id, i)
                self._written.add(key)
                item = Write(key, self._ordinal(key), verb, part)
                items.setdefault(spec.shards[i].server, []).append(item)
            self._push(items)
            self._forget(spec.variable_id)
        return Done()

    def takes(self, pairs: Iterable[object]) -> bool:
        """Tell whether gradients are for variables on parameter servers."""
        return any(
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and isinstance(pair[1], ServedVariable)
            for pair in pairs
        )

    def apply_gradients(
        self, optimizer: Optimizer, pairs: Sequence[Any], global_step: Variable | None
    ) -> Done:
        """Push gradients to where the variables are; see `Optimizer.apply_gradients`."""
        gradients, variables = checked_pairs(pairs)
        self._check_owned(optimizer, variables, global_step)
        _check_whole(optimizer, variables)
        finished = finish_gradients(optimizer, variables, gradients)
        with self._lock:
            if finished.gradients is None:
                self._count(optimizer.skipped_steps)
            else:
                self._push_step(optimizer, variables, finished, global_step)
            self._judge(optimizer, finished)
        return Done()

    def _judge(self, optimizer: Optimizer, finished: FinishedGradients) -> None:
        """Tell a loss scale that follows the steps how this one went."""
        scaling, is_finite = optimizer.loss_scale, finished.gradients is not None
        if not isinstance(scaling, DynamicLossScale):
            return
        if is_finite:
            is_next = scaling.is_next_step_of(optimizer)
            scaling.applied_by(optimizer)
            if not is_next:
                return  # an optimizer that shares it has told
        else:
            scaling.skipped()
        scale, num_finite = (cast(ServedVariable, each).spec for each in scaling.variables)
        key = (scale.variable_id, 0)
        other = (num_finite.variable_id, 0)
        item = Judgement(key, self._ordinal(key), other, scaling.rule, is_finite, finished.scale)
        self._push({scale.shards[0].server: [item]})
        for number in (key[0], other[0]):
            self._forget(number)

    def _push_step(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        finished: FinishedGradients,
        global_step: Variable | None,
    ) -> None:
        gradients, norm = finished.gradients or (), finished.norm
        iterations: Any = optimizer.iterations
        home = iterations.spec.shards[0].server
        number = iterations.spec.variable_id
        first: list[Item] = [Count((number, 0), self._ordinal((number, 0)))]
        items: dict[int, list[Item]] = {home: first}
        if optimizer.gradient_norm is not None and norm is not None:
            kept: Any = optimizer.gradient_norm
            key = (kept.spec.variable_id, 0)
            measured = Write(key, self._ordinal(key), "assign", np.asarray(norm, kept.dtype))
            items.setdefault(kept.spec.shards[0].server, []).append(measured)
        for variable, gradient in zip(variables, gradients, strict=True):
            spec = variable.spec  # type: ignore[attr-defined]  # checked to be a ServedVariable
            for i, part in _split_gradient(spec, gradient):
                key = (spec.variable_id, i)
                read = self._versions.get(key)
                self._written.add(key)
                recipe = self.recipes.get(number, 0)
                item = Gradient(key, self._ordinal(key), number, part, None, read, recipe)
                items.setdefault(spec.shards[i].server, []).append(item)
            self._forget(spec.variable_id)
        if global_step is not None:
            step: Any = global_step
            key = (step.spec.variable_id, 0)
            counted = Count(key, self._ordinal(key))
            items.setdefault(step.spec.shards[0].server, []).append(counted)
            self._forget(step.spec.variable_id)
        self._forget(number)
        self._push_in_order(items, home, (number, 0))

    def _push_in_order(self, items: dict[int, list[Item]], home: int, counter: Key) -> None:
        """Push to the server that counts first: the others are told the number of the update."""
        first = items.pop(home)
        if not items:
            self._push({home: first})
            return
        counts = self._push({home: first})
        count = counts.get(counter)
        if count is None:  # counted by an earlier run of this closure
            known = self._exchange({home: [Pull(counter)]})[counter][1]
            count = 1 if known is None else int(known)
        iteration = max(0, count - 1)
        told: dict[int, list[Item]] = {
            server: [
                item._replace(iteration=iteration) if isinstance(item, Gradient) else item
                for item in each
            ]
            for server, each in items.items()
        }
        self._push(told)

    def _push(self, items: dict[int, list[Item]]) -> dict[Key, int]:
        self._require_running()
        servers = self.closure.servers
        self._changed |= items.keys()
        pending = [servers[i].begin("push", self._stamp, each) for i, each in items.items()]
        counts: dict[Key, int] = {}
        for finish in pending:
            counts.update(finish())
        return counts

    def confirm(self) -> None:
        """Wait until the copies of servers know what this closure has changed."""
        if self.closure.has_copies:
            servers = self.closure.servers
            for finish in [servers[i].begin("followed", is_wait=True) for i in self._changed]:
                finish()

    def _count(self, variable: Any) -> None:
        if variable is not None:
            key = (variable.spec.variable_id, 0)
            item = Count(key, self._ordinal(key))
            self._push({variable.spec.shards[0].server: [item]})

    def _ordinal(self, key: Key) -> int:
        ordinal = self._ordinals.get(key, 0)
        self._ordinals[key] = ordinal + 1
        return ordinal

    def _check_owned(
        self, optimizer: Optimizer, variables: Sequence[Variable], global_step: Variable | None
    ) -> None:
        written = [*variables, *(() if global_step is None else (global_step,))]
        for variable in (*written, optimizer.iterations):
            if not isinstance(variable, ServedVariable):
                raise ContextError(
                    f"{variable!r} was not made by the strategy of this closure. Make variables "
                    "and optimizers in its scope: `with strategy.scope(): ar.Variable(...)`."
                )

    # ---- the rest --------------------------------------------------------------------------

    def worker_index(self) -> int:
        """Return the index of the worker."""
        return self._index

    def resource(self, number: int, factory: Packed) -> Any:
        """Return what a factory has made on this worker, made at the first use."""
        owner = self.closure.strategy_id
        return self.worker.once(owner, ("resource", number), lambda: self._made(factory))

    def iterator(self, number: int, factory: Packed, num_splits: int, birth: int) -> LeasedIterator:
        """Return an iterator whose elements are this closure's."""
        self._births[number] = birth
        return LeasedIterator(number, num_splits, self.resource(number, factory), self)

    def take(
        self, iterator: int, num_splits: int, ordinal: int, ended: Element | None
    ) -> Element | None:
        """Ask the server that keeps the leases for an element."""
        self._require_running()
        birth, index = self._births[iterator], self.closure.worker_index
        self._changed.add(0)
        found: Element | None = self.closure.servers[0].begin(
            "take", self._stamp, iterator, num_splits, birth, ordinal, index, ended
        )()
        return found

    def read(self, reader: SplitReader, element: Element) -> Any:
        """Read an element; the dataset sees the index of the worker that its split is for."""
        self._index = element.split
        try:
            return reader.read(element)
        finally:
            self._index = self.closure.worker_index

    def _made(self, factory: Packed) -> object:
        fn, args, kwargs = unpack_call(factory, self)
        return fn(*args, **kwargs)

    def end(self, why: str) -> None:
        """Refuse everything from now on."""
        self._why_over = why

    def _require_running(self) -> None:
        if self._why_over is not None:
            raise ContextError(
                f"The closure {self.closure.fn_name} {self._why_over}, so it reads and writes "
                "nothing any more."
            )

    # ---- as a side of pickling ---------------------------------------------------------------

    def refer(self, thing: object) -> Reduced:
        """Name a variable in a result."""
        if isinstance(thing, ServedVariable):
            return variable_at_home, (thing.spec.variable_id,)
        raise TypeError(f"{thing!r} was made in a closure and is of no use outside it.")

    def reduced(self, thing: object) -> Reduced | None:
        """Nothing else is sent as a name."""
        return None


def _sorted_out(
    wanted: Iterable[Wanted],
) -> tuple[dict[int, ServedVariable], dict[int, tuple[ServedVariable, Array]]]:
    """Return the variables that are wanted as a whole, and rows of others, in order, each once."""
    wholes: dict[int, ServedVariable] = {}
    rows: dict[int, tuple[ServedVariable, Array]] = {}
    for each in wanted:
        pair = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        variable, indices = pair
        if not isinstance(variable, Variable):
            raise TypeError(
                "ahead takes variables and pairs of a variable and row indices, got "
                f"{each!r} ({type(each).__name__})."
            )
        checked = None if indices is None else checked_rows(variable, indices).reshape(-1)
        if not isinstance(variable, ServedVariable):
            continue  # the worker has it
        number = variable.spec.variable_id
        if checked is None:
            wholes[number] = variable
        else:
            before = [rows[number][1]] if number in rows else []
            rows[number] = variable, np.unique(np.concatenate([*before, checked]))
    return wholes, rows


@final
class _PulledRows(NamedTuple):
    """Rows of a variable, and which ones they are: indices in order, each once."""

    indices: Array
    values: Array

    def places_of(self, indices: Array) -> Array | None:
        """Return where rows are in `values`, flat; None if one of them is not there."""
        flat = indices.reshape(-1)  # comparisons of arrays without axes are no arrays
        at: Array = np.searchsorted(self.indices, flat)
        is_there = at < self.indices.size
        is_there[is_there] = self.indices[at[is_there]] == flat[is_there]
        return at if is_there.all() else None

    def joined(self, others: _PulledRows) -> _PulledRows:
        """Return these rows and others of the same variable, none of which is among them."""
        indices = np.concatenate([self.indices, others.indices])
        order = np.argsort(indices)
        return _PulledRows(indices[order], np.concatenate([self.values, others.values])[order])


@final
class _Pulled:
    """Newest values that closures of a worker have pulled.

    A restore makes them worthless, and so does a server made anew, whose versions begin anew.
    """

    def __init__(self) -> None:
        self._when = -1, -1
        self._values: dict[Key, tuple[int, Array]] = {}

    def of(self, when: tuple[int, int]) -> dict[Key, tuple[int, Array]]:
        """Return them for a closure, with the numbers of restores and of servers that it knows."""
        if when > self._when:
            self._when, self._values = when, {}
        return self._values if when == self._when else {}


def variable_at_home(number: int) -> Any:
    """Return the variable of the program that a result names."""
    side: Any = CARRIER.get()
    return side.find(number)


def _check_whole(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Refuse cut variables for a rule that looks at a whole one."""
    cut = [v for v in variables if isinstance(v, ServedVariable) and v.num_shards > 1]
    if optimizer.is_joint and cut:
        raise TypeError(
            f"{type(optimizer).__name__} {optimizer.iterations.name!r} is an optimizer of torch, "
            f"which keeps one state for a whole variable, but {cut[0].name!r} is cut into "
            f"{cut[0].num_shards} shards. Use one of ar.optimizers for it, or have the partitioner "
            "leave it whole."
        )


def _split_gradient(spec: Any, gradient: Any) -> list[tuple[int, Any]]:
    if isinstance(gradient, Weighted):
        parts = split_value(spec, gradient.total)
        return [(i, Weighted(part, gradient.weight)) for i, part in parts]
    return split_value(spec, gradient)
