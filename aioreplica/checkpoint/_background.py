"""The save of a manager that training goes on beside, and whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import final

from ..devices import OwnedTask, require_loop
from ..errors import CheckpointNotCommittedError, CheckpointUncertainError
from ._lane import Pace
from ._storage import Storage


@final
class Background:
    """Turns of the saves of one manager, of which one at a time may go on in the background.

    Args:
        storage: Where to; named in errors.

    Attributes:
        turn: Held by the save that is going on.
        failure: What went wrong in the background, until somebody is told.
    """

    def __init__(self, storage: Storage) -> None:
        self.turn = asyncio.Lock()
        self.failure: Exception | None = None
        self._storage = storage
        self._task: OwnedTask[None] | None = None
        self._unbegun: int | None = None  # the step of the task, until that has begun
        self._pace: Pace | None = None  # of the task
        self._waiting: set[object] = set()  # a mark for each call that waits; of one loop

    @contextmanager
    def waited_for(self, owner: object) -> Iterator[None]:
        """Let saves make no pauses while a block waits, those that begin meanwhile too.

        A save whose event loop was closed is given up first.

        Raises:
            LoopMismatchError: If its event loop is another one, and not closed; names the owner.
        """
        if self._unbegun is not None:
            self._end_unbegun()
        if self._task is not None and not self._task.is_done:
            loop = self._task.task.get_loop()
            if not loop.is_closed():
                require_loop(loop, owner)
                if self._pace is not None:
                    self._pace.hurry()
            else:
                self._task, self.turn, self._waiting = None, asyncio.Lock(), set()
                if self._pace is not None:
                    self._pace.give_lane_back()
                self.failure = CheckpointUncertainError(
                    f"A step may not have been saved in {self._storage}: the event loop of its "
                    "save was closed before it had ended. Leave `async with manager` before."
                )
        waiting, mark = self._waiting, object()
        waiting.add(mark)
        try:
            yield
        finally:
            waiting.remove(mark)

    def start(self, write: Callable[[], Awaitable[None]], step: int, pace: Pace | None) -> None:
        """Write in the background, by who has the turn: it is given back at the end."""
        if pace is not None and self._waiting:
            pace.hurry()
        self._pace = pace
        self._unbegun = step
        self._task = OwnedTask(self._write(write, step, pace), f"checkpoint {step}")
        self._task.when_done(lambda _error: self._end_unbegun())

    def _end_unbegun(self) -> None:
        """End the save for a task that was cancelled before it had begun, and could not do it."""
        step, task = self._unbegun, self._task
        if step is not None and task is not None and task.is_done:
            self._unbegun, self.failure = None, self._cancelled_error(step)
            self.turn.release()

    def _cancelled_error(self, step: int) -> CheckpointNotCommittedError:
        return CheckpointNotCommittedError(
            f"Step {step} was not saved in {self._storage}: its task was cancelled."
        )

    async def _write(
        self, write: Callable[[], Awaitable[None]], step: int, pace: Pace | None
    ) -> None:
        turn = self.turn  # another one, once the loop was closed
        self._unbegun = None
        try:
            if pace is not None:
                pace.take_lane()
            await write()
        except asyncio.CancelledError:
            self.failure = self._cancelled_error(step)
            raise
        except Exception as error:  # noqa: BLE001 - raised at the next await of the manager
            self.failure = error
        finally:
            if pace is not None:
                pace.give_lane_back()
            turn.release()

    async def wait(self, owner: object) -> None:
        """Wait for the save in the background, if there is one; see `waited_for`."""
        with self.waited_for(owner):
            await self.wait_beside()

    async def wait_beside(self) -> None:
        """Wait for the save in the background, if there is one, and let it make its pauses."""
        while self._task is not None and not self._task.is_done:
            await self._task.done_or_cancelled()

    async def end(self) -> None:
        """Wait for it, and go on with it when cancelled; for a block of `waited_for`."""
        if self._task is not None:
            await self._task.ended(through_interrupt=True)

    def raise_failure(self) -> None:
        """Raise what went wrong in the background, once."""
        self._end_unbegun()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def tell(self, error: BaseException) -> None:
        """Note that somebody is told of an error."""
        if error is self.failure:
            self.failure = None
