"""Launching one run: options, contexts, places and calls for each replica; results regrouped."""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex, final

from .._functions import UNFINISHED, is_async, require_no_yield, unfinished_error
from ..collectives import broadcast_arrays
from ..context import PLACE, Place
from ..devices import HOST, CompletionQueue, require_threads
from ..errors import ContextError
from ..replica import SEND_BOUND, ReplicaGroup, RunningReplica, run_device_program
from ..tree import Tree
from ..values import regroup_results, split_per_replica
from ._runtime import Runtime

if TYPE_CHECKING:
    from ..cluster import WorkersRun


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one `strategy.run`.

    Attributes:
        stall_timeout: Seconds without progress (a collective called or merged, a device op ended,
            a replica returned, a compiled program at work) after which the run ends with a
            StallError; None never.
        seed: Seed of `ctx.rng` and `ctx.shared_rng`; None means 0.
        send_bound: How many values that were not received are kept, for each tag between two
            replicas, before `ctx.send` waits.

    Raises:
        ValueError: If `stall_timeout` is not positive, `seed` no int or negative, or `send_bound`
            no int or below 1.
        TypeError: If `stall_timeout` is not a number.

    Example:
        >>> RunOptions(stall_timeout=30.0)
        RunOptions(stall_timeout=30.0, seed=None, send_bound=2)
    """

    stall_timeout: float | None = None
    seed: int | None = None
    send_bound: int = SEND_BOUND

    def __post_init__(self) -> None:
        if self.stall_timeout is not None and not isinstance(self.stall_timeout, Real):
            raise TypeError(
                f"stall_timeout must be seconds as a number or None, got {self.stall_timeout!r}."
            )
        if self.stall_timeout is not None and not self.stall_timeout > 0:
            raise ValueError(
                f"stall_timeout must be positive seconds or None, got {self.stall_timeout!r}."
            )
        seed = None if self.seed is None else as_int(self.seed)
        if self.seed is not None and (seed is None or seed < 0):
            raise ValueError(f"seed must be an int >= 0 or None, got {self.seed!r}.")
        send_bound = as_int(self.send_bound)
        if send_bound is None or send_bound < 1:
            raise ValueError(f"send_bound must be an int >= 1, got {self.send_bound!r}.")
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "send_bound", send_bound)


def as_int(value: object) -> int | None:
    """Return an integer of any library as an int; None of anything else, bools included.

    Example:
        >>> import numpy as np
        >>> as_int(np.int64(3)), as_int(3.0), as_int(True)
        (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several has the method
        return None


DEFAULT_OPTIONS = RunOptions()


async def launch(
    runtime: Runtime,
    fn: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, Tree] | None,
    options: RunOptions,
    across: WorkersRun | None = None,
) -> object:
    """Run `fn` once per replica and regroup what the replicas return."""
    runs_on_loop = is_async(fn)
    if not runs_on_loop:
        require_no_yield(fn, "run")
    workers = runtime.workers
    if workers is not None and across is None:
        runtime.open()
        async with workers.run(function_name(fn)) as run_of_all:
            await equalize(runtime, run_of_all)
            return await launch(runtime, fn, args, kwargs, options, run_of_all)
    lifecycle = runtime.lifecycle
    gate = lifecycle.gate
    if gate.is_closed:
        await gate.opened()
    num_replicas = runtime.num_local_replicas
    all_args = split_per_replica(tuple(args), num_replicas, "args")
    all_kwargs = split_per_replica(kwargs or {}, num_replicas, "kwargs")
    run = Run.prepare(runtime, fn, options.seed, is_blocking=not runs_on_loop, across=across)
    if options.send_bound != SEND_BOUND:
        run.group.point.rendezvous.open_messages(options.send_bound)
    lifecycle.started(run.group)
    try:
        if runs_on_loop:
            coroutines = _make_coroutines(fn, all_args, all_kwargs)
            for own, place in zip(run.replicas, run.places, strict=True):
                own.waiter.open(place)
            run.group.start_tasks(run.places, coroutines)
        else:
            run.start_programs(
                [
                    (fn, own_args, own_kwargs)
                    for own_args, own_kwargs in zip(all_args, all_kwargs, strict=True)
                ]
            )
        results = await run.group.wait(options.stall_timeout)
    finally:
        run.end()
    if gate.is_closed:
        await gate.opened()
    if type(results[0]) in UNFINISHED:  # a wrapper called the generator function
        raise unfinished_error(results[0], fn, "run")
    if runtime.has_plain_values:
        return results[0]
    return regroup_results(results, runtime.device_names)


