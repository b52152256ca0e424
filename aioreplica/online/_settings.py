"""Settings of a learner: its arguments, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from .._functions import refuse_context_passed, require_no_yield
from ..checkpoint import CheckpointManager, Savepoint
from ..optimizers import Optimizer
from ..replica import ReplicaContext
from ..strategies import Strategy
from ..tree import Tree, leaves
from ..values import Variable
from ._journal import Journal, checked_count, checked_seconds
from ._journal_format import MAIN
from ._migration import Migration, Schema
from ._prequential import Prequential
from ._serving import GateFunction, StepLimits
from ._sources import Source, checked_sources

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,48}[A-Za-z0-9])?")
"""Names of challengers, which are labels of metrics and parts of requests."""

StepFunction = Callable[[ReplicaContext, Tree], object]
Validation = Callable[[Tree], Tree]


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
    challengers: Mapping[str, Challenger]
    max_lag: int
    schema: Schema


class Challenger(Protocol):
    """A learner that another one opens."""

    @property
    def _settings(self) -> Settings: ...

    async def _open_as(self, model: str, owner: Any) -> Any: ...  # Any: engines, which import this


def settings_of(
    strategy: Strategy,
    variables: object,
    max_batch: int,
    max_delay_s: float,
    queue_size: int,
    journal: Journal | str | os.PathLike[str] | None,
    checkpoints: CheckpointManager | None,
    checkpoint_every_s: float,
    validate: Validation | None,
    publish_to: str | os.PathLike[str] | None,
    max_failures_in_a_row: int | None,
    retry_on: type[Exception] | tuple[type[Exception], ...],
    step_timeout_s: float | None,
    grace_s: float | None,
    step_check: GateFunction | None,
    publish_if: GateFunction | None,
    prequential: Prequential | None,
    sources: Mapping[str, Source] | None,
    challengers: Mapping[str, Challenger] | None,
    max_lag: int,
    spec_version: int,
    migrate: Mapping[int, Migration] | None,
) -> Settings:
    """Check the arguments of an `OnlineLearner`; raises what that raises."""
    check(strategy, checkpoints, validate, step_check, publish_if, prequential)
    Savepoint(variables)  # says what cannot be undone or saved
    settings = Settings(
        strategy,
        variables,
        checked_count("max_batch", max_batch),
        checked_seconds("max_delay_s", max_delay_s),
        checked_count("queue_size", queue_size),
        journal_of(journal),
        checkpoints,
        checked_seconds("checkpoint_every_s", checkpoint_every_s),
        None if publish_to is None else Path(publish_to),
        checked_or_none("max_failures_in_a_row", max_failures_in_a_row),
        checked_errors(retry_on),
        None if step_timeout_s is None else checked_seconds("step_timeout_s", step_timeout_s),
        None if grace_s is None else checked_seconds("grace_s", grace_s),
        step_check,
        publish_if,
        prequential,
        validate,
        checked_sources({} if sources is None else sources, journal is not None),
        {} if challengers is None else dict(challengers),
        checked_count("max_lag", max_lag),
        Schema(spec_version, migrate, validate, variables),
    )
    check_challengers(settings)
    return settings


def check(
    strategy: object,
    checkpoints: object,
    validate: object,
    step_check: object,
    publish_if: object,
    prequential: object,
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
    if prequential is not None and not isinstance(prequential, Prequential):
        raise TypeError(f"prequential must be an ar.online.Prequential, got {prequential!r}.")
    called = {"validate": validate, "step_check": step_check, "publish_if": publish_if}
    for name, function in called.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {function!r}.")
        require_no_yield(function, "OnlineLearner")
    if publish_if is step_check is not None:
        raise ValueError("step_check and publish_if are one object. Give each one of its own.")


def checked_or_none(name: str, value: object) -> int | None:
    return None if value is None else checked_count(name, value)


def checked_errors(value: object) -> tuple[type[Exception], ...]:
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


def checked_step_fn(value: object) -> StepFunction:
    if not callable(value):
        raise TypeError(f"step_fn must be a function of ctx and a batch, got {value!r}.")
    refuse_context_passed(value, "OnlineLearner")
    require_no_yield(value, "OnlineLearner")
    return value  # callable; what it takes is seen when it runs


def optimizers_of(variables: object) -> list[Optimizer]:
    """Return all optimizers of a state; ValueError if there is none."""
    found = [each for each in leaves(variables) if isinstance(each, Optimizer)]
    if not found:
        raise ValueError(
            "There is no optimizer in `variables`, so no learning rate. Put it there: it belongs "
            "to what a step changes."
        )
    return found


def check_challengers(settings: Settings) -> None:
    """Check that a learner's challengers have nothing in common with it or with each other.

    Raises:
        TypeError: If one is no learner.
        ValueError: If one has what it must not have, or lacks what it needs.
    """
    if not settings.challengers:
        return
    if settings.journal is None or settings.checkpoints is None:
        raise ValueError("challengers need a journal and checkpoints. Pass both.")
    seen = _holdings(settings)
    for name, learner in settings.challengers.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)) or name == MAIN:
            raise ValueError(
                "Names of challengers are 1 to 50 letters, digits, and ._- between them, and "
                f"{MAIN!r} is that of the first model; got {name!r}."
            )
        own: Settings | None = getattr(learner, "_settings", None)
        if not isinstance(own, Settings):
            raise TypeError(f"Challenger {name!r} must be an OnlineLearner, got {learner!r}.")
        extra = {"journal": own.journal, "sources": own.sources, "publish_to": own.publish_to}
        given = [what for what, value in {**extra, "challengers": own.challengers}.items() if value]
        if given:
            raise ValueError(
                f"Challenger {name!r} has {' and '.join(given)}, which the learner has that it "
                "challenges."
            )
        if own.checkpoints is None:
            raise ValueError(f"Challenger {name!r} needs checkpoints in a folder of its own.")
        own.schema.check_beside(settings.schema, f"Challenger {name!r}")
        for key, what in _holdings(own).items():
            if key in seen:
                raise ValueError(
                    f"Challenger {name!r} has a {what} in common with another model. Give each "
                    "model a strategy, variables, checkpoints and figures of its own."
                )
            seen[key] = what


def _holdings(settings: Settings) -> dict[object, str]:
    """Return what no other model may have, and what it is."""
    found: dict[object, str] = {id(settings.strategy): "strategy"}
    if settings.checkpoints is not None:
        found[os.path.realpath(str(settings.checkpoints._storage))] = "folder of checkpoints"
    if settings.prequential is not None:
        found[id(settings.prequential)] = "Prequential"
    for gate in filter(None, (settings.step_check, settings.publish_if)):
        if isinstance(gate, StepLimits):
            found[id(gate)] = "StepLimits"
    for leaf in leaves(settings.variables):
        if isinstance(leaf, (Variable, Optimizer)):
            found[id(leaf)] = "variable or optimizer"
    return found
