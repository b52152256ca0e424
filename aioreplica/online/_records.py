"""Records of a learner: steps and dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ..tree import Tree


@final
@dataclass(frozen=True, slots=True)
class ReplicaTiming:
    """Times at which one replica ran its part of a step.

    Attributes:
        replica_id: Which one.
        device: The name of its device, "-" if it has none.
        num_examples: How many examples its part had.
        began_s: Seconds from the begin of the step to that of the replica's step function.
        ended_s: Seconds from the begin of the step to its end.
    """

    replica_id: int
    device: str
    num_examples: int
    began_s: float
    ended_s: float


@final
@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a learner that was kept.

    Attributes:
        version: The version that it made.
        first_number: Number of the first example of its batch.
        last_number: Number of the last one.
        num_examples: How many it learned.
        num_dead: How many were set aside since the record before.
        scalars: What the step function returned, averaged over all examples of the batch.
        queue_depth: How many examples were taken and not learned, when it was published.
        began: When it began, in seconds since the epoch; for display only.
        step_s: How long the step took, in seconds, from the first replica's start to the check.
        replicas: One timing per replica.
        held: Why `publish_if` holds the version back; "" if it does not.
        drifts: Numbers of examples at which `Prequential` has found a drift.
    """

    version: int
    first_number: int
    last_number: int
    num_examples: int
    num_dead: int
    scalars: Mapping[str, float]
    queue_depth: int
    began: float
    step_s: float
    replicas: tuple[ReplicaTiming, ...]
    held: str = ""
    drifts: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An example that was set aside.

    Attributes:
        number: Its number.
        example: The example, as it was taken.
        error: Class and message of what it raised; written by whoever wrote the step function or
            sent the example, so escape it where it is shown.
        time: When it was set aside, in seconds since the epoch; for display only.
    """

    number: int
    example: Tree
    error: str
    time: float
