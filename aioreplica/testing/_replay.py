"""One run: asyncio's own order or a random one, and the schedule of a token again."""

from __future__ import annotations

from typing import Any

from ._execute import Main
from ._explain import STORY_STEPS
from ._faults import Faults
from ._mix import mix
from ._runner import (
    Runner,
    check_integer,
    check_main,
    check_no_loop,
    nondeterminism,
    same_end,
)
from ._sandbox import Sandbox
from ._schedule import Schedule
from ._strategies import FIFO, RANDOM
from ._timeline import text_timeline
from ._token import decode


def run(main: Main, *, seed: int | None = None, schedule: Schedule | None = None) -> Any:
    """Run a program once, deterministically, in virtual time.

    Args:
        main: An async callable without arguments.
        seed: Picks a random schedule; without one asyncio's own order is kept.
        schedule: One drawn from `schedules()`, instead of a seed.

    Returns:
        What `main` returns.

    Raises:
        BaseException: What `main` raises.
        DeadlockError: If nothing can happen any more and it has not ended.
        StarvationError: If it goes on and on.
        LeakError: If it leaves tasks, generators or unretrieved exceptions behind.

    Example:
        >>> import asyncio
        >>> run(lambda: asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """
    check_main(main)
    check_no_loop("art.run")
    if seed is not None and schedule is not None:
        raise ValueError(f"Pass a seed ({seed!r}) or a schedule, not both.")
    if seed is not None:
        check_integer("seed", seed)
        schedule = Schedule(RANDOM, mix(seed, 0))
    elif schedule is None:
        schedule = Schedule(FIFO, mix(0, 0))
    return _run_one(main, schedule)


def replay(main: Main, token: str, *, faults: Faults | None = None) -> Any:
    """Run the schedule of a token again.

    Args:
        main: The program that the token is of, as it was or mended.
        token: From a report.
        faults: The faults of the exploration, needed only where the token has no room for them.

    Returns:
        What `main` returns.

    Raises:
        ValueError: If the token is damaged or of another program; then nothing was run.
        BaseException: What `main` raises, with the story as a note; or as `run`.
    """
    check_main(main)
    schedule = decode(token, main, faults)
    check_no_loop("art.replay")
    return _run_one(main, schedule)


def _run_one(main: Main, schedule: Schedule) -> Any:
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox)
        outcome = runner.run(schedule)
        if not outcome.has_failed:
            return outcome.value
        limit = STORY_STEPS if outcome.kind == "endless" else None
        again, story = runner.tell(schedule, limit)
        if not same_end(outcome, again):
            _, third = runner.tell(schedule, limit)
            raise nondeterminism(story.steps, third.steps) from outcome.error
    error = again.error
    assert error is not None
    error.add_note(text_timeline(story.steps))
    raise error
