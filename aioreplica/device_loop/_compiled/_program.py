"""A step function lowered by jax: a loop over up to K steps a call, over all replicas.

The step is recorded twice. The first time finds out what it reads, writes and sets, with shapes
only; the second time all of that is the state that goes through the steps:

    state      variables, one array for all replicas if they are mirrored, else one per replica
    outputs    `ctx.last_step_outputs`, one per replica
    table      numbers of `prepare`, a row for each update of an optimizer
    inputs     what the steps get: elements, their numbers, seeds for `jax_key`
    numbers    of the first step in the loop, of the loop in the strategy, and of steps in the call

and what a call says of itself is one array, as to read several costs more than they hold:

    report     code of each step, 1 if a value or slot is not finite behind them though no step
               looked, the updates that each optimizer made, and the writes of what is not written
               with each of them

How many steps a call runs is a number that it is given, so that any split into calls is the same
program and gives the same bits. XLA may round a step that stands alone, or loops of several lengths
that it knows, differently: jax 0.7.0 does where `on_non_finite="skip"`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from ...context import CurrentStrategy
from ...errors import ContextError
from ...optimizers import Optimizer
from ...replica import random_stream
from ...tree import Array, Tree, TreeSpec, flatten, unflatten
from ...values import Variable, is_floating
from ._chunk import Chunk
from ._contexts import AXIS, TracedLoop
from ._narrow import Traced
from ._prepared import (
    Asked,
    Columns,
    Prepared,
    Which,
    asked_of,
    columns_for,
    padded,
    prepared_for,
)
from ._trace import StepTrace
from ._untraceable import explained, require_own_values
from ._update import keeps_infinities

Key: TypeAlias = tuple[str, bool]
Table: TypeAlias = list[Columns]
Parting: TypeAlias = tuple[tuple[Which, tuple[bool, ...]], ...]
"""How the functions of each optimizer tell variables apart, which is compiled with the step."""
OfAll, OfEach = Spec(), Spec(AXIS)

CPU = "cpu"
"""Platform of the devices that need not know how many steps a program runs, and sum in order."""

MAX_PARTINGS = 8
"""For how many of them a step has programs; those of the first one go first."""


@final
@dataclass(frozen=True, slots=True)
class Outputs:
    """Structure of the outputs of a loop.

    Attributes:
        specs: Structure of each, by name.
        starts: Which array is the first of each.
        shapes: Shape and dtype of each array.
    """

    specs: dict[str, TreeSpec]
    starts: dict[str, int]
    shapes: list[jax.ShapeDtypeStruct]

    def unflatten(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return outputs by name, from all arrays."""
        found = {}
        for name in self.specs if names is None else names:
            start, spec = self.starts[name], self.specs[name]
            found[name] = unflatten(spec, arrays[start : start + spec.num_leaves])
        return found


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of steps that were run.

    Attributes:
        codes: For each step, what has failed it; 0 for nothing.
        in_doubt: Whether a value or slot is not finite behind them though no step looked.
        updates: How many updates each optimizer made.
        counts: How often each variable was written of which that depends on values.
        records: For each name that is recorded, a number of each step.
    """

    codes: Array
    in_doubt: bool
    updates: list[int]
    counts: list[int]
    records: list[Array]


@final
class StepProgram:
    """The programs of one step function for elements of one look.

    Args:
        fn: Gives the step function, as long as it lives.
        strategy: Whose step it is.
        devices: One of jax for each replica.
        element: The arrays of one element, of replica 0.
        spec: Their structure, a tuple of inputs.
        initial: `last_step_outputs` of replica 0 to begin with.

    Attributes:
        fn: As given.
        state: The variables, in the order in which the step asked for them.
        is_mirrored: Whether each of them is one array for all replicas.
        written: What writes each variable, for each write of a step.
        counted: Variables of which values tell how often they are written.
        applied: How often a step applies each optimizer, and the variables that it moves.
        keys: Names of what `jax_key` is asked for.
        outputs: What the step leaves in `last_step_outputs`.
        ops: How each is reduced, and `sites` where it was set.
        records: Names of what the step records.
        in_order: Whether sums are in the order of the replicas, and a program runs a number of
            steps that it does not know as fast as another: on the CPU.
        num_compiled: How many programs were compiled so far.
        zeros: Outputs to begin with on the devices, if none are given; None before that.

    Raises:
        TypeError: If the step cannot be recorded.
        ContextError: If something else than an optimizer writes its `iterations`.
    """

    def __init__(
        self,
        fn: Callable[[], Callable[..., object] | None],
        strategy: CurrentStrategy,
        devices: Sequence[Any],
        element: Sequence[Array],
        spec: TreeSpec,
        initial: Mapping[str, object],
    ) -> None:
        self.fn = fn
        self._strategy = strategy
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self.num_replicas = len(devices)
        self._spec = spec
        self.in_order = all(device.platform == CPU for device in devices)
        self._compiled: dict[Parting, dict[tuple[object, ...], object]] = {}
        self._initial = tuple(initial)
        self.num_compiled = 0
        self._prepared: dict[Parting, list[list[Prepared]]] = {}
        self._asked: list[Asked] = []
        self._parting: Parting = ()
        self._expected: tuple[object, Table] | None = None
        self.zeros: list[Any] | None = None
        self._discover(element, initial)

    # ---- recording -----------------------------------------------------------------------

    def _discover(self, element: Sequence[Array], initial: Mapping[str, object]) -> None:
        """Record the step with shapes only."""
        seen: list[tuple[StepTrace, TracedLoop]] = []
        flat = {name: flatten(value) for name, value in initial.items()}
        given = [[np.asarray(leaf) for leaf in leaves] for leaves, _ in flat.values()]

        def record(inputs: list[Traced], outputs: list[list[Traced]], index: Traced) -> object:
            trace = self._trace(None, index, index)
            loop = TracedLoop(trace.replica, index, {
                name: unflatten(spec, leaves)
                for (name, (_, spec)), leaves in zip(flat.items(), outputs, strict=True)
            })  # fmt: skip
            self._run(trace, loop, inputs)
            seen.append((trace, loop))
            return [flatten(value)[0] for value in loop.last_step_outputs.values()]

        mapped = jax.shard_map(
            record, mesh=self._mesh, in_specs=OfAll, out_specs=OfAll, check_vma=False
        )
        shapes = jax.eval_shape(mapped, list(element), given, np.int32(0))
        trace, loop = seen[-1]
        self.state = list(trace.values)
        self.is_mirrored = [v.is_mirrored or self.num_replicas == 1 for v in self.state]
        self.written = trace.written
        self.applied = trace.applied
        self._slots = _slots_of(self.applied)
        self._within = list(trace.within.values())
        self.counted = list(trace.counts)
        self._looks = any(_is_bounded(v, sources) for v, sources in self.written.items())
        self.keys: list[Key] = list(trace.key_names)
        self.ops, self.sites = loop.ops, loop.sites
        self.records = [name for name, _ in trace.replica.records]
        specs: dict[str, TreeSpec] = {}
        starts: dict[str, int] = {}
        arrays: list[jax.ShapeDtypeStruct] = []
        for (name, value), own in zip(loop.last_step_outputs.items(), shapes, strict=True):
            specs[name] = flatten(value)[1]
            starts[name] = len(arrays)
            arrays += own
        self.outputs = Outputs(specs, starts, arrays)
        for optimizer in self.applied:
            if {*self.written[optimizer.iterations]} != {optimizer}:
                raise ContextError(
                    f"{optimizer!r} cannot be compiled: something else in the step writes its "
                    "`iterations`, which the numbers of its updates follow. Count in a variable of "
                    "your own, or leave out `compile`."
                )

    def _trace(
        self, values: dict[Variable, Traced] | None, index: Traced, first: Traced, **options: Any
    ) -> StepTrace:
        return StepTrace(
            self._strategy, self.num_replicas, values, index, first,
            in_order=self.in_order, **options,
        )  # fmt: skip

    def _run(self, trace: StepTrace, loop: TracedLoop, inputs: Sequence[Traced]) -> None:
        fn = self.fn()
        assert fn is not None  # its caller holds it
        try:
            trace.run(fn, loop, unflatten(self._spec, list(inputs)))
        except Exception as error:  # noqa: BLE001 - raised with the user's line
            raise explained(error, fn) from None

    def _step(
        self, carry: Tree, inputs: Tree, bases: Tree, table: Tree, first: Traced, looks: bool
    ) -> Tree:
        """Run one step on local arrays; return the state behind it, and what it reports."""
        state, outputs = carry
        element, index, seeds = inputs
        prepared, which = self._prepared[self._parting], [each.which for each in self._asked]
        rows = zip(bases, prepared, table, which, strict=True)
        found = dict(zip(self.applied, rows, strict=True))
        keys = dict(zip(self.keys, seeds, strict=True))
        values = dict(zip(self.state, state, strict=True))
        trace = self._trace(values, index, first, keys=keys, table=found, looks=looks)
        begun = self.outputs.unflatten(outputs, self._initial)
        loop = TracedLoop(trace.replica, index, begun)
        self._run(trace, loop, element)
        new: list[Traced] = []
        for name in self.outputs.specs:
            own = flatten(loop.last_step_outputs[name])[0]
            shapes = self.outputs.shapes[len(new) : len(new) + len(own)]
            for array, shape in zip(own, shapes, strict=True):
                if jnp.shape(array) != shape.shape:
                    raise ValueError(
                        f"Output {name!r} has shape {jnp.shape(array)} behind a step, but began "
                        f"with {shape.shape}. A compiled loop has static shapes."
                    )
                new.append(jnp.asarray(array, shape.dtype))
        records = [value for _, value in trace.replica.records]
        counts = list(trace.counts.values())
        return ([trace.read(v) for v in self.state], new), (trace.code(), counts, records)

    def _lowered(self, size: int, is_whole: bool, looks: bool) -> Callable[..., object]:
        """Return what runs the steps of a chunk on arrays of all replicas."""
        mirrored = self.is_mirrored
        positions = {variable: i for i, variable in enumerate(self.state)}

        def program(carry: Tree, chunk: Tree, numbers: Tree, table: Tree) -> Tree:
            state, outputs = carry
            element, seeds = chunk
            own = [a if m else a[0] for a, m in zip(state, mirrored, strict=True)]
            bases = [own[positions[each.iterations]] for each in self.applied]
            index = numbers[0] + jnp.arange(size, dtype=jnp.int32)
            inputs = ([a[0] for a in element], index, [a[0] for a in seeds])

            def turn(at: Traced, carry: Tree) -> Tree:
                begun, (codes, counts, records) = carry
                one = jax.tree.map(
                    lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), inputs
                )
                new, (code, made, own) = self._step(begun, one, bases, table, numbers[1], looks)
                counts = [count + more for count, more in zip(counts, made, strict=True)]
                records = [a.at[at].set(each) for a, each in zip(records, own, strict=True)]
                return new, (codes.at[at].set(code), counts, records)

            none = [jnp.int32(0)] * len(self.counted)
            reported = (
                jnp.zeros(size, jnp.int32),
                none,
                [jnp.zeros(size, jnp.float32)] * len(self.records),
            )
            begun = (own, [a[0] for a in outputs])
            end = size if is_whole else numbers[2]
            (new, left), (codes, counts, records) = lax.fori_loop(0, end, turn, (begun, reported))
            in_doubt = jnp.bool_(False) if looks else self._is_in_doubt(new)
            behind = [in_doubt.astype(jnp.int32)[None]]
            for optimizer in self.applied:
                i = positions[optimizer.iterations]
                behind.append((new[i] - own[i]).astype(jnp.int32)[None])
            report = jnp.concatenate([codes, *behind, *(each[None] for each in counts)])
            new = [a if m else a[None] for a, m in zip(new, mirrored, strict=True)]
            return (new, [a[None] for a in left]), report, [a[None] for a in records]

        of_state = [OfAll if m else OfEach for m in mirrored]
        carry = (of_state, [OfEach] * len(self.outputs.shapes))
        lowered: Callable[..., object] = jax.shard_map(
            program,
            mesh=self._mesh,
            in_specs=(carry, (OfEach, OfEach), OfAll, OfAll),
            out_specs=(carry, OfAll, [OfEach] * len(self.records)),
            check_vma=False,
        )
        return lowered

    def _is_in_doubt(self, state: Sequence[Traced]) -> Traced:
        """Tell whether a value or slot is not finite behind steps that were not checked."""
        values = dict(zip(self.state, state, strict=True))
        finite: dict[tuple[int, ...], Traced] = {}  # of one shape together: one pass over them
        for optimizer, (variables, _) in self.applied.items():
            settings = optimizer.settings
            if settings.on_non_finite != "raise" or not keeps_infinities(optimizer, variables):
                continue
            for variable in variables:
                for each in (variable, *(settings.slots.made.get(variable) or ())):
                    array = values[each]
                    if is_floating(array.dtype):
                        own = jnp.isfinite(array)
                        finite[array.shape] = finite.get(array.shape, True) & own
        found = jnp.stack([jnp.bool_(True), *(each.all() for each in finite.values())]).all()
        if not all(self.is_mirrored):
            found = lax.pmin(found.astype(jnp.int32), AXIS) == 1
        return ~found

    def compiled(self, size: int, args: Tree, *, is_whole: bool, looks: bool) -> Any:
        """Return the program for chunks of a size, compiled the first time.

        Args:
            size: How many steps fit a chunk.
            args: What it will be called with; the last is the table, of numbers that are integers
                in one chunk and floats in another, say.
            is_whole: Whether it is called with as many steps. The CPU has the same program for
                both; elsewhere XLA asks the host behind each step unless it knows their number.
            looks: Whether it checks all updates in every step, though the last would tell.
        """
        options = size, is_whole and not self.in_order, looks or self._looks
        numbers = tuple((a.dtype, a.ndim) for a in jax.tree.leaves(args[-1]))
        own, key = self._compiled[self._parting], (*options, *numbers)
        found = own.get(key)
        if found is None:
            traced = jax.jit(self._lowered(*options)).trace(*args)
            require_own_values(len(traced.jaxpr.in_avals), args, self.fn(), self._within)
            found = own[key] = traced.lower().compile()
            self.num_compiled += 1
        return found

    @property
    def is_current(self) -> bool:
        """True unless slots are others by now: a restore may have let them go."""
        return all(map(operator.is_, self._slots, _slots_of(self.applied)))

    # ---- arrays in and out ---------------------------------------------------------------

    def put(self, array: Array) -> Traced:
        """Put one array on all devices."""
        return jax.device_put(array, NamedSharding(self._mesh, OfAll))

    def put_each(self, arrays: Sequence[Array]) -> Traced:
        """Put one array on each device, as parts of one."""
        return jax.device_put(np.stack(arrays), NamedSharding(self._mesh, OfEach))

    def inputs(self, chunk: Chunk, first: int, seed: int) -> Tree:
        """Return the elements of a chunk on their devices, with seeds for its steps.

        Args:
            chunk: The elements, a row for each replica.
            first: Number of the first step in the strategy.
            seed: Of the run.
        """
        elements, ids = chunk.checked(), range(self.num_replicas)
        seeds = [
            np.stack([_seeds(name, seed, first, None if shared else i, chunk) for i in ids])
            for name, shared in self.keys
        ]
        if self.num_replicas == 1:  # its call puts them where they belong, which costs far less
            return elements, seeds
        return jax.device_put((elements, seeds), NamedSharding(self._mesh, OfEach))

    def report(self, row: Traced, records: Sequence[Traced], num_steps: int) -> Report:
        """Read what a call of so many steps reports, and what its steps recorded."""
        found = of_first(row)
        begin = len(found) - 1 - len(self.applied) - len(self.counted)
        in_doubt, *counts = found[begin:].tolist()
        return Report(
            found[:num_steps],
            bool(in_doubt),
            counts[: len(self.applied)],
            counts[len(self.applied) :],
            [of_each(own)[0][:num_steps] for own in records],
        )

    def expect(self, chunk: Chunk, bases: Mapping[Optimizer, int]) -> None:
        """Make the next table already, unless it is a user's function that has to be asked."""
        key = _table_key(chunk, bases)
        if key is not None:
            self._expected = key, self._table(chunk, bases)

    def table(self, chunk: Chunk, bases: Mapping[Optimizer, int]) -> Table:
        """Call `prepare` for all updates that a chunk may make; what is compiled fits it.

        Args:
            chunk: Its steps.
            bases: How many updates each optimizer has made.

        Returns:
            The numbers of `prepare`, for each optimizer; a row for each step that fits the chunk.
        """
        self._asked = [asked_of(o, variables) for o, (variables, _) in self.applied.items()]
        self._parting = tuple((each.which, each.decays) for each in self._asked)
        if self._parting not in self._compiled:
            if len(self._compiled) == MAX_PARTINGS:
                oldest = next(iter(self._compiled))
                del self._compiled[oldest], self._prepared[oldest]
            asked = zip(self.applied, self._asked, strict=True)
            self._prepared[self._parting] = [prepared_for(o, a.multipliers, 0) for o, a in asked]
            self._compiled[self._parting] = {}
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == _table_key(chunk, bases):
            return expected[1]
        return self._table(chunk, bases)

    def _table(self, chunk: Chunk, bases: Mapping[Optimizer, int]) -> Table:
        likes = self._prepared[self._parting]  # the same for each chunk
        updates = zip(self.applied.items(), self._asked, likes, strict=True)
        return [
            padded(
                columns_for(o, asked.multipliers, bases[o], chunk.num_steps * times, like),
                chunk.size * times,
            )
            for (o, (_, times)), asked, like in updates
        ]


