"""The current strategy and replica, and the default strategy: in charge when no other one is."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NoReturn,
    ParamSpec,
    TypeVar,
    cast,
    final,
    overload,
)

from .._functions import is_async
from ..context import PLACE, REGISTRY
from ..devices import running_loop
from ..errors import ContextError
from ..replica import ProcessContext, ReplicaContext, ReplicaGroup, RunningReplica
from ..tree import Tree
from ..values import PlainVariable, default_store
from ._launch import RunOptions
from ._strategy import Strategy

P = ParamSpec("P")
R = TypeVar("R")


@final
class DefaultStrategy(Strategy):
    """The absence of a strategy: one replica, plain values, no devices, any event loop.

    What `ar.get_strategy()` returns outside every scope. Code written for replicas runs under it
    unchanged.

    Example:
        >>> import asyncio
        >>> async def step(x):
        ...     return x + 1
        >>> asyncio.run(DefaultStrategy().run(step, args=(1,)))
        2
    """

    def __init__(self) -> None:
        super().__init__(None, lambda _runtime, value, options: PlainVariable(value, options))

    if TYPE_CHECKING:  # values stay plain here

        @overload  # type: ignore[override]  # no PerReplica
        async def run(
            self, fn: Callable[..., Coroutine[object, None, R]], args: Sequence[Tree] = ...,
            kwargs: dict[str, Tree] | None = ..., options: RunOptions | None = ...,
        ) -> R: ...  # fmt: skip
        @overload
        async def run(
            self, fn: Callable[..., R], args: Sequence[Tree] = ...,
            kwargs: dict[str, Tree] | None = ..., options: RunOptions | None = ...,
        ) -> R: ...  # fmt: skip
        async def run(self, *args: Any, **kwargs: object) -> Tree: ...

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise copy.Error("DefaultStrategy cannot be copied: it is the absence of a strategy.")

    def __reduce__(self) -> NoReturn:
        raise TypeError("DefaultStrategy cannot be pickled: it is the absence of a strategy.")


def get_strategy() -> Strategy:
    """Return the current strategy: of the scope, replica or merge function, else the default one.

    Example:
        >>> get_strategy()
        <DefaultStrategy | new>
    """
    runtime = PLACE.get().strategy
    strategy: Strategy = _default_strategy() if runtime is None else runtime.facade
    return strategy


def has_strategy() -> bool:
    """Tell whether a strategy other than the default one is in charge.

    Example:
        >>> has_strategy()
        False
    """
    runtime = PLACE.get().strategy
    return runtime is not None and not runtime.has_plain_values


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that runs here.

    Returns:
        None in cross-replica and update context. Outside every strategy, a context of the default
        strategy, whose one replica meets itself.

    Raises:
        ContextError: Outside every strategy, under trio.

    Example:
        >>> get_replica_context().num_replicas_in_sync
        1
    """
    place = PLACE.get()
    if isinstance(place.replica, RunningReplica):
        return place.replica.context
    if isinstance(place.replica, ProcessContext):
        return cast("ReplicaContext", place.replica)  # all of it that there is in a device process
    if place.replica is not None:
        return cast("ReplicaContext", place.replica.context)  # of a step that is being compiled
    if place.strategy is not None:
        return None
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        running_loop("The default replica context")  # says why it cannot be used
    runtime = _default_strategy()._runtime
    group = ReplicaGroup(runtime, None, 0, "no step")
    own = RunningReplica(runtime, group, group.replicas[0], None, None, 0)
    own.waiter.open(place)
    return ReplicaContext(own)


def with_context(fn: Callable[Concatenate[ReplicaContext, P], R]) -> Callable[P, R]:
    """Pass the replica's context to a step function, before its other arguments.

    Args:
        fn: `async def` or plain. `strategy.run` gets the decorated function; `run_steps` and
            `OnlineLearner` pass a context of their own and refuse it.

    Raises:
        TypeError: If `fn` is not callable.
        ContextError: When the function is called outside a replica.

    Example:
        >>> import asyncio
        >>> @with_context
        ... async def step(ctx, x):
        ...     return await ctx.all_reduce("sum", x)
        >>> asyncio.run(DefaultStrategy().run(step, args=(2,)))
        2
    """
    if not callable(fn):
        raise TypeError(f"with_context marks a step function, got {fn!r} ({type(fn).__name__}).")
    call: Any = fn  # Any: awaited if it is async, and the result is marked

    async def await_step(*args: P.args, **kwargs: P.kwargs) -> object:
        return await call(_own_context(call), *args, **kwargs)

    def call_step(*args: P.args, **kwargs: P.kwargs) -> object:
        return call(_own_context(call), *args, **kwargs)

    step: Any = functools.wraps(fn)(await_step if is_async(fn) else call_step)
    step.passes_context = True
    return step  # type: ignore[no-any-return]  # as above


def _own_context(fn: object) -> ReplicaContext:
    """Return the context of the replica that calls `fn`."""
    replica = PLACE.get().replica
    if replica is None:
        raise ContextError(
            f"{fn!r} is marked with ar.with_context and was called outside a replica, in "
            f"{PLACE.get().describe()}. Pass it to strategy.run."
        )
    return cast("ReplicaContext", replica.context)


def _default_strategy() -> DefaultStrategy:
    return REGISTRY.once("default_strategy", _new_default_strategy)


def _new_default_strategy() -> DefaultStrategy:
    strategy = DefaultStrategy()
    strategy._runtime.lifecycle.numbers = default_store().gate  # those that a checkpoint keeps
    return strategy
