"""merge_call in cross-replica context, and merge functions of `ctx.variable` and `ctx.update`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from types import MethodType
from typing import Any, final

import numpy as np

from .._functions import require_finished
from ..collectives import Turn, leaf_bytes, no_data
from ..context import PLACE
from ..tree import LEAF_TYPES, flatten
from ..typing import VariableAggregation
from ..values import (
    PerReplica,
    Variable,
    argument_difference,
    merged_column,
    split_per_replica,
    update_components,
)
from ._meeting import Call, Collective, Parts, SyncGroup, collective_named
from ._pending import Pending
from ._signature import arguments_text, function_text


@final
class MergeCall(Collective):
    """Gathers arguments, calls replica 0's function once, hands out the parts of its result.

    Args:
        name: What tables call it; variables and optimizers meet under names of their own.
    """

    __slots__ = ()

    def detail(self, argument: object) -> str:
        """Name the merge function."""
        if self.name != "merge_call":
            return ""  # a function of the library, which would tell the reader nothing
        wrapped = _unwrap(argument)
        return getattr(wrapped, "__qualname__", None) or type(wrapped).__qualname__

    def num_bytes(self, call: Call) -> int:
        """Add up the arrays among the positional arguments."""
        args = call.args
        if len(args) == 1 and type(args[0]) is np.ndarray:
            return args[0].nbytes
        total = 0
        for value in args:
            kind = type(value)
            if kind is np.ndarray:
                total += value.nbytes
            elif kind not in LEAF_TYPES:
                total += sum(map(leaf_bytes, flatten(value)[0]))
        return total

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether functions are the same and arguments have one structure."""
        if call.argument is first.argument and not call.kwargs and not first.kwargs:
            args, first_args = call.args, first.args
            if len(args) == len(first_args) == 1:  # the common case, without a loop
                kind = type(args[0])
                if kind is type(first_args[0]) and kind in _ALWAYS_MERGE:
                    return True
            if len(args) == len(first_args):
                for ours, theirs in zip(args, first_args, strict=False):
                    if type(ours) is not type(theirs) or type(ours) not in _ALWAYS_MERGE:
                        break
                else:
                    return True
        return self.difference(first, call) is None

    def difference(self, first: Call, call: Call) -> str | None:
        """Say how functions or arguments differ."""
        if not same_function(first.argument, call.argument):
            ours, theirs = self.detail(first.argument), self.detail(call.argument)
            return f"merge functions {ours} and {theirs} are different functions"
        if len(first.args) != len(call.args):
            return f"{len(first.args)} and {len(call.args)} positional arguments"
        ours_kw, theirs_kw = first.kwargs or {}, call.kwargs or {}
        if sorted(ours_kw) != sorted(theirs_kw):
            return f"keyword arguments {sorted(ours_kw)} and {sorted(theirs_kw)}"
        pairs = [(f"argument {i}", *pair) for i, pair in
                 enumerate(zip(first.args, call.args, strict=True))]  # fmt: skip
        pairs += [(f"argument {key!r}", ours_kw[key], theirs_kw[key]) for key in ours_kw]
        for name, ours, theirs in pairs:
            difference = argument_difference(ours, theirs, name)
            if difference is not None:
                return difference
        return None

    def signature(self, call: Call) -> str:
        """Name the function; describe structures and constants."""
        return f"{function_text(call.argument)}{arguments_text(call.args, call.kwargs)}"

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Run the merge function once on every worker, over the values of its own replicas."""
        await turn.exchange(b"", no_data)
        with turn.merging():
            calls[0].context = copy_context()  # the one it had is entered already, by this task
            parts = self.perform(group, calls)
            if type(parts) is Pending:
                return parts.to_parts(calls, await parts.awaitable)
        return parts

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Run the merge function in replica 0's context variables."""
        first = calls[0]
        devices = group.device_names
        kwargs: dict[str, object] = {}
        if group.has_plain_values:
            args = list(first.args)
            kwargs = first.kwargs or {}
        elif len(first.args) == 1 and not first.kwargs:  # the common case
            args = [merged_column([call.args[0] for call in calls], devices)]
        else:
            args = [
                merged_column([call.args[position] for call in calls], devices)
                for position in range(len(first.args))
            ]
            for key in first.kwargs or ():
                kwargs[key] = merged_column([(call.kwargs or {})[key] for call in calls], devices)
        result = first.context.run(_call_in_merge, group, first.argument, args, kwargs)
        kind = type(result)
        if kind is PerReplica:
            parts: Parts = result.values
            if len(parts) == group.num_replicas:
                return parts
        if kind not in LEAF_TYPES and isinstance(result, Awaitable):
            return Pending(result, self._parts)
        return self._parts(calls, result)

    def _parts(self, calls: Sequence[Call], result: object) -> Parts:
        if type(result) in LEAF_TYPES:
            return [result] * len(calls)
        fn = calls[0].argument
        require_finished(result, fn, self.name)
        return split_per_replica(
            result, len(calls), f"the result of merge function {self.detail(fn)}"
        )


