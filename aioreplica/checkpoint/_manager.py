"""The checkpoint manager: saves a state as steps of a directory, and restores it from there."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial as bound
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

from .._functions import is_async, require_no_yield
from ..errors import CheckpointError
from ..telemetry import Observers
from ._background import Background
from ._chief import (
    agree_on_failure,
    agree_on_restored,
    is_first,
    take_common_cut,
    workers_of_state,
    write_nothing,
    write_once,
    write_together,
)
from ._claims import read_listing
from ._description import StepDescription, description_of
from ._fsspec import storage_of
from ._lane import Pace, Stop, run_all
from ._parts import read_entry
from ._preemption import require_whole, run_and_save
from ._reading import (
    find_steps,
    look_at,
    newest_whole,
    no_step_error,
    verify_step,
    with_sizes,
)
from ._restoring import Restored, restore_step
from ._retry import RetriedStorage, as_retry, new_stop
from ._state import Cut, read_state, require_outside_steps
from ._statistics import CheckpointStatistics, Counters
from ._storage import LocalStorage, Storage
from ._writer import Saving, Writer
from ._writing import not_committed, pin_step, unpin_step, write_cut

if TYPE_CHECKING:
    from ..cluster import Workers

T = TypeVar("T")


def _warn_of_failure(manager: object) -> None:
    """Warn of a save in the background that went wrong and was not waited for."""
    saves = getattr(manager, "_saves", None)  # a constructor may have raised
    if saves is not None and saves.failure is not None:
        warnings.warn(
            f"{saves.failure} Nobody waited for that save: leave `async with manager` before the "
            "event loop ends.",
            RuntimeWarning,
            stacklevel=2,
        )


@final
class CheckpointManager:
    """Saves a state as numbered steps in a directory, and restores it from there.

    A state is a dict or list, nested as you like, of variables, optimizers, metrics, distributed
    datasets, accumulators, random generators, arrays, plain data and objects with `state_dict` and
    `load_state_dict`. A save is a cut between steps: it waits for the steps under way of the
    strategies whose variables are in the state, and holds new ones back while it reads. It reads
    references only, so that takes microseconds; then training goes on while files are written.

    Either all of a step is saved or nothing. A step whose files are damaged is found by its
    checksums; `restore` then takes the newest good one and warns. A step that cannot be read is an
    error.

    Use it in `async with`, which waits for a save in the background at the end. One manager at a
    time saves into a directory; any number may read.

    Args:
        directory: A folder, made at the first save; a URL that fsspec knows; or a `Storage`.
        max_to_keep: How many of the newest steps are kept; None keeps all.
        keep_every: Steps that this number divides are kept for good.
        retry: For so many seconds a failed call of the storage is made again, unless its error is
            an answer; or a function that is told the error, the number of tries and the seconds
            since the first, and returns a pause in seconds, or None to give up. None makes none
            again; `steps`, `latest`, `pinned` and `describe`, which block, never do.

    Raises:
        ValueError: If a number is below 1, or one of seconds not above 0.
        TypeError: If one is not an int, `directory` is neither a path nor a storage, or `retry`
            neither a number nor a plain function.

    Example:
        >>> import asyncio, tempfile
        >>> from aioreplica import Variable
        >>> async def main(directory):
        ...     w = Variable([1.0, 2.0])
        ...     state = {"model": [w], "epoch": 3}
        ...     async with CheckpointManager(directory) as manager:
        ...         await manager.save(10, state)
        ...         await w.assign([0.0, 0.0])
        ...         state["epoch"] = 0
        ...         return await manager.restore(state), w.value, state["epoch"]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     asyncio.run(main(directory))
        (10, array([1., 2.]), 3)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        max_to_keep: int | None = 3,
        keep_every: int | None = None,
        retry: float | Callable[[OSError, int, float], float | None] | None = None,
    ) -> None:
        self._storage = storage_of(directory)
        self._retry = as_retry(retry)
        self._counters = Counters()
        self._writer = Writer(
            self._storage,
            _checked_count("max_to_keep", max_to_keep),
            _checked_count("keep_every", keep_every),
        )
        self._saves = Background(self._storage)
        self._restored: Restored | None = None

    # ---- saving --------------------------------------------------------------------------

    async def save(self, step: int, state: object, *, wait: bool = True) -> None:
        """Save a state as a step; a step of that number is replaced.

        A save that is going on is waited for first, so at most one state is held at a time. All
        workers have to call it. The first one writes, and each its parts of divided variables.

        Args:
            step: Its number.
            state: What to save.
            wait: Whether to wait until it is durable. With False it returns after the cut, and
                files are written in the background; what goes wrong there is raised by the next
                `save`, `restore`, `wait` or `aclose`. Of a state with divided variables the files
                are written before it returns all the same: workers wait for each other then.

        Raises:
            CheckpointNotCommittedError: If the step was not saved: files cannot be written, a
                manifest that is there cannot be read, or another manager saves here.
            CheckpointUncertainError: If it was, but may not survive a crash of the machine; or
                if its manifest cannot be read back, so that this is not known.
            WorkerLostError: If another worker was cancelled in the save, or is gone.
            TypeError: If something in the state cannot be saved.
            ValueError: If `step` is negative, the state no container, or two entries have one name.
            ContextError: If called in a step.

        Cancellation:
            The step is saved or not, never by half; steps that were held back go on.
        """
        number = _checked_step(step)
        require_outside_steps("CheckpointManager.save")
        with self._saves.waited_for(self):
            await self._saves.turn.acquire()
        try:
            cut, workers = await take_common_cut(state, number, self._saves.failure)
            wait = wait or bool(cut.divisions)
            if workers is not None and cut.divisions:
                await self._write(number, cut, workers=workers)
            elif wait:
                await write_once(workers, number, bound(self._write, number, cut))
        except BaseException as error:
            self._saves.tell(error)
            self._saves.turn.release()
            raise
        if wait or not is_first(workers):
            self._saves.turn.release()
        else:
            pace = Pace() if type(self._storage) is LocalStorage else None
            self._saves.start(bound(self._write, number, cut, pace), number, pace)

    async def save_on_cancel(
        self,
        work: Coroutine[object, None, T],
        state: object,
        step: Callable[[], int],
        *,
        grace_s: float = 30.0,
        exit_on_sigterm: bool = False,
    ) -> T:
        """Run a coroutine that trains; if this call is cancelled, save the state before it ends.

        The step under way ends first, and the next one is not begun: no batch is lost. Then
        `work` is cancelled where it waits, and the state of that moment is saved.

        Args:
            work: What trains, such as `train(strategy, state)`.
            state: What to save.
            step: Called when the state is read, gives the number to save it as. Called before the
                work begins, too, to check the number; it may raise then, if there is none yet.
            grace_s: How long the step under way may take to end, in seconds; and `work`, once it is
                cancelled. Then ops that hang are left behind on their threads and their strategies
                are closed, `work` is cancelled once more, and a second later left behind.
            exit_on_sigterm: Whether SIGTERM does the same, and then raises SystemExit(75): the
                code of programs that want to be started again. On the main thread only.

        Returns:
            What `work` returns.

        Raises:
            TypeError: If `step` is not a plain function, or gives no int; `grace_s` has to be a
                number from 0.
            ContextError: If called in a step, or another call waits for SIGTERM already.
            CheckpointError: If the state could not be saved; names the ops that hang. At the call,
                if other workers have parts of it.
            SystemExit: After SIGTERM, once the state is saved.
            Exception: What `work` raises; nothing is saved then, also if it was being stopped.

        Cancellation:
            Saves, then goes on; a second cancellation waits for that, too. Ctrl-C under
            `asyncio.run` is a cancellation: the state is saved, then KeyboardInterrupt raised.
            What goes wrong with the save is raised instead.
        """
        try:
            require_outside_steps("CheckpointManager.save_on_cancel")
            number = _checked_function(step)
            # Of slots, which come with the first step, it is found out at the stop.
            entries = read_state(state).entries.items()
            require_whole({key: entry for key, entry in entries if entry.owner is None})
            write = self._write_in_turn if is_first(workers_of_state(state)) else write_nothing
        except BaseException:  # nothing has begun
            work.close()
            raise
        return await run_and_save(work, state, number, write, grace_s, on_sigterm=exit_on_sigterm)

    async def _write_in_turn(self, step: int, cut: Cut) -> None:
        with self._saves.waited_for(self):
            async with self._saves.turn:
                await self._write(step, cut)

    async def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: What went wrong with it.

        Cancellation:
            Stops waiting; the save goes on.
        """
        await self._saves.wait(self)
        self._saves.raise_failure()

    async def _write(
        self, step: int, cut: Cut, pace: Pace | None = None, workers: Workers | None = None
    ) -> None:
        begun: list[Saving] = []
        num_bytes = 0
        storage = self._storage if self._retry is None else self._retried()

        def begin() -> int:
            try:
                begun.append(self._writer.begin(step, storage))
            except (OSError, MemoryError) as error:
                raise not_committed(self._storage, step, error) from error
            return begun[0].claim.sequence

        def end(stop: Stop, written: int) -> list[str]:
            nonlocal num_bytes
            num_bytes = written
            return self._writer.end(begun[0], stop) if begun else []  # other workers have none

        began_s = monotonic()
        try:
            with (
                nullcontext() if self._retry is None else self._telling_of_retries(storage, "save")
            ):
                left = await (
                    write_cut(storage, step, cut, begin, end, pace)
                    if workers is None
                    else write_together(workers, storage, step, cut, begin, end)
                )
        except BaseException as error:
            self._counters.save_ended(step, began_s, num_bytes, error)
            raise
        self._counters.save_ended(step, began_s, num_bytes, None)
        for text in left:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _retried(self) -> Storage:
        return self._storage if self._retry is None else RetriedStorage(self._storage, self._retry)

    @contextmanager
    def _telling_of_retries(self, storage: Storage, done: str) -> Iterator[None]:
        try:
            yield
        finally:
            if isinstance(storage, RetriedStorage):
                self._counters.num_retried += storage.num_retried
        if isinstance(storage, RetriedStorage) and storage.num_retried:
            warnings.warn(
                f"{storage.num_retried} failed calls of {storage} were made again in a {done}. The "
                f"last error: {storage.last}.",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- restoring -----------------------------------------------------------------------

    async def restore(
        self, state: object, step: int | None = None, *, partial: bool = False
    ) -> int:
        """Put a saved state back into the objects it was taken from, or into others like them.

        The strategy, its kind and its number of replicas may be others. Everything is read and
        checked before anything is changed; then all is changed at once, between two steps.
        Plain data are replaced in the dict or list that holds them. Slots of a fresh optimizer
        take their values when they are made. `restored` says what did not match.

        Args:
            state: What to restore, built as the state that was saved.
            step: Which step; None takes the newest one that is not damaged, and warns of newer
                ones that are.
            partial: Whether to restore what matches, although the state or the checkpoint has more.

        Returns:
            The step that was restored.

        Raises:
            CheckpointError: If there is none, all are damaged, the newest cannot be read, or it
                does not fit the state. Then nothing has changed.
            MergeMismatchError: If workers find different steps. Then nothing has changed.
            TypeError: If something in the state cannot be restored.
            ContextError: If called in a step.

        Cancellation:
            Leaves everything as it was, or restores all.
        """
        number = None if step is None else _checked_step(step)
        require_outside_steps("CheckpointManager.restore")
        await self._saves.wait(self)
        workers = workers_of_state(state)  # what cannot be restored is said first
        try:
            await agree_on_failure(workers, "restore", self._saves.failure)
        except BaseException as error:
            self._saves.tell(error)
            raise
        storage, began_s = self._retried(), monotonic()
        try:
            with self._telling_of_retries(storage, "restore"):
                self._restored = await restore_step(storage, state, number, partial=partial)
            await agree_on_restored(workers, self._restored.step)
        except BaseException as error:
            self._counters.restore_ended(number, began_s, error)
            raise
        self._counters.restore_ended(self._restored.step, began_s, None)
        damaged = self._restored.damaged
        if damaged:
            listed = "; ".join(f"step {one} ({what})" for one, what in damaged)
            warnings.warn(
                f"Restored step {self._restored.step} from {self._storage}, because newer ones are "
                f"damaged: {listed}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._restored.step

    @property
    def restored(self) -> Restored | None:
        """Result of the last `restore`, with all that did not match; None before the first one."""
        return self._restored

    async def read(self, step: int, key: str, slice: Any = None) -> Any:  # noqa: A002
        """Read one entry of a step, or a part of a tensor, without the rest.

        Args:
            step: Which step.
            key: Of the entry, as `describe` lists them: `model/0`.
            slice: The part: integers, slices and `...` as NumPy takes them, such as
                `np.s_[100:200, :, 0]`; None reads all. About 1 MiB more than the part is read, and
                every byte of it is checked.

        Returns:
            A new array; what a reader outside the replicas saw of an on-read variable; or the plain
            data.

        Raises:
            CheckpointError: If there is no such step or entry, it is damaged or cannot be read, or
                it is larger than the memory of this machine.
            IndexError: If an index is out of bounds.
            TypeError: If `slice` is something else, or the entry is plain data and has no parts.

        Cancellation:
            Waits until the thread has stopped.
        """
        storage, number = self._retried(), _checked_step(step)
        stop = new_stop(storage)
        with self._telling_of_retries(storage, "read"):
            [found] = await run_all([bound(read_entry, storage, number, key, slice, stop)], stop)
        return found

    # ---- looking -------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Return the steps that are saved, ascending; reads the directory.

        Raises:
            CheckpointError: If it cannot be read.
        """
        return tuple(find_steps(self._storage))

    def latest(self) -> int | None:
        """Return the step that was saved last, None if there is none.

        Only the disk is asked: the directory is listed once, and the manifest of the newest claim
        is read. One that is damaged is passed over. `verify` reads everything.

        Raises:
            CheckpointError: If the directory or a manifest cannot be read.
        """
        whole, _ = newest_whole(self._storage, {}, with_files=False)
        return None if whole is None else whole.step

    async def pin(self, step: int) -> None:
        """Keep a step until `unpin`, whatever `max_to_keep` says.

        Waits for a save of this manager that is going on. Another one that saves into the directory
        keeps the step from its next save on.

        Raises:
            CheckpointError: If there is no such step, or the pin cannot be written.

        Cancellation:
            The step is pinned or not.
        """
        await self._at_rest(pin_step, _checked_step(step))

    async def unpin(self, step: int) -> None:
        """Let a step go: the next save may remove it. No error if it is not pinned.

        Raises:
            CheckpointError: If the pin cannot be removed.

        Cancellation:
            The step is pinned or not.
        """
        await self._at_rest(unpin_step, _checked_step(step))

    async def _at_rest(self, change: Callable[[Storage, int], None], step: int) -> None:
        storage = self._retried()
        with self._saves.waited_for(self), self._telling_of_retries(storage, "change of pins"):
            async with self._saves.turn:
                await run_all([bound(change, storage, step)], new_stop(storage))

    def pinned(self) -> tuple[int, ...]:
        """Return the steps that are pinned, ascending; reads the directory.

        Raises:
            CheckpointError: If it cannot be read.
        """
        return tuple(sorted(read_listing(self._storage).pins))

    async def verify(self, step: int) -> None:
        """Read every byte of a step and compare all checksums.

        Raises:
            CheckpointError: If there is no such step, or it cannot be read; or naming everything
                that is damaged.

        Cancellation:
            Changes nothing.
        """
        storage, number = self._retried(), _checked_step(step)
        with self._telling_of_retries(storage, "read"):
            await verify_step(storage, number)

    def describe(self, step: int) -> StepDescription:
        """Return what a step holds; reads its manifest, and the lengths of its files.

        Raises:
            CheckpointError: If there is no such step, or its manifest is damaged or cannot be read.
        """
        number = _checked_step(step)
        found = with_sizes(self._storage, look_at(self._storage, number))
        if not found.is_saved:
            raise no_step_error(self._storage, number)
        if found.manifest is None:
            raise CheckpointError(f"Step {number} in {self._storage} is damaged: {found.damage}.")
        return description_of(found.manifest, found.damage)

    def statistics(self) -> CheckpointStatistics:
        """Return what the manager has done."""
        return self._counters.statistics(is_saving=self._saves.turn.locked())

    @property
    def observers(self) -> Observers:
        """Observers that are told of each save and restore."""
        return self._counters.observers

    def __repr__(self) -> str:
        state = "saving" if self._saves.turn.locked() else "idle"
        return f"<CheckpointManager {self._storage} | {self._counters.num_saved} saved, {state}>"

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Wait for the save in the background and let the directory go. Idempotent.

        Raises:
            CheckpointError: What went wrong with the save.
            LoopMismatchError: If a save goes on in another event loop, which keeps the directory.

        Cancellation:
            Raised again once the save has ended.
        """
        with self._saves.waited_for(self):  # on another loop its save goes on, with its lock
            try:
                await self._saves.end()
            finally:
                self._writer.close()
                self._saves.raise_failure()  # of more weight than a cancellation

    __del__ = _warn_of_failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"A save in the background had failed too: {failure}")


async def wait_beside(manager: CheckpointManager) -> None:
    """Wait as `CheckpointManager.wait` does, but in the background, too: the save has its pauses.

    What waits for what waits here has to say so, by `waited_for`.
    """
    await manager._saves.wait_beside()
    manager._saves.raise_failure()


def waited_for(manager: CheckpointManager) -> AbstractContextManager[None]:
    """Let saves of a manager make no pauses in a block, those that begin meanwhile too."""
    return manager._saves.waited_for(manager)


def _checked_function(step: Callable[[], int]) -> Callable[[], int]:
    """Return what gives the checked number of a step: found out later, nothing could be saved."""
    if not callable(step) or is_async(step):
        raise TypeError(f"save_on_cancel needs a plain function as step, got {step!r}.")
    require_no_yield(step, "save_on_cancel", "Return the number of the step.")
    try:
        number = step()
    except Exception:  # noqa: BLE001 - there may be none before the work has begun
        number = 0
    _checked_step(number)
    return lambda: _checked_step(step())


def _checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, got {step!r}.") from None
    if not 0 <= number < 10**18 or isinstance(step, bool):
        raise ValueError(f"step must be between 0 and 10**18, got {step!r}.")
    return number


def _checked_count(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or None, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return value
