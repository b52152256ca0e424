"""Saving when a program is told to stop: between two steps, never in the middle of one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from ..devices import OwnedTask
from ..errors import CheckpointNotCommittedError
from ..values import between_steps
from ._state import Cut, look, read_state

T = TypeVar("T")

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""


async def run_and_save(
    work: Coroutine[Any, Any, T],
    state: Any,
    step: Callable[[], int],
    write: Callable[[int, Cut], Awaitable[None]],
    *,
    grace_s: float,
    exit_on_sigterm: bool,
) -> T:
    """Run `work` to its end; when the caller is cancelled or told to stop, save first.

    `work` is a task of its own, so a cancellation does not reach into a step: it ends, and the next
    one is held back while the state is read. Then `work` is cancelled where it waits.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()

    def wake(_error: BaseException | None = None) -> None:
        if not told.done():
            told.set_result(None)

    training = OwnedTask(work, "training")
    training.when_done(wake)
    if exit_on_sigterm:
        loop.add_signal_handler(signal.SIGTERM, wake)
    stop = partial(_save_and_stop, training, state, step, write, grace_s)
    try:
        try:
            await told
        except asyncio.CancelledError:
            saving = OwnedTask(stop(), "save on cancel")
            await saving.ended()
            await saving  # what went wrong with it
            raise
        if training.is_done:
            return await training
        saving = OwnedTask(stop(), "save on SIGTERM")
        await saving.ended()
        await saving
        raise SystemExit(EXIT_CODE)
    finally:
        if exit_on_sigterm:
            loop.remove_signal_handler(signal.SIGTERM)


async def _save_and_stop(
    training: OwnedTask[Any],
    state: Any,
    step: Callable[[], int],
    write: Callable[[int, Cut], Awaitable[None]],
    grace_s: float,
) -> None:
    number, cut = 0, None
    try:
        async with asyncio.timeout(grace_s), between_steps(read_state(state).gates):
            cut = look(read_state(state))
            cut.check()
            number = step()
            training.cancel()
    except TimeoutError:
        training.cancel()
    await training.ended()
    if cut is None:
        raise CheckpointNotCommittedError(
            f"Nothing was saved: a step did not end within {grace_s} s. Give a longer grace_s."
        )
    await write(number, cut)
