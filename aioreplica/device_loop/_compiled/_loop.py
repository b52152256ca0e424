"""A device loop whose steps are compiled: elements in chunks, one program at a time, publication.

Replica 0 leads: its device thread stacks elements, calls the programs and publishes; the threads of
the others wait, so that no eager op of a device comes between. Nothing is published but whole
steps, and elements of steps that were not published go back to their iterator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, final

import jax
import numpy as np
import numpy.typing as npt

from ...context import LoopStep
from ...errors import ContextError, NonFiniteError
from ...optimizers import Optimizer
from ...replica import BlockingContext, RunningReplica
from ...telemetry import EventLog
from ...tree import flatten
from ...values import Variable, is_floating
from .._infeed import CHUNK_BYTES, Infeed
from .._program import MultiStepContext
from ._devices import Gang, only_one
from ._program import StepProgram, of_each, of_first
from ._programs import CompiledSteps
from ._update import (
    MAX_VARIABLES,
    NO_WEIGHT,
    NOT_FINITE,
    finished_after,
    keeps_infinities,
)

Array = npt.NDArray[Any]

MAX_CHUNK = 64
"""How many steps one program runs at most; fewer if their elements are large."""

ALIGNMENT = 64
"""Where XLA wants arrays to begin; those that do it reads where they are."""


@final
class Chunk:
    """Elements for one call, stacked for each replica where the program reads them.

    Args:
        size: How many fit.
        element: One element, a list of arrays for each replica.

    Attributes:
        inputs: What a program is given for all of them, if that is known already.
    """

    __slots__ = ("arrays", "inputs", "num_steps", "size")

    def __init__(self, size: int, element: Sequence[Sequence[Array]]) -> None:
        self.size = size
        self.num_steps = 0
        self.inputs: Any = None
        self.arrays = [
            [_aligned((size, *leaf.shape), leaf.dtype) for leaf in part] for part in element
        ]

    def add(self, elements: Sequence[Sequence[Sequence[object]]]) -> None:
        """Put elements behind the others, for each replica its leaves of all of them.

        They look like the first one.
        """
        begun, end = self.num_steps, self.num_steps + len(elements[0])
        for stacked, own in zip(self.arrays, elements, strict=True):
            for whole, found in zip(stacked, zip(*own, strict=True), strict=True):
                _stack(found, whole[begun:end])
        self.num_steps = end


@final
class CompiledLoop:
    """One call of `run_steps` with `compile="jax"`.

    Args:
        fn: The step function.
        programs: Those of the strategy.
        infeed: Where elements come from.
        steps: Says which steps are complete, for each replica.
        contexts: Take the outputs, for each replica.
        events: Take what steps record.
        num_steps: How many steps there are.
        first: Number of the first one in its strategy.
        seed: Of the run.
        every: After how many steps values are published; None for once, at the end.
        gang: Holds the lanes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        programs: CompiledSteps,
        infeed: Infeed,
        steps: Sequence[LoopStep],
        contexts: Sequence[MultiStepContext],
        events: EventLog,
        num_steps: int,
        first: int,
        seed: int,
        every: int | None,
        gang: Gang,
    ) -> None:
        self._fn = fn
        self._programs = programs
        self._infeed = infeed
        self._steps = steps
        self._contexts = contexts
        self._events = events
        self._num_steps = num_steps
        self._first = first
        self._seed = seed
        self._every = num_steps if every is None else min(every, num_steps)
        self._gang = gang
        self._program: StepProgram | None = None
        self._leaves: Callable[[Any], Sequence[object]] = tuple
        self._spare: Chunk | None = None
        self._size = 0
        self._done = 0
        self._published = 0
        self._is_due = False
        self._records: list[tuple[int, str, float]] = []
        self._carry: Any = None
        self._bases: dict[Variable, tuple[Array, ...]] = {}
        self._counts: dict[Optimizer, int] = {}

    def run(self, replica: RunningReplica) -> MultiStepContext:
        """Lead or follow, on the device thread of a replica."""
        replica_id, blocking = replica.local_replica_id, replica.blocking
        if replica_id:
            self._gang.follow(replica_id, blocking)
            return self._contexts[replica_id]
        try:
            self._gang.wait_for_all(blocking)
            self._lead(replica)
        finally:
            self._gang.end()
        return self._contexts[0]

    # ---- steps ---------------------------------------------------------------------------

    def _lead(self, replica: RunningReplica) -> None:
        blocking = replica.blocking
        ahead = self._taken(blocking, None, waits=True)
        while ahead is not None:
            before, chunk = self._done, ahead
            try:
                ahead = self._ran(replica, chunk)
            except BaseException:
                self._publish_due()  # the steps before this chunk are complete
                raise
            self._spare = chunk  # its program has ended
            blocking.step_ended(self._done - before)  # a stall is noticed by steps that are not
            self._is_due = self._done - self._published >= self._every
            if ahead is None or ahead.num_steps < self._num_wanted() or self._is_observed():
                self._publish_due()  # else while that one runs
            ahead = self._taken(blocking, ahead, waits=True)
        if self._done > self._published:  # the last ones, or the iterator was exhausted or failed
            self._publish()

    def _taken(
        self, blocking: BlockingContext, chunk: Chunk | None, *, waits: bool
    ) -> Chunk | None:
        """Fill a chunk with elements; None if there is none any more.

        Args:
            blocking: Shows that the thread waits.
            chunk: One that is begun.
            waits: Whether to wait for elements, or take those that are there.
        """
        infeed, is_end = self._infeed, False
        while not is_end:
            begun = 0 if chunk is None else chunk.num_steps
            wanted = self._num_wanted() - begun
            if wanted <= 0:
                break
            if infeed.is_empty(len(self._steps) - 1):
                if not waits:
                    break
                with blocking.waiting(f"the infeed for step {self._done + begun}"):
                    infeed.wait_for(wanted)
            found, is_end = infeed.take_all(wanted)
            if found[0]:
                if chunk is None:
                    chunk = self._new_chunk([own[0] for own in found])
                chunk.add([list(map(self._leaves, own)) for own in found])
            if is_end:
                self._num_steps = self._done + begun + len(found[0])
        return chunk

    def _new_chunk(self, parts: Sequence[tuple[object, ...]]) -> Chunk:
        """Return an empty chunk for elements like this one: again that before the last, if any."""
        if self._spare is not None:
            chunk, self._spare = self._spare, None
            chunk.num_steps = 0
            return chunk
        element = [self._programs.arrays(part) for part in parts]
        if self._program is None:
            self._begin(parts, element)
            if not all(type(leaf) is np.ndarray for part in parts for leaf in part):
                self._leaves = _leaves_of
        return Chunk(self._size, element)

    def _num_wanted(self) -> int:
        """Return how many steps the next chunk has: none reaches over what is published at once."""
        if self._program is None:
            return min(1, self._num_steps - self._done)
        room = self._every - (self._done - self._published) % self._every
        return min(self._size, room, self._num_steps - self._done)

    def _begin(self, parts: Sequence[object], element: Sequence[Sequence[Array]]) -> None:
        """Find the program, and put values of variables on its devices."""
        initial = [context.last_step_outputs for context in self._contexts]
        self._program = program = self._programs.find(self._fn, parts[0], element, initial[0])
        num_bytes = sum(leaf.nbytes for part in element for leaf in part)
        fitting = max(1, CHUNK_BYTES // max(1, num_bytes))
        self._size = min(MAX_CHUNK, fitting, self._every, self._num_steps)
        self._bases = {variable: variable.components for variable in program.state}
        state = self._programs.load(program, self._bases)
        self._carry = (state, _first_outputs(program, initial))
        self._counts = dict.fromkeys(program.applied, 0)

    def _ran(self, replica: RunningReplica, chunk: Chunk) -> Chunk | None:
        """Run the steps of a chunk; return the next one as far as its elements are there.

        Raises:
            NonFiniteError: If an update is not finite, with the steps before it published.
            ValueError: If no replica has any weight.
        """
        program, begun = self._program, self._carry
        assert program is not None  # the chunk has an element
        inputs, chunk.inputs = chunk.inputs or self._inputs(program, chunk), None
        args = (*inputs, program.table(chunk.size, _num_updates(program, self._counts)))
        before = _iterations(program, begun)
        codes, records, ahead = self._called(replica, program, chunk, args)
        failed = np.flatnonzero(codes)
        if not failed.size and _is_in_doubt(program, self._carry):
            _, codes, _ = self._stepped(replica, program, chunk, begun, args, looks=True)
            failed = np.flatnonzero(codes)
        if failed.size:
            at = int(failed[0])
            self._carry, _, records = self._stepped(replica, program, chunk, begun, args, count=at)
            self._move_on(program, before, records, at)
            self._fail(program, int(codes[at]))
        self._move_on(program, before, records, chunk.num_steps)
        return ahead

    def _move_on(
        self,
        program: StepProgram,
        before: Mapping[Optimizer, int],
        records: Sequence[Array],
        num_steps: int,
    ) -> None:
        """Count the steps that the state is behind now, and keep what they have recorded."""
        for optimizer, count in _iterations(program, self._carry).items():
            self._counts[optimizer] += count - before[optimizer]
        first = self._first + self._done
        for i in range(num_steps if records else 0):
            for name, values in zip(program.records, records, strict=True):
                self._records.append((first + i, name, float(values[i])))
        self._done += num_steps

    def _called(
        self, replica: RunningReplica, program: StepProgram, chunk: Chunk, args: Any
    ) -> tuple[Array, list[Array], Chunk | None]:
        """Call the program in the faster way, and read ahead meanwhile."""
        trial = self._programs.trial(program, chunk.size)
        scans = chunk.num_steps == chunk.size and chunk.size > 1 and trial.prefers_scan()
        if scans:
            scan = program.compiled("scan", chunk.size, (self._carry, *args, np.int32(0)))
            with only_one(replica.blocking, self._publish_due):
                begin = perf_counter()
                carry, codes, records = scan(self._carry, *args, np.int32(0))
                try:
                    if not self._is_observed():  # an observer may wait for another program
                        self._publish_due()
                    begun_ahead = self._ahead(replica, program, chunk)
                finally:  # an abort is seen there, too: nothing runs behind this block
                    jax.block_until_ready((carry, codes, records))
                seconds = perf_counter() - begin
            self._publish_due()  # an observer came meanwhile
            trial.add("scan", seconds)
            self._carry = carry
            return of_first(codes), [of_each(each)[0] for each in records], begun_ahead
        self._publish_due()
        begin = perf_counter()
        self._carry, codes, records = self._stepped(replica, program, chunk, self._carry, args)
        begun_ahead = self._ahead(replica, program, chunk)  # a scan does it meanwhile
        if chunk.num_steps == chunk.size:
            trial.add("step", perf_counter() - begin)
        return codes, records, begun_ahead

    def _stepped(
        self,
        replica: RunningReplica,
        program: StepProgram,
        chunk: Chunk,
        carry: Any,
        args: Any,
        *,
        count: int | None = None,
        looks: bool = False,
    ) -> tuple[object, Array, list[Array]]:
        """Call the program of one step for each of the first `count` of a chunk.

        Returns:
            What is behind the last, the code of each, and what each has recorded.
        """
        carry = jax.tree.map(program.put_apart, carry)  # the program takes its memory
        args = program.placed(args)  # once for all calls
        step = program.compiled("step", chunk.size, (carry, *args, np.int32(0)), looks=looks)
        found = []
        with only_one(replica.blocking):
            for at in range(chunk.num_steps if count is None else count):
                carry, code, own = step(carry, *args, np.int32(at))
                jax.block_until_ready(carry)
                found.append((code, own))
        codes = np.array([of_first(code) for code, _ in found], np.int32)
        records = [
            np.array([of_each(own[i])[0] for _, own in found]) for i in range(len(program.records))
        ]
        return carry, codes, records

    def _ahead(self, replica: RunningReplica, program: StepProgram, chunk: Chunk) -> Chunk | None:
        """Take the elements behind a chunk that are there already, and put whole chunks."""
        updates = _num_updates(program, self._counts, chunk.num_steps)
        self._done += chunk.num_steps
        try:
            found = self._taken(replica.blocking, None, waits=False)
            if found is not None and found.num_steps == self._num_wanted():
                with suppress(Exception):  # raised when they are wanted, behind these steps
                    inputs = self._inputs(program, found)
                    program.expect(found.size, updates)
                    found.inputs = inputs
            return found
        finally:
            self._done -= chunk.num_steps

    def _inputs(self, program: StepProgram, chunk: Chunk) -> tuple[object, ...]:
        return program.inputs(chunk.arrays, chunk.size, (self._first, self._done), self._seed)

    # ---- steps that fail -----------------------------------------------------------------

    def _fail(self, program: StepProgram, code: int) -> None:
        """Publish the steps before the one that fails, and raise its error."""
        if self._done > self._published:
            self._publish()
        error = _failure(program, code, self._first + self._done)
        self._contexts[0].error = error
        raise error

    # ---- publication ---------------------------------------------------------------------

    def _is_observed(self) -> bool:
        """Tell whether an observer waits for what is due: it may set what the next steps use."""
        of_events = bool(self._records) and self._events.is_observed
        return self._is_due and (of_events or any(v.store.is_observed for v in self._bases))

    def _publish_due(self) -> None:
        """Publish the steps behind which it is time, if that was left for later."""
        if self._is_due:
            self._publish()

    def _publish(self) -> None:
        """Publish the values behind the last step, as one write, and count the steps.

        Raises:
            ContextError: If somebody else has written a variable meanwhile.
        """
        program = self._program
        assert program is not None  # a step was run
        self._is_due = False
        num_steps = self._done - self._published
        self._write(program, num_steps)
        outputs = self._carry[1]
        of_replicas = [of_each(array) for array in outputs]
        for i, context in enumerate(self._contexts):
            arrays = [own[i][()] for own in of_replicas]
            context.last_step_outputs.update(program.outputs.unflatten(arrays))
            context.take_outputs(self._done, program.ops, program.sites)
        for number, name, value in self._records:
            self._events.add_scalar(number, 0, name, value)
        self._records.clear()
        self._published = self._done
        for step in self._steps:
            step.ended(num_steps)

    def _write(self, program: StepProgram, num_steps: int) -> None:
        changes: dict[Variable, tuple[Array, ...]] = {}
        counts: dict[Variable, int] = {}
        for i, variable in enumerate(program.state):
            sources = program.written.get(variable)
            if sources is None:
                continue
            array, size = self._carry[0][i], len(self._bases[variable])
            parts = [of_first(array)] * size if program.is_mirrored[i] else of_each(array)
            made = {id(part): _published(part, variable) for part in parts}
            changes[variable] = tuple(made[id(part)] for part in parts)
            counts[variable] = 0
            for source in sources:
                times = 1 if source is None else program.applied[source][1]
                counts[variable] += num_steps if source is None else self._counts[source] // times
        for optimizer, count in self._counts.items():
            if count:
                iteration = int(optimizer.iterations.components[0]) + count
                for variable, value in finished_after(optimizer, iteration).items():
                    new = _published(np.asarray(value), variable)
                    changes[variable] = (new,) * len(variable.components)
                    self._bases.setdefault(variable, variable.components)
        is_done = True
        if any(variable.components is not self._bases[variable] for variable in changes):
            is_done = False
        for store in dict.fromkeys(variable.store for variable in changes):
            own = {v: parts for v, parts in changes.items() if v.store is store}
            is_done = is_done and bool(store.write(own, self._bases, counts=counts))
        if not is_done:
            raise _interference(changes, self._bases, num_steps)
        self._bases.update(changes)  # and not what they hold now: who wrote since is seen
        self._programs.keep(program, self._bases, self._carry[0])
        self._counts = dict.fromkeys(self._counts, 0)


def _failure(program: StepProgram, code: int, number: int) -> Exception:
    """Return the error of a step that has reported a code."""
    kind, index = divmod(code, MAX_VARIABLES)
    variables = next(iter(program.applied.values()))[0]
    name = variables[index if index < len(variables) else 0].name
    if kind == NO_WEIGHT:
        return ValueError(
            f"The gradients of step {number} have total weight 0 on all replicas, so there is "
            "no mean over any example. Leave out steps whose global batch is empty."
        )
    what = f"The gradient of {name!r}" if kind == NOT_FINITE else f"An update, of {name!r} say,"
    return NonFiniteError(
        f"{what} is not finite in step {number}, which is compiled. Nothing of this step was "
        "written. Run it without `compile` to see the replica and the index; look for a "
        "division by 0 or a learning rate that is too high, clip gradients, or pass "
        'on_non_finite="skip" to leave out such steps.',
        variable=name,
        replica_id=None,
        index=(),
    )


def _interference(
    changes: Iterable[Variable], bases: Mapping[Variable, tuple[Array, ...]], num_steps: int
) -> ContextError:
    """Return the error of steps that cannot be published any more."""
    names = [v.name for v in changes if v.components is not bases[v]]
    return ContextError(
        f"Variable {', '.join(names) or 'of the step'} was written by something else while "
        f"{num_steps} compiled steps ran, which began with its old value. These steps were not "
        "published, and their elements went back to the iterator. Write variables between calls of "
        "run_steps, or in the step."
    )


def _iterations(program: StepProgram, carry: Any) -> dict[Optimizer, int]:
    """Return how many updates each optimizer has made."""
    at = {variable: i for i, variable in enumerate(program.state)}
    return {o: int(of_first(carry[0][at[o.iterations]])) for o in program.applied}


def _num_updates(
    program: StepProgram, counts: Mapping[Optimizer, int], num_steps: int = 0
) -> dict[Optimizer, int]:
    """Return how many updates each optimizer will have made, if none of these steps skips.

    Args:
        program: Whose.
        counts: Those that are not published.
        num_steps: Steps beyond them.
    """
    return {
        optimizer: int(optimizer.iterations.components[0]) + counts[optimizer] + times * num_steps
        for optimizer, (_, times) in program.applied.items()
    }


def _is_in_doubt(program: StepProgram, carry: Any) -> bool:
    """Tell whether a value or slot is not finite behind steps that were not checked."""
    at = {variable: i for i, variable in enumerate(program.state)}
    for optimizer, (variables, _) in program.applied.items():
        settings = optimizer.settings
        if settings.on_non_finite != "raise" or not keeps_infinities(optimizer):
            continue
        for variable in variables:
            for each in (variable, *(settings.slots.made.get(variable) or ())):
                array = of_first(carry[0][at[each]])
                if is_floating(array.dtype) and not np.isfinite(array).all():
                    return True
    return False


def _stack(leaves: Sequence[object], rows: Array) -> None:
    """Write one leaf into each row; arrays in a single call of NumPy."""
    arrays = [leaf for leaf in leaves if type(leaf) is np.ndarray]
    if rows.ndim > 1 and len(arrays) == len(leaves):
        np.concatenate(arrays, out=rows.reshape(len(rows) * rows.shape[1], *rows.shape[2:]))
        return
    for row, leaf in enumerate(leaves):
        rows[row] = leaf


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an empty array that XLA does not have to copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _first_outputs(
    program: StepProgram, initial: Sequence[Mapping[str, object]]
) -> list[jax.Array]:
    """Put the outputs to begin with on the devices; zeros where there is none."""
    if program.zeros is not None and not any(initial):
        return program.zeros
    flat = [[np.asarray(leaf) for leaf in _leaves(own, program)] for own in initial]
    outputs = []
    for i, shape in enumerate(program.outputs.shapes):
        given = [own[i] for own in flat] if i < len(flat[0]) else None
        zeros = np.zeros(shape.shape, shape.dtype)
        outputs.append(
            program.put_each(
                [zeros] * program.num_replicas
                if given is None
                else [_cast(array, shape) for array in given]
            )
        )
    if not any(initial):
        program.zeros = outputs
    return outputs


def _leaves_of(part: object) -> Sequence[object]:
    return flatten(part)[0]


def _leaves(outputs: Mapping[str, object], program: StepProgram) -> list[Any]:
    return [leaf for name in outputs for leaf in flatten(outputs[name])[0]]


def _cast(array: Array, shape: Any) -> Array:
    return np.asarray(array, shape.dtype)


def _published(array: Array, variable: Variable) -> Array:
    new = array.astype(variable.dtype, copy=False)
    new.flags.writeable = False
    return new
