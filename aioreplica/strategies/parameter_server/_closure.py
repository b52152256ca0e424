"""A closure on a worker: what it pulls and pushes, and how its function is run."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final
from uuid import uuid4

import numpy as np

from ...cluster import ClosureWorker, StateHandle
from ...context import CARRIER, CLOSURE, DEFAULT_PLACE, PLACE
from ...errors import ContextError, StallError
from ...optimizers import (
    DynamicLossScale,
    FinishedGradients,
    Optimizer,
    checked_pairs,
    finish_gradients,
)
from ...values import Done, Variable, Weighted, local_value
from ._messages import Array, Count, Gradient, Item, Judgement, Key, Pull, Stamp, Write
from ._packing import Packed, Reduced, pack, unpack, unpack_call
from ._splits import Element, LeasedIterator, SplitReader
from ._variables import ServedVariable, fitting_push, split_value

MAX_RESULT_BYTES = 1024**3
"""What a closure may return at most: results travel, and are held by the worker and the program."""


@final
class ClosureFailedError(Exception):
    """Error by which an engine learns that a closure raised.

    Args:
        error: What it raised, packed; None if that cannot be pickled.
        text: The traceback.
        words: The error in words.
    """

    def __init__(self, error: Packed | None, text: str, words: str) -> None:
        super().__init__(error, text, words)
        self.error = error
        self.text = text
        self.words = words

    def __repr__(self) -> str:
        return f"ClosureFailedError({self.words!r})"

    __str__ = __repr__


@final
@dataclass(frozen=True, slots=True)
class Closure:
    """A function to be called on a worker, with what it needs there.

    Attributes:
        strategy_id: Tells the strategy from others.
        fn_name: Name of the function.
        is_async: Whether it is an async function.
        call: The function and its arguments, packed.
        stamp: Whose pushes are its own.
        servers: The parameter servers, by number.
        timeout_s: How long it may take, in seconds; None sets no limit.
        worker_index: Index of the worker that it is sent to.
        has_copies: Whether the servers have copies, which have to know what it has changed.
    """

    strategy_id: str
    fn_name: str
    is_async: bool
    call: Packed
    stamp: Stamp
    servers: tuple[StateHandle, ...]
    timeout_s: float | None
    worker_index: int = 0
    has_copies: bool = False

    def run(self, worker: ClosureWorker) -> Packed:
        """Call the function in this thread, an async one on an event loop of its own."""
        if self.timeout_s is None:
            return self._run(worker, ClosureContext(self, worker))
        return _within(self.timeout_s, self, ClosureContext(self, worker), worker)

    def _run(self, worker: ClosureWorker, context: ClosureContext) -> Packed:
        with _reported(context):
            fn, args, kwargs = unpack_call(self.call, context)
            result = fn(*args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            context.confirm()
            return _pack_result(result, context)

    async def run_on_loop(self, worker: ClosureWorker) -> Packed:
        """Await the function on the running loop."""
        context = ClosureContext(self, worker)
        with _reported(context):
            fn, args, kwargs = unpack_call(self.call, context)
            try:
                async with asyncio.timeout(self.timeout_s):
                    result = await fn(*args, **kwargs)
                    context.confirm()
                    return _pack_result(result, context)
            except TimeoutError as error:
                if self.timeout_s is None or error.__cause__ is None:
                    raise
                raise _too_slow(self, worker, "") from None


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
            found = self._values.get(spec.variable_id)
            if found is None:
                found = self._pull_all(variable)
                found.flags.writeable = False
                self._values[spec.variable_id] = found
            return found

    def _pull_all(self, variable: ServedVariable) -> Array:
        """Pull every shard that is newer than what a closure has pulled on this worker before."""
        spec = variable.spec
        pulled: _Pulled = self.worker.once(self.closure.strategy_id, "values", _Pulled)
        known = pulled.of_epoch(self._stamp.epoch)
        pulls = [(spec.variable_id, i) for i in range(len(spec.shards))]
        requests: dict[int, list[Pull]] = {}
        for key in pulls:
            version = known[key][0] if key in known else -1
            server = spec.shards[key[1]].server
            requests.setdefault(server, []).append(Pull(key, version))
        for key, (version, value) in self._exchange(requests).items():
            if value is not None:
                known[key] = version, value
            self._versions[key] = version
            self._written.discard(key)
        parts = [known[key][1] for key in pulls]
        return parts[0].view() if len(parts) == 1 else np.concatenate(parts)

    def rows(self, variable: Variable, indices: Array) -> Array:
        """Return some rows of a variable; those of a value that was pulled are taken from it."""
        if not isinstance(variable, ServedVariable):
            return local_value(variable)[indices]
        spec = variable.spec
        with self._lock:
            whole = self._values.get(spec.variable_id)
            if whole is not None:
                found: Array = whole[indices]
                return found
            flat, inverse = np.unique(indices.reshape(-1), return_inverse=True)
            requests: dict[int, list[Pull]] = {}
            for i, shard in enumerate(spec.shards):
                mine = flat[(flat >= shard.begin) & (flat < shard.end)] - shard.begin
                if mine.size:
                    pull = Pull((spec.variable_id, i), rows=mine)
                    requests.setdefault(shard.server, []).append(pull)
            parts = [np.empty((0, *spec.shape[1:]), spec.dtype)]
            answers = self._exchange(requests)
            for key in sorted(answers):
                version, part = answers[key]
                if key not in self._versions or key in self._written:
                    self._versions[key] = version
                    self._written.discard(key)
                if part is not None:
                    parts.append(part)
            return np.concatenate(parts)[inverse].reshape(*indices.shape, *spec.shape[1:])

    def _exchange(self, requests: dict[int, list[Pull]]) -> dict[Key, tuple[int, Array | None]]:
        self._require_running()
        servers = self.closure.servers
        pending = [(servers[i].begin("pull", pulls), pulls) for i, pulls in requests.items()]
        answers: dict[Key, tuple[int, Array | None]] = {}
        for finish, pulls in pending:
            answers.update(zip((pull.key for pull in pulls), finish(), strict=True))
        return answers

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
            self._values.pop(spec.variable_id, None)
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
        scale, num_finite = (cast(ServedVariable, each).spec for each in scaling.variables)
        key = (scale.variable_id, 0)
        other = (num_finite.variable_id, 0)
        item = Judgement(key, self._ordinal(key), other, scaling.rule, is_finite, finished.scale)
        self._push({scale.shards[0].server: [item]})
        for number in (key[0], other[0]):
            self._values.pop(number, None)

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
            self._values.pop(spec.variable_id, None)
        if global_step is not None:
            step: Any = global_step
            key = (step.spec.variable_id, 0)
            counted = Count(key, self._ordinal(key))
            items.setdefault(step.spec.shards[0].server, []).append(counted)
            self._values.pop(step.spec.variable_id, None)
        self._values.pop(number, None)
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


@final
class _Pulled:
    """Newest values that closures of a worker have pulled; a restore makes them worthless."""

    def __init__(self) -> None:
        self._epoch = -1
        self._values: dict[Key, tuple[int, Array]] = {}

    def of_epoch(self, epoch: int) -> dict[Key, tuple[int, Array]]:
        if epoch > self._epoch:
            self._epoch, self._values = epoch, {}
        return self._values if epoch == self._epoch else {}


def variable_at_home(number: int) -> Any:
    """Return the variable of the program that a result names."""
    side: Any = CARRIER.get()
    return side.find(number)


def _pack_result(result: Any, context: ClosureContext) -> Packed:
    try:
        packed = pack(result, context)
    except Exception as error:  # noqa: BLE001 - whatever a `__reduce__` raises
        from ...devices.processes import obstacle

        where = obstacle({"its result": result}, context, error)[0]
        raise TypeError(
            f"The closure {context.closure.fn_name} cannot return what it did: {where}. Return "
            "arrays and plain data."
        ) from None
    if packed.num_bytes > MAX_RESULT_BYTES:
        raise ValueError(
            f"The closure {context.closure.fn_name} returned {packed.num_bytes / 2**30:.2f} GiB, "
            f"more than {MAX_RESULT_BYTES / 2**30:g} GiB. Return less, or write it to a variable "
            "or a file."
        )
    return packed


@contextmanager
def _reported(context: ClosureContext) -> Any:
    """Run a block as the closure; what it raises, of any kind, becomes a ClosureFailedError."""
    place, closure = PLACE.set(DEFAULT_PLACE), CLOSURE.set(context)
    try:
        yield
    except asyncio.CancelledError as error:
        if _is_cancelled_by_loop():
            raise
        raise _failed(error, context) from None
    except BaseException as error:  # noqa: BLE001 - Dask tells the program of Exceptions only
        raise _failed(error, context) from None
    finally:
        context.end("is over")
        CLOSURE.reset(closure)
        PLACE.reset(place)


def _is_cancelled_by_loop() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def _failed(error: BaseException, context: ClosureContext) -> ClosureFailedError:
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, own))
    words = "".join(traceback.format_exception_only(error)).strip()
    packed: Packed | None
    try:
        packed = pack(error, context)
        unpack(packed, context)
    except Exception:  # noqa: BLE001 - then its words have to do
        packed = None
    return ClosureFailedError(packed, text, words)


async def _awaited(result: Any) -> object:
    return await result


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


# ---- a limit in time ---------------------------------------------------------------------------


def _within(
    timeout_s: float, closure: Closure, context: ClosureContext, worker: ClosureWorker
) -> Packed:
    """Run a closure in a thread of its own, which is left alone if it takes too long."""
    results: list[Packed] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(closure._run(worker, context))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, name=f"closure {closure.fn_name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        context.end(f"has taken longer than its {timeout_s:g} s")
        stack = _stack_of(thread)
        error = _too_slow(closure, worker, stack)
        raise ClosureFailedError(pack(error, context), stack, str(error))
    if failures:
        raise failures[0]
    return results[0]


def _stack_of(thread: threading.Thread) -> str:
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def _too_slow(closure: Closure, worker: ClosureWorker, stack: str) -> StallError:
    return StallError(
        f"The closure {closure.fn_name} on {worker.name} has not ended within "
        f"{closure.timeout_s:g} s. It is left to itself, and what it writes from now on is "
        "dropped.",
        timeout_s=closure.timeout_s,
        stacks=(stack,) if stack else (),
    )
