"""Settings of a learner: its arguments, checked."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from .._functions import refuse_context_passed, require_no_yield
from ..checkpoint import CheckpointManager
from ..optimizers import Optimizer
from ..replica import ReplicaContext
from ..strategies import Strategy
from ..tree import leaves
from ._journal import Journal, checked_count
from ._prequential import Prequential
from ._serving import GateFunction
from ._sources import Source

StepFunction = Callable[[ReplicaContext, Any], Awaitable[Any] | Any]
Validation = Callable[[Any], Any]


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a learner that stay as they are, see `OnlineLearner`."""

    strategy: Strategy
    variables: Any
    max_batch: int
    max_delay_s: float
    queue_size: int
    journal: Journal | None
    checkpoints: CheckpointManager | None
    checkpoint_every_s: float
    publish_to: Path | None
    max_failures_in_a_row: int | None
    retry_on: tuple[type[Exception], ...]
    step_timeout_s: float | None
    grace_s: float | None
    step_check: GateFunction | None
    publish_if: GateFunction | None
    prequential: Prequential | None
    validate: Validation | None
    sources: Mapping[str, Source]


def check(
    strategy: Any, checkpoints: object, validate: object, step_check: object, publish_if: object
) -> None:
    """Check the arguments that are objects."""
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be an ar.Strategy, got {strategy!r}.")
    workers = strategy._runtime.workers
    if workers is not None and workers.has_others:
        raise ValueError(
            f"An OnlineLearner learns in one process, and {strategy!r} has several workers, each "
            "of which would take examples of its own. Use MirroredStrategy."
        )
    if checkpoints is not None and not isinstance(checkpoints, CheckpointManager):
        raise TypeError(f"checkpoints must be an ar.CheckpointManager, got {checkpoints!r}.")
    called = {"validate": validate, "step_check": step_check, "publish_if": publish_if}
    for name, function in called.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {function!r}.")
        require_no_yield(function, "OnlineLearner")
    if publish_if is step_check is not None:
        raise ValueError("step_check and publish_if are one object. Give each one of its own.")


def checked_or_none(name: str, value: Any) -> int | None:
    return None if value is None else checked_count(name, value)


def checked_errors(value: Any) -> tuple[type[Exception], ...]:
    kinds = value if isinstance(value, tuple) else (value,)
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise TypeError(
                f"retry_on must be a class of exceptions or a tuple of them, got {value!r}."
            )
    return kinds


def journal_of(given: object) -> Journal | None:
    if isinstance(given, (str, os.PathLike)):
        return Journal(given)
    if given is not None and not isinstance(given, Journal):
        raise TypeError(f"journal must be a path or an ar.online.Journal, got {given!r}.")
    return given


def checked_step_fn(value: Any) -> StepFunction:
    if not callable(value):
        raise TypeError(f"step_fn must be a function of ctx and a batch, got {value!r}.")
    refuse_context_passed(value, "OnlineLearner")
    require_no_yield(value, "OnlineLearner")
    return value  # type: ignore[no-any-return]  # callable; what it takes is seen when it runs


def optimizers_of(variables: object) -> list[Optimizer]:
    """Return all optimizers of a state; ValueError if there is none."""
    found = [each for each in leaves(variables) if isinstance(each, Optimizer)]
    if not found:
        raise ValueError(
            "There is no optimizer in `variables`, so no learning rate. Put it there: it belongs "
            "to what a step changes."
        )
    return found
