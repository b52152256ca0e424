"""Launching one run: contexts, places and calls for every replica, then results regrouped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..context import Place
from ..devices import HOST
from ..replica import ReplicaContext, ReplicaGroup, run_device_program
from ..values import regroup_results, split_per_replica
from ._lifecycle import Lifecycle
from ._run_options import RunOptions

if TYPE_CHECKING:
    from ._strategy import Strategy

DEFAULT_OPTIONS = RunOptions()


async def launch(
    strategy: Strategy,
    lifecycle: Lifecycle,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    options: RunOptions,
) -> Any:
    """Run `fn` once per replica and regroup what the replicas return."""
    loop, port = lifecycle.open()
    num_replicas = strategy.num_replicas_in_sync
    all_args = split_per_replica(tuple(args), num_replicas, "args")
    all_kwargs = split_per_replica(kwargs or {}, num_replicas, "kwargs")
    runs_on_loop = is_async(fn)
    group = ReplicaGroup(
        strategy,
        strategy.merge_place,
        strategy.device_names,
        loop,
        strategy.reducer,
        strategy.recorder,
        lifecycle.new_step(),
        getattr(fn, "__qualname__", None) or repr(fn),
        has_plain_values=strategy.has_plain_values,
        is_blocking=not runs_on_loop,
    )
    seed = options.seed or 0
    contexts = [
        ReplicaContext(strategy, group, seat, device, port, seed)
        for seat, device in zip(group.seats, strategy.replica_devices, strict=True)
    ]
    places = [Place(strategy, context) for context in contexts]
    lifecycle.started(group)
    try:
        if runs_on_loop:
            coroutines = _make_coroutines(fn, all_args, all_kwargs)
            for context, place in zip(contexts, places, strict=True):
                context.open(place)
            group.start_tasks(places, coroutines)
        else:
            calls = [
                (run_device_program, (context, fn, *own_args), own_kwargs)
                for context, own_args, own_kwargs in zip(
                    contexts, all_args, all_kwargs, strict=True
                )
            ]
            lanes = [HOST if device is None else str(device) for device in strategy.replica_devices]
            group.start_ops(places, lanes, port, calls)
        results = await group.wait(options.stall_timeout)
    finally:
        for context in contexts:
            context.close()
        group.forget()
        lifecycle.ended(group)
    if strategy.has_plain_values:
        return results[0]
    return regroup_results(results, strategy.device_names)


def is_async(fn: Any) -> bool:
    """Tell whether calling `fn` gives a coroutine: an `async def`, through partials and objects."""
    if type(fn) is FunctionType and fn.__code__.co_flags & inspect.CO_COROUTINE:
        return True
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(type(fn), "__call__", None)  # noqa: B004 - a callable object with an async __call__
    )


def _make_coroutines(
    fn: Callable[..., Coroutine[Any, Any, Any]],
    all_args: Sequence[Any],
    all_kwargs: Sequence[dict[str, Any]],
) -> list[Coroutine[Any, Any, Any]]:
    made: list[Coroutine[Any, Any, Any]] = []
    try:
        for args, kwargs in zip(all_args, all_kwargs, strict=True):
            made.append(fn(*args, **kwargs))
    except BaseException:
        for coroutine in made:
            coroutine.close()
        raise
    return made
