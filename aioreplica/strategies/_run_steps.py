"""Running a device loop: the programs of all devices in one hop, the infeed beside them."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from .._functions import is_async, refuse_context_passed, require_no_yield
from ..collectives import no_data
from ..context import AWAITED_BY, PLACE, LoopStep
from ..device_loop import (
    Feeder,
    Infeed,
    KeptIterators,
    MultiStepContext,
    combine_outputs,
    new_feeder,
    open_iterator,
    require_equal_outputs,
    run_loop,
)
from ..devices import require_threads, run_on_host
from ..errors import ContextError
from ..input import DistributedIterator
from ..replica import add_note_once
from ..tree import Tree
from ..values import split_per_replica
from ._combine import reduce_tree
from ._launch import Run, RunOptions, equalize, function_name
from ._runtime import Replicas, Runtime

if TYPE_CHECKING:
    from ..cluster import WorkersRun
    from ..device_loop._compiled import CompiledSteps

EXHAUSTED = bytes([True])
"""Told by a worker whose iterator has no more elements, as opposed to one that was broken off."""


@final
@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Checked arguments of one call of run_steps.

    Attributes:
        fn: The step function.
        given: What elements are to come from.
        num_steps: How many steps to run.
        initial: The loop values to begin with, by name.
        options: Stall timeout and seed.
        compile: Name of the compiler; None runs the steps as they are.
        every: After how many compiled steps values are published; None for once, at the end.
    """

    fn: Callable[..., Any]
    given: Tree
    num_steps: int
    initial: Mapping[str, Tree]
    options: RunOptions
    compile: str | None = None
    every: int | None = None


def checked_plan(
    fn: object,
    iterator: object,
    iterations: object,
    initial_loop_values: object,
    options: object,
    default: int,
    compile: object = None,  # noqa: A002 - the argument's name
    every: object = None,
) -> LoopPlan:
    """Check the arguments of run_steps.

    Raises:
        TypeError: If `fn` is not a plain function, `initial_loop_values` not a dict of names,
            `options` not a RunOptions, or `iterations` or `every` not an int.
        ValueError: If `iterations` or `every` is below 1, `compile` is unknown, or `every` is given
            without it.
        ImportError: If the compiler is not installed.
    """
    if not callable(fn):
        raise TypeError(f"run_steps needs a step function of (ctx, *inputs), got {fn!r}.")
    if is_async(fn):
        raise TypeError(
            f"run_steps runs plain functions on the device threads, but {fn!r} is `async def`. "
            "Make it a plain `def`: use ctx.blocking for collectives and ar.outside_compilation "
            "for what has to be awaited; or call strategy.run for each step."
        )
    refuse_context_passed(fn, "run_steps")
    require_no_yield(fn, "run_steps", "Return, and report values with ctx.set_last_step_output.")
    initial = {} if initial_loop_values is None else initial_loop_values
    if not isinstance(initial, Mapping) or not all(isinstance(name, str) for name in initial):
        raise TypeError(
            f"initial_loop_values must be a dict of names and values, got {initial_loop_values!r}."
        )
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(f"options must be an ar.RunOptions, got {options!r}.")
    num_steps = default if iterations is None else checked_count("iterations", iterations)
    if compile not in (None, "jax"):
        raise ValueError(f'compile must be "jax" or None, got {compile!r}.')
    if every is not None:
        every = checked_count("every", every)
        if compile is None:
            raise ValueError(
                f"every={every} says when compiled steps are published, but `compile` is None: "
                "then each step publishes what it writes."
            )
    if compile is not None and find_spec("jax") is None:
        raise ImportError(
            'run_steps(compile="jax") needs the jax package, which is not installed. Run: pip '
            'install "aioreplica[jax]"',
            name="jax",
        )
    return LoopPlan(fn, iterator, num_steps, initial, options or RunOptions(), compile, every)


