"""Records of a learner: steps, dead letters, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


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
    """One published step of a learner.

    Attributes:
        version: The version that it published.
        first_number: Number of the first example of its batch.
        last_number: Number of the last one.
        num_examples: How many it learned.
        num_dead: How many were set aside since the record before.
        scalars: What the step function returned, averaged over all examples of the batch.
        queue_depth: How many examples were taken and not learned, when it was published.
        began: When it began, in seconds since the epoch; for display only.
        step_s: How long the step took, in seconds, from the first replica's start to the check.
        replicas: One timing per replica.
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
    example: Any
    error: str
    time: float


@final
@dataclass(frozen=True, slots=True)
class LearnerStatistics:
    """Counters of a learner since it was opened, and its state.

    Attributes:
        state: As `OnlineLearner.state`.
        version: The published version.
        num_taken: Examples taken, duplicates left out.
        num_duplicates: Examples whose idempotency key was known.
        num_refused: Examples not taken: the queue was full, or the journal could not keep them.
        num_learned: Examples learned.
        num_dead: Examples set aside, also those that were taken back.
        num_steps: Steps published.
        num_rollbacks: Steps rolled back, because they raised or wrote what is not finite.
        queue_depth: Examples taken and not learned; those of a backlog are not counted.
        queue_size: How many there may be.
        backlog: Journalled examples of earlier learners that are not learned yet.
        last_number: Number of the last example taken.
        learned_number: Every example up to this number was learned or set aside.
        step_s: How long steps took, all together, in seconds.
        num_commits: Transactions of the journal that took examples.
        commit_s: How long these took, all together, in seconds.
        journal_error: Why the journal takes nothing now; "" if it does.
        checkpoint_number: The `learned_number` of the newest checkpoint, None without one.
        num_checkpoints: Checkpoints saved.
        checkpoint_error: Why the last checkpoint failed; "" if it did not.
        publish_error: Why the last snapshot could not be written for other processes; "" if it was.
        failure: Why the state is "failed"; "" if it is not.
        step_running_s: Seconds since the step under way has begun; 0 if there is none.
        num_retries: Times that a step failed for a reason of `retry_on`.
        retry_error: Why the state is "retrying"; "" if it is not.
    """

    state: str
    version: int
    num_taken: int
    num_duplicates: int
    num_refused: int
    num_learned: int
    num_dead: int
    num_steps: int
    num_rollbacks: int
    queue_depth: int
    queue_size: int
    backlog: int
    last_number: int
    learned_number: int
    step_s: float
    num_commits: int
    commit_s: float
    journal_error: str
    checkpoint_number: int | None
    num_checkpoints: int
    checkpoint_error: str
    publish_error: str
    failure: str
    step_running_s: float
    num_retries: int
    retry_error: str
