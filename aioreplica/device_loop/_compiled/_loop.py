"""A device loop whose steps are compiled: elements in chunks, one program at a time, publication.

Replica 0 leads: its device thread stacks elements, calls the programs and publishes; the threads of
the others wait, so that no eager op of a device comes between. Nothing is published but whole
steps, and elements of steps that were not published go back to their iterator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import jax
import numpy as np

from ...context import LoopStep
from ...errors import NonFiniteError
from ...replica import BlockingContext, RunningReplica
from ...telemetry import EventLog
from ...tree import Array, flatten
from ...typing import ReduceOp
from .._infeed import CHUNK_BYTES, Infeed
from .._program import MultiStepContext
from ._chunk import Chunk
from ._devices import Gang, only_one
from ._narrow import WIDEN, widen_sums
from ._program import Report, StepProgram
from ._programs import CompiledSteps
from ._state import State
from ._update import MAX_VARIABLES, NO_WEIGHT, NOT_FINITE, WRAPPED

MAX_CHUNK = 64
"""How many steps one program runs at most; fewer if their elements are large."""

MAX_COUNT = 2**31 - 2**20
"""Up to which number steps and updates are counted in 32 bits: a chunk stays within them."""


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
        self._state: State | None = None
        self._leaves: Callable[[Any], Sequence[object]] = tuple
        self._spare: Chunk | None = None
        self._size = 0
        self._done = 0
        self._published = 0
        self._is_due = False
        self._looks = False
        self._records: list[tuple[int, str, float]] = []
        self._failed_ahead: Exception | None = None  # elements that cannot be stacked

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
        try:
            ahead = self._taken(blocking, None, waits=True)
            while ahead is not None:
                before, chunk = self._done, ahead
                ahead = self._ran(replica, chunk)
                self._spare = chunk  # its program has ended
                blocking.step_ended(self._done - before)  # a stall is noticed by steps that are not
                self._is_due = self._done - self._published >= self._every
                if ahead is None or ahead.num_steps < self._num_wanted() or self._is_observed():
                    self._publish_due()  # else while that one runs
                ahead = self._taken(blocking, ahead, waits=True)
        except Exception:
            self._publish_rest()  # the steps before this chunk are complete
            raise
        except BaseException:  # of a call that is cancelled, those that are due
            self._publish_due()
            raise
        self._publish_rest()
        if self._state is not None:
            self._state.keep()

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
        if waits and self._failed_ahead is not None:
            raise self._failed_ahead
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
        fitting = min(MAX_CHUNK, max(1, CHUNK_BYTES // max(1, num_bytes)))
        wanted = min(self._every, self._num_steps, fitting)
        self._size = 1 << wanted.bit_length() - 1  # so that few sizes are compiled
        if self._size < wanted and 2 * self._size <= fitting and program.in_order:
            self._size *= 2  # elsewhere chunks are whole, where they can be
        self._state = State(self._programs, program, initial)

    def _ran(self, replica: RunningReplica, chunk: Chunk) -> Chunk | None:
        """Run the steps of a chunk; return the next one as far as its elements are there.

        Raises:
            NonFiniteError: If an update is not finite, with the steps before it published.
            ValueError: If no replica has any weight.
            OverflowError: If there were too many steps, or a variable passes 32 bits.
        """
        program, state = self._program, self._state
        assert program is not None  # the chunk has an element
        assert state is not None
        begun, updates = state.carry, state.num_updates()
        counts = [self._first + self._done, *updates.values()]
        if max(counts) > MAX_COUNT:
            raise OverflowError(
                f"The strategy has run {counts[0]} steps, and optimizers have made {counts[1:]} "
                f"updates. Compiled steps count up to {MAX_COUNT} of either: leave out `compile`."
            )
        inputs, chunk.inputs = chunk.inputs or self._inputs(program, chunk), None
        table, end = program.table(chunk, updates), chunk.num_steps
        args = (begun, inputs, table)
        carry, report, ahead = self._call(replica, chunk, args, end, reads_ahead=True)
        if report.in_doubt:  # be there a code, too: an update before that step may be the cause
            looked, report, _ = self._call(replica, chunk, args, end, looks=True)
            if not report.codes.any():  # it was not finite before, and the last step never tells
                carry, self._looks = looked, True
        failed = np.flatnonzero(report.codes)
        if failed.size:
            at, code = int(failed[0]), int(report.codes[failed[0]])
            carry, report, _ = self._call(replica, chunk, args, at)
            self._move_on(program, state, carry, report)
            self._fail(program, code)
        self._move_on(program, state, carry, report)
        return ahead

    def _move_on(self, program: StepProgram, state: State, carry: object, report: Report) -> None:
        """Count the steps that the state is behind now, and keep what they have recorded."""
        state.move_on(carry, report)
        first = self._first + self._done
        for name, values in zip(program.records, report.records, strict=True):
            found = [(first + i, name, float(value)) for i, value in enumerate(values)]
            self._records += found
        self._done += len(report.codes)

    def _call(
        self,
        replica: RunningReplica,
        chunk: Chunk,
        args: tuple[Any, ...],
        end: int,
        *,
        reads_ahead: bool = False,
        looks: bool = False,
    ) -> tuple[object, Report, Chunk | None]:
        """Call the program for the first steps of a chunk.

        Returns:
            What is behind them, what they report, and what was read ahead meanwhile.
        """
        program, ahead = self._program, None
        assert program is not None  # the chunk has an element
        carry, inputs, table = args
        args = carry, inputs, np.array([self._done, self._first, end], np.int32), table
        is_whole, looks = end == chunk.size, looks or self._looks
        with replica.blocking.computing():
            call = program.compiled(chunk.size, args, is_whole=is_whole, looks=looks)
        with only_one(replica.blocking, self._publish_due), replica.blocking.computing():
            new, row, records = call(*args)
            try:
                if not self._is_observed():  # an observer may wait for another program
                    self._publish_due()
                if reads_ahead:
                    ahead = self._ahead(replica, program, chunk)
            finally:  # an abort is seen there, too: nothing runs behind this block
                jax.block_until_ready((row, records))  # and with it all else of the program
        self._publish_due()  # an observer came meanwhile
        return new, program.report(row, records, end), ahead

    def _ahead(self, replica: RunningReplica, program: StepProgram, chunk: Chunk) -> Chunk | None:
        """Take the elements behind a chunk that are there already, and put whole chunks.

        What fails of these is raised when they are wanted, behind the steps of the chunk.
        """
        assert self._state is not None  # the program has it
        updates = self._state.num_updates(chunk.num_steps)
        self._done += chunk.num_steps
        try:
            try:
                found = self._taken(replica.blocking, None, waits=False)
            except Exception as error:  # noqa: BLE001 - kept
                found, self._failed_ahead = None, error
            if found is not None and found.num_steps == self._num_wanted():
                with suppress(Exception):  # tried again
                    inputs = self._inputs(program, found)
                    program.expect(found, updates)
                    found.inputs = inputs
            return found
        finally:
            self._done -= chunk.num_steps

    def _inputs(self, program: StepProgram, chunk: Chunk) -> object:
        return program.inputs(chunk, self._first + self._done, self._seed)

    # ---- steps that fail -----------------------------------------------------------------

    def _fail(self, program: StepProgram, code: int) -> None:
        """Publish the steps before the one that fails, and raise its error."""
        self._publish_rest()
        error = _failure(program, code, self._first + self._done)
        self._contexts[0].error = error
        raise error

    # ---- publication ---------------------------------------------------------------------

    def _is_observed(self) -> bool:
        """Tell whether an observer waits for what is due: it may set what the next steps use."""
        if self._state is None or not self._is_due:
            return False
        return self._state.is_observed or (bool(self._records) and self._events.is_observed)

    def _publish_due(self) -> None:
        """Publish the steps behind which it is time, if that was left for later."""
        if self._is_due:
            self._publish()

    def _publish_rest(self) -> None:
        """Publish the last steps, or those before the iterator ended or something failed."""
        if self._done > self._published:
            self._publish()

    def _publish(self) -> None:
        """Publish the values behind the last step, as one write, and count the steps.

        Raises:
            ContextError: If somebody else has written a variable meanwhile.
        """
        program, state = self._program, self._state
        assert program is not None  # a step was run
        assert state is not None
        self._is_due = False
        num_steps = self._done - self._published
        outputs = state.outputs()
        widen_sums(outputs, (name for name, op in program.ops.items() if op is ReduceOp.SUM))
        try:
            state.write(num_steps)
        finally:
            self._published = self._done  # whatever fails below; and what cannot be written is not
        for step in self._steps:
            step.ended(num_steps)
        for context, own in zip(self._contexts, outputs, strict=True):
            context.last_step_outputs.update(own)
            context.take_outputs(self._done, program.ops, program.sites)
        for number, name, value in self._records:
            self._events.add_scalar(number, 0, name, value)
        self._records.clear()


def _failure(program: StepProgram, code: int, number: int) -> Exception:
    """Return the error of a step that has reported a code."""
    kind, index = divmod(code, MAX_VARIABLES)
    if kind == WRAPPED:
        return OverflowError(
            f"Variable {program.state[index].name!r} has {program.state[index].dtype}, which jax "
            f"computes in 32 bits here, and passes what they hold in step {number}: "
            f"what it is assigned, or comes to, does not fit. {WIDEN}"
        )
    name = [v.name for variables, _ in program.applied.values() for v in variables][index]
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


def _leaves_of(part: object) -> Sequence[object]:
    return flatten(part)[0]
