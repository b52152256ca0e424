"""State that goes from one chunk of compiled steps to the next, and what of it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from ...errors import ContextError
from ...optimizers import Optimizer
from ...tree import Array, flatten
from ...values import Variable
from ._narrow import require_32_bits
from ._prepared import require_nothing_finished_after
from ._program import Outputs, Report, StepProgram, of_each, of_first
from ._programs import CompiledSteps


@final
class State:
    """Values behind the steps so far, on the devices.

    Args:
        programs: Those of the strategy.
        program: The one that runs the steps.
        initial: Outputs to begin with, for each replica.

    Attributes:
        carry: Values of the variables, and outputs, as the program takes and gives them.
    """

    def __init__(
        self,
        programs: CompiledSteps,
        program: StepProgram,
        initial: Sequence[Mapping[str, object]],
    ) -> None:
        self._programs = programs
        self._program = program
        self._bases = {variable: variable.components for variable in program.state}
        values = programs.load(program, self._bases)
        self.carry: Any = (values, _first_outputs(program, initial))
        self._counts = dict.fromkeys(program.applied, 0)
        self._writes = dict.fromkeys(program.counted, 0)

    @property
    def is_observed(self) -> bool:
        """True if an observer is told of what is published."""
        return any(variable.store.is_observed for variable in self._bases)

    def num_updates(self, num_steps: int = 0) -> dict[Optimizer, int]:
        """Return how many updates each optimizer will have made, if none of these steps skips.

        Args:
            num_steps: Steps beyond those so far.
        """
        return {
            optimizer: int(optimizer.iterations.components[0]) + count + times * num_steps
            for (optimizer, count), (_, times) in zip(
                self._counts.items(), self._program.applied.values(), strict=True
            )
        }

    def move_on(self, carry: object, report: Report) -> None:
        """Take what is behind further steps, which have reported this."""
        self.carry = carry
        for optimizer, count in zip(self._counts, report.updates, strict=True):
            self._counts[optimizer] += int(count)
        for variable, count in zip(self._writes, report.counts, strict=True):
            self._writes[variable] += int(count)

    def outputs(self) -> list[dict[str, Any]]:
        """Return the outputs behind the last step, for each replica."""
        of_replicas = [of_each(array) for array in self.carry[1]]
        return [
            self._program.outputs.unflatten([own[i][()] for own in of_replicas])
            for i in range(self._program.num_replicas)
        ]

    def write(self, num_steps: int) -> None:
        """Publish the values behind the last step, as one write that counts as so many.

        Raises:
            ContextError: If somebody else has written a variable meanwhile, be it only read here;
                or if `finish` of an optimizer gives something.
        """
        program = self._program
        changes: dict[Variable, tuple[Array, ...]] = {}
        counts: dict[Variable, int] = {}
        for i, variable in enumerate(program.state):
            sources = program.written.get(variable)
            if sources is None:
                continue
            array, size = self.carry[0][i], len(self._bases[variable])
            parts = [of_first(array)] * size if program.is_mirrored[i] else of_each(array)
            made = {id(part): _published(part, variable) for part in parts}
            changes[variable] = tuple(made[id(part)] for part in parts)
            counts[variable] = self._num_writes(variable, sources, num_steps)
        for optimizer, count in self._counts.items():
            if count:
                iteration = int(optimizer.iterations.components[0]) + count
                require_nothing_finished_after(optimizer, iteration)
        is_done = all(variable.components is base for variable, base in self._bases.items())
        for store in dict.fromkeys(variable.store for variable in changes):
            own = {v: parts for v, parts in changes.items() if v.store is store}
            is_done = is_done and bool(store.write(own, self._bases, counts=counts))
        if not is_done:
            raise _interference(self._bases, num_steps)
        self._bases.update(changes)  # and not what they hold now: who wrote since is seen
        self._counts = dict.fromkeys(self._counts, 0)
        self._writes = dict.fromkeys(self._writes, 0)

    def keep(self) -> None:
        """Keep the arrays behind what was published, for the next run; no step came since."""
        self._programs.keep(self._program, self._bases, self.carry[0])

    def _num_writes(
        self, variable: Variable, sources: Sequence[Optimizer | None], num_steps: int
    ) -> int:
        """Return how many writes of a variable so many steps stand for; skipped updates are none.

        Args:
            variable: Which one.
            sources: What writes it in a step, for each write.
            num_steps: How many steps.
        """
        if variable in self._writes:
            return self._writes[variable]
        count = num_steps * sources.count(None)
        if not variable.is_mirrored:  # each replica writes its own
            count *= self._program.num_replicas
        for optimizer in dict.fromkeys(source for source in sources if source is not None):
            times, made = self._program.applied[optimizer][1], self._counts[optimizer]
            if variable is optimizer.settings.skipped:
                made = num_steps * times - made
            count += made * sources.count(optimizer) // times
        return count

    def __repr__(self) -> str:
        return f"<State | {len(self._bases)} variables>"


def _interference(bases: Mapping[Variable, tuple[Array, ...]], num_steps: int) -> ContextError:
    """Return the error of steps that cannot be published any more."""
    names = [variable.name for variable, base in bases.items() if variable.components is not base]
    return ContextError(
        f"Variable {', '.join(names) or 'of the step'} was written by something else while "
        f"{num_steps} compiled steps ran, which began with its old value. These steps were not "
        "published, and their elements went back to the iterator. Write variables between calls of "
        "run_steps, or in the step."
    )


def _first_outputs(
    program: StepProgram, initial: Sequence[Mapping[str, object]]
) -> list[jax.Array]:
    """Put the outputs to begin with on the devices; zeros where there is none.

    Raises:
        ValueError: If one has another structure or shape than what a step leaves in its place, or a
            dtype whose numbers that cannot hold.
        OverflowError: If an integer does not fit 32 bits, and jax may not use 64.
    """
    if program.zeros is not None and not any(initial):
        return program.zeros
    for own in initial:
        _require_alike(program.outputs, own)
    flat = [
        [np.asarray(leaf) for value in own.values() for leaf in flatten(value)[0]]
        for own in initial
    ]
    outputs = []
    for i, shape in enumerate(program.outputs.shapes):
        each = [np.zeros(shape.shape, shape.dtype)] * program.num_replicas
        if i < len(flat[0]):
            if shape.dtype.kind in "iu":
                require_32_bits((own[i] for own in flat), "An output to begin with")
            each = [_cast(program.outputs, i, own[i]) for own in flat]
        outputs.append(program.put_each(each))
    if not any(initial):
        program.zeros = outputs
    return outputs


def _require_alike(outputs: Outputs, initial: Mapping[str, object]) -> None:
    """Check that outputs to begin with have the structures and shapes that they keep."""
    for name, value in initial.items():
        leaves, spec = flatten(value)
        start, kept = outputs.starts[name], outputs.specs[name]
        shapes = [shape.shape for shape in outputs.shapes[start : start + kept.num_leaves]]
        if spec != kept or [np.shape(leaf) for leaf in leaves] != shapes:
            raise ValueError(
                f"Output {name!r} begins with {value!r}, but the step leaves {kept} with shapes "
                f"{shapes} in its place. A compiled loop has static structures and shapes: give "
                "initial_loop_values of these, or leave this one out."
            )


def _cast(outputs: Outputs, index: int, given: Array) -> Array:
    """Return a part of an output to begin with in the dtype that it keeps; floats are rounded."""
    dtype = outputs.shapes[index].dtype
    loses = given.dtype.kind == "c" and dtype.kind != "c"
    if not loses:
        with np.errstate(invalid="ignore"):  # of NaN, which no integer is
            cast = given.astype(dtype)
        if dtype.kind not in "iub" or np.array_equal(cast, given):
            return cast
    name = next(n for n, start in reversed(outputs.starts.items()) if start <= index)
    raise ValueError(
        f"Output {name!r} begins with {given!r}, but the step leaves {dtype} in its place, which "
        "cannot hold that. A compiled loop has static dtypes: give initial_loop_values of this one."
    )


def _published(array: Array, variable: Variable) -> Array:
    if array.dtype is variable.dtype and not array.flags.writeable:
        return array  # of jax
    new = array.astype(variable.dtype, copy=False)
    new.flags.writeable = False
    return new
