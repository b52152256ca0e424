"""Statistics of a learner: what it has done since it was opened, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ._sources import SourceStatistics

if TYPE_CHECKING:
    from ._engine import Engine


@final
@dataclass(frozen=True, slots=True)
class LearnerStatistics:
    """Counters of a learner since it was opened, and its state.

    Attributes:
        state: As `OnlineLearner.state`.
        version: The version that is served.
        num_taken: Examples taken, duplicates left out.
        num_duplicates: Examples whose idempotency key was known.
        num_refused: Examples not taken: the queue was full, or the journal could not keep them.
        sources: Counters of each source, by name.
        num_expected: Inputs kept until their labels come.
        num_labelled: Examples made of these and their labels.
        num_unknown_labels: Labels without an input that waits for them.
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
        num_commits: Transactions of the journal that took examples, or inputs that wait for labels.
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
        newest_version: The version after the last step that was kept: the published one, unless
            that is held back or another is pinned.
        held: Why `publish_if` holds the newest version back; "" if it does not.
        is_pinned: Whether the published version is pinned.
        generation: How many rollbacks there were, ever.
        rollback_from: The smallest number that a rollback can go back to; None if there is none.
        figures: Those of `Prequential`, by name; empty without one.
        num_judged: How many examples were predicted before they were learned, ever.
        num_drifts: How many drifts were found, ever.
        drift_number: The example at which the last one was found; 0 if none was.
        figures_error: Why the last batch has no figures; "" if it has.
        model: Which one it is.
        champion: Which one is served.
        lag: How many examples were taken that it has not learned, and reads from the journal.
        began: How it began, if it was late: from the champion's checkpoint, or not, and why.
        detached: Why it learns nothing any more; "" if it does.
        challengers: Statistics of the other models, by name.
        not_open: Why others are not open, by name.
    """

    state: str
    version: int
    num_taken: int
    num_duplicates: int
    num_refused: int
    sources: Mapping[str, SourceStatistics]
    num_expected: int
    num_labelled: int
    num_unknown_labels: int
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
    newest_version: int
    held: str
    is_pinned: bool
    generation: int
    rollback_from: int | None
    figures: Mapping[str, float]
    num_judged: int
    num_drifts: int
    drift_number: int
    figures_error: str
    model: str
    champion: str
    lag: int
    began: str
    detached: str
    challengers: Mapping[str, LearnerStatistics]
    not_open: Mapping[str, str]


def statistics_of(engine: Engine) -> LearnerStatistics:
    """See `OnlineLearner.statistics`."""
    intake, saving, judge = engine.intake, engine.saving, engine.prequential
    models = engine.models
    return LearnerStatistics(
        state=engine.state,
        version=engine.served.serving.served.version,
        num_taken=intake.num_taken,
        num_duplicates=intake.num_duplicates,
        num_refused=intake.num_refused,
        sources={each.name: each.statistics() for each in engine.followers},
        num_expected=intake.num_expected,
        num_labelled=intake.num_labelled,
        num_unknown_labels=intake.num_unknown_labels,
        num_learned=engine.learning.num_learned,
        num_dead=engine.dead.num_added,
        num_steps=engine.learning.num_steps,
        num_rollbacks=engine.learning.num_rollbacks,
        queue_depth=engine.owner.intake.depth,
        queue_size=engine.owner.settings.queue_size,
        backlog=max(0, engine.backlog_end - engine.learning.learned_number),
        last_number=engine.owner.intake.last_number,
        learned_number=engine.learning.learned_number,
        step_s=engine.learning.step_s,
        num_commits=intake.num_commits,
        commit_s=intake.commit_s,
        journal_error=intake.journal_error,
        checkpoint_number=saving.saved_number,
        num_checkpoints=saving.num_saved,
        checkpoint_error=saving.error,
        publish_error=engine.publishing.error,
        failure=engine.why_failed,
        step_running_s=engine.learning.under_way.running_s,
        num_retries=engine.learning.num_retries,
        retry_error=engine.learning.retry_error,
        newest_version=engine.version,
        held=engine.serving.held,
        is_pinned=engine.serving.is_pinned,
        generation=saving.generation,
        rollback_from=saving.rollback_from,
        figures={} if judge is None else judge.figures,
        num_judged=0 if judge is None else judge.num_judged,
        num_drifts=0 if judge is None else judge.num_drifts,
        drift_number=0 if judge is None else judge.drift_number,
        figures_error="" if judge is None else judge.failure,
        model=engine.model,
        champion=models.champion_name,
        lag=max(0, engine.read_end - engine.learning.learned_number),
        began=engine.began,
        detached=engine.detached,
        challengers={
            name: statistics_of(each)
            for name, each in models.engines.items()
            if engine.is_owner and each is not engine
        },
        not_open=dict(models.problems) if engine.is_owner else {},
    )
