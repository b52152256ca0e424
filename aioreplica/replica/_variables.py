"""Merge functions of `ctx.variable` and `ctx.update`: what happens to variables once for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..context import PLACE
from ..typing import VariableAggregation
from ..values import PerReplica, Variable, split_per_replica, update_components

Merge = tuple[Callable[..., Any], tuple[Any, ...]]


def create_variable(initial_value: object, options: dict[str, Any]) -> Merge:
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
    value = await workers.aggregate("initial value", options.get("name"), first, [own])
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
    return partial(_update, bool(group)), (var, fn, tuple(args), kwargs or {}, f"group={group}")


def _update(
    group: bool,
    _strategy: object,
    var: Variable,
    fn: Callable[..., object],
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