@final
@dataclass(slots=True)  # not frozen: that costs every run a microsecond
class Run:
    """The replicas of one run, ready to start.

    Attributes:
        runtime: Whose run it is.
        group: The replica group.
        replicas: What `Place` holds of each.
        places: Where each replica runs.
        port: Brings results from device threads to the event loop.
    """

    runtime: Runtime
    group: ReplicaGroup
    replicas: list[RunningReplica]
    places: list[Place]
    port: CompletionQueue

    @staticmethod
    def prepare(
        runtime: Runtime,
        fn: Callable[..., object],
        seed: int | None,
        *,
        is_blocking: bool,
        num_steps: int = 1,
        across: WorkersRun | None = None,
    ) -> Run:
        """Make the contexts of a run of `fn`, on the running event loop.

        Raises:
            ContextError: If device programs are to run where others wait on all devices.
            DeviceError: If they are to run on a device that has a process of its own.
        """
        holds_devices = PLACE.get().holds_devices
        if holds_devices and is_blocking:
            raise _nested_programs_error(runtime, fn)
        if is_blocking:
            what = f"Plain function {_name_of(fn)!r}" if num_steps == 1 else "A device loop"
            instead = "Make the step `async def` and run its heavy parts by `ctx.run_on_device`"
            require_threads(runtime.device_names, what, instead)
        lifecycle = runtime.lifecycle
        loop, port = lifecycle.open()
        group = ReplicaGroup(
            runtime, loop, lifecycle.new_step(num_steps), _name_of(fn),
            is_blocking=is_blocking, across=across,
        )  # fmt: skip
        if across is not None:
            across.begin(group.step, group.point.rows, group.abort)
        replicas = [
            RunningReplica(runtime, group, state, device, port, seed or 0, holds_devices)
            for state, device in zip(group.replicas, runtime.replica_devices, strict=True)
        ]
        return Run(runtime, group, replicas, [Place(runtime, own) for own in replicas], port)

    def start_programs(
        self, calls: Sequence[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]]
    ) -> None:
        """Put one plain call per replica on the device lanes, all in one go."""
        programs = [
            (run_device_program, (own, fn, *args), kwargs)
            for own, (fn, args, kwargs) in zip(self.replicas, calls, strict=True)
        ]
        lanes = [HOST if name == "-" else name for name in self.runtime.device_names]
        self.group.start_ops(self.places, lanes, self.port, programs)

    def end(self) -> None:
        """Refuse further use of the contexts, and let go of the group."""
        for own, place in zip(self.replicas, self.places, strict=True):
            own.close()
            place.end()
        self.group.forget()
        self.runtime.lifecycle.ended(self.group)


def _name_of(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _nested_programs_error(runtime: Runtime, fn: object) -> ContextError:
    return ContextError(
        f"{fn!r} was to run on the devices of {runtime!r} in a merge function of plain replicas, "
        "which hold the devices while they wait for it. Call it in the merge function, or make "
        "it `async def`: then its ops go to the host; or make the outer step `async def`."
    )


def _make_coroutines(
    fn: Callable[..., Coroutine[object, None, object]],
    all_args: Sequence[Tree],
    all_kwargs: Sequence[dict[str, Tree]],
) -> list[Coroutine[object, None, object]]:
    made: list[Coroutine[object, None, object]] = []
    try:
        for args, kwargs in zip(all_args, all_kwargs, strict=True):
            made.append(fn(*args, **kwargs))
    except BaseException:
        for coroutine in made:
            coroutine.close()
        raise
    return made


def require_runnable(fn: object, args: object, options: object) -> None:
    """Check what `run` was given.

    Raises:
        TypeError: If `fn` is not callable, or `options` is not a RunOptions.
        ValueError: If `args` is not a tuple or list.
    """
    if not callable(fn):
        raise TypeError(
            f"run needs a step function, got {fn!r} ({type(fn).__name__}). "
            "Pass the function itself, not the result of calling it."
        )
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"run takes args as a tuple or list, got {args!r} ({type(args).__name__}). "
            "Write args=(value,) for one argument."
        )
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(f"options must be an ar.RunOptions, got {options!r}.")


def function_name(fn: object) -> str:
    """Return the name of a step function."""
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


async def equalize(runtime: Runtime, across: WorkersRun) -> None:
    """Give variables that were made since the last run the values of worker 0.

    After a failure, give the step one number again, too.

    Raises:
        MergeMismatchError: If workers have made different variables.
    """
    if across.workers.counts_anew:
        numbers = runtime.lifecycle.numbers
        numbers.next_step = await across.agreed_step(numbers.next_step)
    table = runtime.variable_table
    number, made = table.made_since_last()
    if not made:
        table.are_equal_up_to(number)
        return
    kinds = [(each, "" if each.is_mirrored else " on read") for each in made]
    text = "; ".join(f"{v.name!r}: {v.dtype}{list(v.shape)}{kind}" for v, kind in kinds)
    mirrored = [variable for variable in made if variable.is_mirrored]
    with across.turn("new variables", text, 0) as turn:
        arrays = await broadcast_arrays(turn, [variable.components[0] for variable in mirrored])
    changes = {}
    for variable, array in zip(mirrored, arrays, strict=True):
        if array.tobytes() != variable.components[0].tobytes():
            changes[variable] = (array,) * len(variable.components)
    if changes:
        runtime.store.write(changes)
    table.are_equal_up_to(number)