@final
class Once(Collective):
    """Does something once for all replicas with the object that all of them bring; each gets None.

    Args:
        name: What users call it.
        act: Does it, in cross-replica context, or returns what to await for that.
        signature: Says what of the object has to be equal on all workers; None if other workers
            have no part in it.
    """

    __slots__ = ("_act", "_signature")

    def __init__(
        self,
        name: str,
        act: Callable[[Any, SyncGroup], Awaitable[None] | None],
        signature: Callable[[Any], str] | None = None,
    ) -> None:
        super().__init__(name)
        self._act = act
        self._signature = signature

    def detail(self, argument: object) -> str:
        """Return nothing: the object is shown where it differs."""
        return ""

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether both bring the same object."""
        return first.argument is call.argument

    def difference(self, first: Call, call: Call) -> str | None:
        """Show both objects if they differ."""
        if first.argument is call.argument:
            return None
        return f"{first.argument!r} here and {call.argument!r} there are two"

    def signature(self, call: Call) -> str:
        """Describe the object."""
        return "" if self._signature is None else self._signature(call.argument)

    def across(
        self, group: SyncGroup, calls: Sequence[Call], turn: Turn
    ) -> Coroutine[object, None, Parts]:
        """Do it on every worker, once all are there."""
        if self._signature is None:
            return super().across(group, calls, turn)
        return self._on_every_worker(group, calls, turn)

    async def _on_every_worker(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        await turn.exchange(b"", no_data)
        parts = self.perform(group, calls)
        return parts.to_parts(calls, await parts.awaitable) if isinstance(parts, Pending) else parts

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Do it."""
        pending = self._act(calls[0].argument, group)
        nothing = [None] * group.num_replicas
        return nothing if pending is None else Pending(pending, lambda *_: nothing)


def _call_in_merge(
    group: SyncGroup, fn: Callable[..., object], args: list[Any], kwargs: dict[str, object]
) -> Any:
    PLACE.set(group.merge_place)
    return fn(group.strategy, *args, **kwargs)


def same_function(first: object, other: object) -> bool:
    """Tell whether two merge functions are the same one.

    Equal objects are, and so are functions with one code object: a lambda or nested `def` is
    made anew on every replica. Partials and bound methods are compared by what they wrap.

    Example:
        >>> make = lambda: lambda strategy, x: x
        >>> same_function(make(), make())
        True
        >>> same_function(min, max)
        False
    """
    if first is other or first == other:
        return True
    first, other = _unwrap(first), _unwrap(other)
    code = getattr(first, "__code__", None)
    if code is not None:
        return code is getattr(other, "__code__", None)
    return bool(first == other)


def _unwrap(fn: object) -> Any:
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn


_ALWAYS_MERGE = LEAF_TYPES - {str, bytes}
MERGE_CALL = MergeCall("merge_call")


@functools.cache
def merge_call_named(name: str) -> Collective:
    """Return the merge collective that tables show under another name."""
    return collective_named(MergeCall, name)


Merge = tuple[Callable[..., Any], tuple[Any, ...]]


def create_variable(initial_value: object, options: dict[str, object]) -> Merge:
    """Return the merge function and arguments that create a variable.

    The options travel too, as text and functions, which have to be equal on all replicas.
    """
    if not callable(initial_value):
        initial_value = np.asarray(initial_value)
    plain = [name for name in sorted(options) if not callable(options[name])]
    functions = {name: option for name, option in options.items() if callable(option)}
    text = ", ".join(f"{name}={options[name]!r}" for name in plain)
    return partial(_create, options), (initial_value, text, functions)


def _create(
    options: dict[str, Any], _strategy: object, initial: object, _text: str, _functions: object
) -> Variable | Awaitable[Variable]:
    first = initial[0] if isinstance(initial, PerReplica) else initial
    if (strategy := PLACE.get().strategy) is not None and strategy.workers is not None:
        return _create_across(options, strategy.workers, first)
    return Variable(first, **options)


async def _create_across(options: dict[str, Any], workers: Any, initial: object) -> Variable:
    """Create a variable on every worker, with the initial value of worker 0."""
    own = np.asarray(initial() if callable(initial) else initial)
    first = VariableAggregation.ONLY_FIRST_REPLICA
    value = await workers.aggregate("initial value", options.get("name"), first, lambda: [own])
    return Variable(value, **options)


def update_variable(
    var: Variable,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, object] | None,
    group: bool,
) -> Merge:
    """Return the merge function and arguments that update a variable's components.

    Raises:
        TypeError: If `var` is not a variable or `fn` not callable.
        ValueError: If `args` is not a tuple or list.
    """
    if not isinstance(var, Variable):
        raise TypeError(f"update needs a variable, got {var!r} ({type(var).__name__}).")
    if not callable(fn):
        raise TypeError(f"update needs a function of (variable, *args), got {fn!r}.")
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"update takes args as a tuple or list, got {args!r}. Write args=(value,) for one."
        )
    merged = var, _told_apart(fn), tuple(args), kwargs or {}, f"group={group}"
    return partial(_update, bool(group), fn), merged


def _told_apart(fn: object) -> object:
    """Return what of a callable is compared between replicas: its function, else its type."""
    wrapped = _unwrap(fn)
    return wrapped if hasattr(wrapped, "__name__") else type(wrapped)


def _update(
    group: bool,
    fn: Callable[..., object],
    _strategy: object,
    var: Variable,
    _told: object,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    _text: str,
) -> Awaitable[object]:
    strategy = PLACE.get().strategy
    assert strategy is not None  # a merge function runs in one
    count = strategy.num_local_replicas
    all_args = split_per_replica(args, count, "args")
    all_kwargs = split_per_replica(kwargs, count, "kwargs")
    return update_components(strategy, var, fn, all_args, all_kwargs, group)
