"""What exploring found: a report, and the failure in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from ._story import Step
from ._timeline import html_timeline, text_timeline


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """One schedule under which the program fails.

    Attributes:
        error: What it raised, or what was found: `DeadlockError`, `StarvationError`, `LeakError`
            or `NondeterminismError`.
        token: Replays the schedule: `art.replay(main, token)`. Empty if it has too many decisions.
        constraints: What makes it fail, in words; empty if asyncio's own order does, or if no
            constraints were seen to make it fail.
        schedule: Who took each step, by number.
        steps: A failing schedule, step by step: the shrunk one where there is one.
        schedule_number: How many schedules had passed before.
        shrink_runs: How many schedules shrinking took.
    """

    error: BaseException
    token: str
    constraints: tuple[str, ...]
    schedule: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    schedule_number: int = 0
    shrink_runs: int = 0

    @property
    def timeline(self) -> str:
        """The failing schedule as text, one line a step."""
        return text_timeline(self.steps)

    @property
    def story(self) -> str:
        """The error, the constraints, how to replay it, and the timeline."""
        lines = [f"{type(self.error).__name__}: {self.error}"]
        lines += self.summary
        return "\n".join([*lines, "", self.timeline])

    @property
    def summary(self) -> list[str]:
        """The constraints and how to replay, in lines."""
        lines = [f"It fails when {', and '.join(self.constraints)}."] if self.constraints else []
        if not self.token:
            return [*lines, "It has too many decisions for a token; constraints tell it all."]
        lines.append(f"Replay it with art.replay(main, {self.token!r}) or --ar-replay {self.token}")
        return lines

    def save_html(self, path: str | Path) -> Path:
        """Write the timeline as a page, with a lane for each task and device.

        Returns:
            The path of the file.
        """
        target = Path(path)
        text = html_timeline(self.steps, f"{type(self.error).__name__}: {self.error}", self.summary)
        target.write_text(text, encoding="utf-8")
        return target


@final
@dataclass(frozen=True, slots=True)
class Report:
    """What was explored.

    Attributes:
        failed: Whether a schedule failed.
        failure: The first that did, or None.
        schedules_run: How many schedules were run, without those of shrinking.
        complete: Whether every schedule was run that there is, within the bound; always False
            after sampling, and after a failure.
        schedules_per_second: How fast that went.
        seed: The seed of the exploration.
        strategy: How schedules were made.
        fidelity: What they varied.
        warnings: What did not fail but could: orders of collectives that only chance kept.
    """

    failed: bool
    failure: Failure | None
    schedules_run: int
    complete: bool
    schedules_per_second: float
    seed: int = 0
    strategy: str = "portfolio"
    fidelity: str = "reorder"
    warnings: tuple[str, ...] = ()

    def check(self) -> Report:
        """Raise the failure with its story; return the report itself if there is none.

        Raises:
            BaseException: The error of the failure, with the constraints, the token and the
                timeline as notes.
        """
        if self.failure is not None:
            raise with_story(self.failure)
        return self

    def __repr__(self) -> str:
        if self.failure is not None:
            end = f"failed: {type(self.failure.error).__name__}, token {self.failure.token}"
        else:
            end = "complete" if self.complete else "no failure"
        return f"<Report {self.strategy} | {self.schedules_run} schedules, {end}>"


def with_story(failure: Failure) -> BaseException:
    """Return the error of a failure, with its story as a note (once)."""
    error = failure.error
    note = "\n".join([*failure.summary, "", failure.timeline])
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