def _is_bounded(variable: Variable, sources: Sequence[Optimizer | None]) -> bool:
    """Tell whether what an optimizer has written may show no more, as a step writes over it."""
    return is_floating(variable.dtype) and len(set(sources)) > 1


def _slots_of(optimizers: Mapping[Optimizer, Any]) -> list[tuple[Variable, ...] | None]:
    """Return the slots that optimizers have by now for the variables that a step moves."""
    return [
        optimizer.settings.slots.made.get(variable)
        for optimizer, (variables, _) in optimizers.items()
        for variable in variables
    ]


def _table_key(chunk: Chunk, bases: Mapping[Optimizer, int]) -> tuple[object, ...] | None:
    """Return what a table follows from; None if there is code of a user behind it."""
    key: list[object] = [chunk.num_steps, chunk.size]
    for optimizer, base in bases.items():
        settings = optimizer.settings
        if type(settings.learning_rate) is not float or settings.multiplier_of is not None:
            return None
        if type(optimizer).__module__ != Optimizer.__module__ or "prepare" in vars(optimizer):
            return None  # it may be another one than the library's
        key += (base, settings.learning_rate)
    return tuple(key)


def _seeds(name: str, seed: int, first: int, replica_id: int | None, chunk: Chunk) -> Array:
    """Return the seeds that `jax_key` takes in each step of a chunk."""
    found = np.zeros(chunk.size, np.uint32)
    for i in range(chunk.num_steps):
        found[i] = int(random_stream(seed, first + i, replica_id, name).integers(2**31))
    return found


def of_first(array: Traced) -> Array:
    """Return what all devices have of an array, as a view of the first's: NumPy's, read-only."""
    is_one = len(array.sharding.device_set) == 1  # of several, jax looks longer than at its part
    found: Array = np.asarray(array if is_one else array.addressable_data(0))
    return found


def of_each(array: Traced) -> list[Array]:
    """Return what each device has of an array of all of them, as views."""
    return [np.asarray(array.addressable_data(i))[0, ...] for i in range(array.shape[0])]