def checked_count(name: str, value: Any) -> int:
    """Return a count of steps as an int.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is below 1.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}.") from None
    if count < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return count


async def run_steps(runtime: Runtime, plan: LoopPlan) -> MultiStepContext:
    """Run a device loop and combine what it leaves behind; a run like any other for workers."""
    if plan.compile is not None:
        _require_compilable(runtime)
        if runtime.compiled is None:
            loaded = await run_on_host(_load_compiler, runtime)
            if runtime.compiled is None:  # else another call was faster
                runtime.compiled = loaded
    workers = runtime.workers
    if workers is None or not workers.has_others:
        return await _run_loop(runtime, plan, None)
    runtime.open()
    async with workers.run(function_name(plan.fn)) as across:
        await equalize(runtime, across)
        return await _run_loop(runtime, plan, across)


async def _run_loop(
    runtime: Runtime, plan: LoopPlan, across: WorkersRun | None
) -> MultiStepContext:
    lifecycle, events = runtime.lifecycle, runtime.events
    gate = lifecycle.gate
    if gate.is_closed:
        await gate.opened()
    lifecycle.open()
    count, num_steps = runtime.num_local_replicas, plan.num_steps
    initial = split_per_replica(dict(plan.initial), count, "initial_loop_values")
    iterator = open_iterator(plan.given)
    run = Run.prepare(
        runtime, plan.fn, plan.options.seed, is_blocking=True, num_steps=num_steps, across=across
    )
    event_loop = asyncio.get_running_loop()
    infeed = Infeed(runtime.host_replicas, event_loop, fills_chunks=plan.compile is not None)
    step = run.group.step
    first = 0 if across is None else across.first_replica
    contexts = [
        MultiStepContext(initial[i], events=events, replica_id=first + i, first_step=step)
        for i in range(count)
    ]
    completed, published = [0] * count, [0] * count
    steps = [LoopStep(i, completed, published) for i in range(count)]
    if runtime.iterators is None:
        runtime.iterators = KeptIterators()
    kept = runtime.iterators if iterator is plan.given else None
    feeder = new_feeder(iterator, kept, infeed, steps, num_steps)
    events.add("loop", "begin", step, value=num_steps)
    try:
        programs = _programs(plan, run, infeed, contexts, steps)
        await _run(plan, run, infeed, feeder, programs)
    finally:
        feeder.settle()
        for context in contexts:
            context.close(num_steps)
        for each in steps:
            for settle in each.at_end:
                settle()
        num_run = steps[0].num_taken()
        lifecycle.give_back_steps(step + num_run, step + num_steps)
        events.add("loop", "end", step, value=num_run)
    if gate.is_closed:
        await gate.opened()
    if feeder.error is not None:
        _raise_source_error(feeder.error, num_run)
    if num_run < num_steps:
        events.add("infeed", "exhausted", step, value=num_run)
    is_over = num_run < num_steps
    batches = iterator if is_over and isinstance(iterator, DistributedIterator) else None
    return await _end(runtime, contexts, step, across, feeder.is_exhausted, batches)


async def _end(
    runtime: Runtime,
    contexts: list[MultiStepContext],
    step: int,
    across: WorkersRun | None,
    is_exhausted: bool,
    batches: DistributedIterator | None,
) -> MultiStepContext:
    """Combine the outputs, if all workers have the same, and end an epoch that is over on one."""
    outputs = require_equal_outputs(contexts, runtime.device_names, step)
    combine = partial(
        combine_outputs,
        contexts,
        runtime.device_names,
        lambda op, value: reduce_tree(Replicas(runtime), op, value),
        has_plain_values=runtime.has_plain_values,
    )
    if across is None:
        return await combine()
    with across.turn("outputs", outputs or "none", 0) as turn:
        ends = await turn.exchange(bytes([is_exhausted]), no_data)
        if batches is not None:
            await batches.end(is_exhausted=EXHAUSTED in ends)  # whatever batches are left here
        token = PLACE.set(runtime.merge_place)
        try:
            with turn.merging():
                return await combine()
        finally:
            PLACE.reset(token)


Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _programs(
    plan: LoopPlan,
    run: Run,
    infeed: Infeed,
    contexts: list[MultiStepContext],
    steps: list[LoopStep],
) -> list[Program]:
    """Return what each device thread calls: its own steps, or all together what is compiled."""
    runtime = run.runtime
    if plan.compile is None:
        return [
            (
                run_loop,
                (replica, plan.fn, context, step, infeed, plan.num_steps),
                {"meets_workers": run.group.point.everyone.across is not None},
            )
            for replica, context, step in zip(run.replicas, contexts, steps, strict=True)
        ]
    from ..device_loop._compiled import CompiledLoop, Gang  # it needs jax

    assert runtime.compiled is not None  # it was loaded
    gang = Gang(len(contexts), asyncio.get_running_loop())
    run.group.point.on_abort.append(gang.abort)
    loop = CompiledLoop(
        plan.fn, runtime.compiled, infeed, steps, contexts, runtime.events, plan.num_steps,
        run.group.step, plan.options.seed or 0, plan.every, gang,
    )  # fmt: skip
    return [(loop.run, (replica,), {}) for replica in run.replicas]


def _load_compiler(runtime: Runtime) -> CompiledSteps:
    """Import jax and find its devices, which takes a second."""
    from ..device_loop._compiled import CompiledSteps

    return CompiledSteps(runtime)


def _require_compilable(runtime: Runtime) -> None:
    """Check that a strategy's steps can be compiled.

    Raises:
        ContextError: If it has workers, or compresses what it reduces.
        DeviceError: If a device has a process of its own.
    """
    compression = runtime.reducer.options.compression
    if compression is not None:
        raise ContextError(
            f'{runtime!r} cannot run_steps with compile="jax": it was made with compression='
            f"{compression!r}, and a compiled program sums arrays as they are. Make a strategy "
            "without compression, or leave out `compile`."
        )
    if runtime.workers is not None:
        raise ContextError(
            f'{runtime!r} cannot run_steps with compile="jax": its replicas meet those of other '
            "workers, outside every compiled program. Use a MirroredStrategy, or leave out "
            "`compile`."
        )
    require_threads(
        runtime.device_names, 'run_steps(compile="jax")', "Leave out `compile` and call run"
    )


async def _run(
    plan: LoopPlan,
    run: Run,
    infeed: Infeed,
    feeder: Feeder,
    programs: list[Program],
) -> None:
    group = run.group
    group.point.on_abort.append(infeed.abort)
    run.runtime.lifecycle.started(group)
    try:
        across = group.point.everyone.across
        token = None if across is None else AWAITED_BY.set((*AWAITED_BY.get(), across))
        try:
            feeder.start()  # first: if there is no thread for it, no program waits for its elements
            run.start_programs(programs)
        finally:
            if token is not None:
                AWAITED_BY.reset(token)
        await group.wait(plan.options.stall_timeout)
        if infeed.num_waiting:  # another worker has no more elements
            infeed.abort()
    except GeneratorExit:  # the coroutine is dropped, as its event loop was: no wait is possible
        infeed.abort()
        feeder.abandon()
        run.end()
        raise
    except BaseException:
        infeed.abort()
        await _ended(feeder, run)
        raise
    await _ended(feeder, run)


async def _ended(feeder: Feeder, run: Run) -> None:
    try:
        await feeder.aclose()
    finally:
        run.end()


def _raise_source_error(error: BaseException, num_run: int) -> None:
    add_note_once(error, f"Raised by the infeed of run_steps, after {num_run} complete steps.")
    try:
        raise error
    finally:
        del error  # its traceback holds this frame
