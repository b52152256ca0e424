"""A dataset whose batches come split over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any, Self, final

from ..context import PLACE
from ..errors import ContextError
from ..tree import Tree, unflatten
from ..values import StepGate
from ._batches import BatchReader, spec_of
from ._epoch import Epoch, GoOn, OpenLoops
from ._options import count_or_none
from ._source import VERSION, Item, Source, Start

NUMBERS = ("version", "epoch", "position", "pipelines", "fingerprint")


@final
@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Position and counters of a distributed dataset.

    Attributes:
        state: "new", "open" (a loop goes on), "idle" (between loops) or "closed".
        epoch: The epoch that the newest batch was of, or the next one if that is over.
        position: The source's offset behind the newest batch: examples or items.
        num_delivered: Batches given to loops so far.
    """

    state: str
    epoch: int
    position: int
    num_delivered: int


@final
class DistributedDataset:
    """An async iterator of PerReplica batches; each loop over it is the next epoch.

    Made by `strategy.distribute_dataset` and `strategy.distribute_datasets_from_function`. Use it
    in `async with`: leaving closes the source, whether a loop has ended, was broken off, failed or
    was cancelled.

    One loop at a time: a second one ends the first, and begins the next epoch. A source that
    cannot be read twice says so.

    Cancellation:
        A loop that is cancelled while it waits has lost no batch: `anext` on the same iterator
        goes on with the next one.
    """

    def __init__(
        self,
        source: Source,
        known_spec: Callable[[], object],
        open_loops: OpenLoops,
        on_begin: Callable[[], object],
        num_pipelines: int,
        num_replicas: Callable[[], int],
        gate: StepGate,
        go_on: GoOn | None = None,
        worker: int | None = None,
    ) -> None:
        self.gate = gate  # of the steps that its batches are for
        self._source = source  # of batches of distributed values
        self._known_spec = known_spec
        self._open_loops = open_loops
        self._on_begin = on_begin
        self._num_pipelines = num_pipelines
        self._num_replicas = num_replicas
        self._go_on = go_on
        self._worker = worker  # of several that each read a dataset of their own; else None
        self._place = Start()  # behind the newest batch delivered
        self._next_start = Start()  # of the next loop
        self._newest: Epoch | None = None
        self._placed: Epoch | None = None  # the newest, unless a state was loaded since
        self._own_iterator: DistributedIterator | None = None  # of `anext` on the dataset itself
        self._fingerprints: tuple[int, int] | None = None
        self._num_delivered = 0
        self._is_entered = False
        self._is_closed = False

    # ---- iterating -----------------------------------------------------------------------

    def __aiter__(self) -> DistributedIterator:
        if self._is_closed:
            raise self._closed_error()
        return DistributedIterator(self)

    async def __anext__(self) -> Tree:
        """Return the next batch of a loop that the dataset itself keeps; at its end, begin anew.

        An `async for` begins a loop of its own, and so ends this one.

        Raises:
            StopAsyncIteration: At the end of each epoch.
            Exception: As for `DistributedIterator`.
        """
        if self._own_iterator is None:
            self._own_iterator = aiter(self)
        iterator = self._own_iterator
        try:
            return await anext(iterator)
        finally:
            if not iterator.is_going_on and iterator is self._own_iterator:
                self._own_iterator = None

    async def begin_epoch(self) -> Epoch:
        """Begin the next epoch, for an iterator; the loop before it is ended.

        Raises:
            ContextError: If the dataset is closed, a task waits in another loop, the call is made
                in a replica, or the source cannot be read again.
        """
        if self._is_closed:
            raise self._closed_error()
        place = PLACE.get()
        if place.replica is not None:
            raise ContextError(
                f"{self!r} was iterated over in {place.describe()}, so every replica would take "
                "batches of its own. Iterate outside the step and pass the batch to run."
            )
        self._on_begin()
        before = self._newest
        if before is not None:
            if before.is_waiting and not before.is_over:
                raise ContextError(
                    f"{before.name} waits for a batch while another loop begins. Let one loop end "
                    "first, or distribute the dataset twice."
                )
            await before.aclose(
                f"{before.name} was ended because another loop over its dataset began. Let one "
                "loop end first, or distribute the dataset twice."
            )
            self._open_loops.discard(before)
        if self._newest is not before or self._is_closed:  # another task was quicker
            return await self.begin_epoch()
        start = self._next_start
        items, name = self._source.read(start), f"epoch {start.epoch} of {self._source.label}"
        is_inline = self._source.is_inline
        epoch = Epoch(items, name, is_inline=is_inline, is_managed=self._is_entered)
        epoch.go_on = self._go_on
        if is_inline and not start.offset:  # what lies in memory ends where it says
            epoch.num_batches = self._source.num_items()
        self._newest = self._placed = epoch
        self._place = start
        self._next_start = Start(start.epoch + 1, version=start.version)
        self._open_loops.add(epoch)
        return epoch

    def delivered(self, epoch: Epoch, item: Item | None) -> None:
        """Move the place behind a batch that a loop is about to get, or behind the end."""
        if epoch is not self._placed:
            return
        number, version = self._next_start.epoch - 1, self._next_start.version
        if item is not None:
            self._num_delivered += 1
            self._place = Start(number, item.offset, item.own_state, version=version)
        elif epoch.is_exhausted:  # not closed or failed: then the rest is still to come
            self._place = Start(number + 1, version=version)

    def reopened(self, epoch: Epoch) -> None:
        """Count an epoch as open again: batches were put back after its source had ended."""
        self._open_loops.add(epoch)

    def ended(self, epoch: Epoch) -> None:
        """Forget an epoch that needs no more closing."""
        self._open_loops.discard(epoch)

    # ---- describing ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of one epoch.

        Raises:
            TypeError: If the source does not say.
        """
        num_batches = self._source.num_items()
        if num_batches is None:
            raise TypeError(f"{self._source.label} does not say how many batches it has.")
        return num_batches

    @property
    def element_spec(self) -> Tree:
        """The pytree of `ArraySpec` of a replica's part of a batch; None is the batch axis.

        Raises:
            ContextError: If the source does not say, and no batch was delivered yet.
        """
        spec = self._known_spec() or self._spec_of_first()
        if spec is None:
            raise ContextError(
                f"What {self._source.label} yields is not known before the first batch. Look at "
                "element_spec in the loop, or after it."
            )
        return spec

    def _spec_of_first(self) -> Tree | None:
        """Return the specs of the first batch, if the source has one without reading."""
        first = self._source.like()
        if first is None:
            return None
        arrays, spec = BatchReader("batch", self._source.label).read(first)
        return spec_of(unflatten(spec, arrays))

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or that the next one will be.

        Example:
            `for epoch in range(batches.epoch, num_epochs)` goes on where a loaded state says.
        """
        is_going_on = self._newest is not None and not self._newest.is_over
        return (self._place if is_going_on else self._next_start).epoch

    def statistics(self) -> InputStatistics:
        """Return the state, and how far the dataset is."""
        self._settle()
        place = self._place
        return InputStatistics(self._state(), place.epoch, place.offset, self._num_delivered)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"epoch {self.epoch}"
        label, count = self._source.label, self._num_replicas()
        return f"<DistributedDataset of {label} for {count} | {state}>"

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the newest batch that a loop has got: a few integers.

        Batches that were read ahead and not delivered do not count. Save it after the step: the
        batch that the loop's body is working on counts as delivered. A source with a `state_dict`
        of its own adds that, under "source".
        """
        self._settle()
        fingerprints = self._known_fingerprints()
        return _pack_state(self._place, self._num_pipelines, fingerprints, self._worker)

    def load_state_dict(self, state: object) -> None:
        """Make the next loop go on behind the batch that `state` names. A loop is ended.

        The number of replicas may be another one than when it was saved; for an ArrayDataset the
        batch size too. An ArrayDataset goes on at once; other sources are read again up to the
        place, unless they have a `load_state_dict` of their own.

        A DataLoader that draws its order anew in each pass cannot go on in the middle of one: a
        UserWarning says what to use instead.

        Raises:
            ValueError: If the state is not complete, or of another version or dataset.
            TypeError: If it is not a dict.
            ContextError: If the dataset is closed.
        """
        place = self._place_of(state)
        self._source.check_start(place)
        self._settle()
        self._placed = self._own_iterator = None
        if self._newest is not None:
            self._open_loops.discard(self._newest)
            self._newest.leave(f"{self._newest.name} was ended because a state was loaded.")
        self._place = self._next_start = place

    def _place_of(self, state: object) -> Start:
        """Return the place that a state names; raises as `load_state_dict`."""
        if self._is_closed:
            raise self._closed_error()
        fingerprints, label = self._known_fingerprints(), self._source.label
        return _unpack_state(state, self._num_pipelines, fingerprints, self._worker, label)

    def _settle(self) -> None:
        """Let a device loop say which of the batches it has read belong to complete steps."""
        if self._newest is not None and self._newest.report is not None:
            self._newest.report()

    def _known_fingerprints(self) -> tuple[int, int]:
        """Return that of the dataset, and one that other workers' own datasets have too."""
        if self._fingerprints is None:
            own, common = self._source.identity(), self._source.common_identity()
            self._fingerprints = _fingerprint_of(own), _fingerprint_of(("any worker's", *common))
        return self._fingerprints

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the loop over the dataset and close its source. Idempotent.

        A task that goes on with the loop is told, by a ContextError: the epoch is not over.

        Raises:
            Exception: What closing the source raised.

        Cancellation:
            Raised again once the source is closed.
        """
        name = "" if self._newest is None else self._newest.name
        await self._close(f"{name} was ended because its dataset was closed.")

    async def __aenter__(self) -> Self:
        if self._is_closed:
            raise self._closed_error()
        self._is_entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close("")  # who leaves knows that the loop is over

    async def _close(self, reason: str) -> None:
        self._is_closed = True
        self._own_iterator = None
        try:
            if self._newest is not None:
                self._open_loops.discard(self._newest)
                await self._newest.aclose(reason)
        finally:
            await self._source.aclose()

    def _state(self) -> str:
        if self._is_closed:
            return "closed"
        if self._newest is None:
            return "new"
        return "idle" if self._newest.is_over else "open"

    def _closed_error(self) -> ContextError:
        return ContextError(f"{self!r} is closed. Distribute the dataset again.")


@final
class DistributedIterator:
    """One loop over a DistributedDataset; what `async for` makes of it.

    Cancellation:
        Loses no batch: the next `anext` gets it.
    """

    __slots__ = ("_dataset", "_epoch", "_report")

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._epoch: Epoch | None = None
        self._report: Callable[[], None] | None = None

    @property
    def is_going_on(self) -> bool:
        """True if its loop has begun and is not over."""
        return self._epoch is not None and not self._epoch.is_over

    @property
    def is_exhausted(self) -> bool:
        """True if its loop is over because no batch was left; it was not closed, nor failed."""
        return self._epoch is not None and self._epoch.is_over and self._epoch.is_exhausted

    @property
    def element_spec(self) -> Tree:
        """The same as of its dataset."""
        return self._dataset.element_spec

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tree:
        """Return the next batch.

        Raises:
            StopAsyncIteration: At the end, for all replicas together.
            ContextError: If the loop was ended by another one, or its strategy was closed.
            Exception: What the source raised.
        """
        epoch, gate = self._epoch, self._dataset.gate
        if epoch is None:
            epoch = await self._begin()
        while True:
            try:
                item = await epoch.next()
            finally:
                if epoch.is_over:
                    self._dataset.ended(epoch)
            if item is None or not gate.is_closed or not gate.holds_loops:
                break
            # A save or restore between steps must not find a batch that no step has seen behind
            # the place. What was put back is the next batch, unless the epoch is left meanwhile.
            epoch.put_back((item,), None, num_agreed=1)
            await gate.loop_opened(epoch.name)
        self._dataset.delivered(epoch, item)
        if item is None:
            raise StopAsyncIteration
        return item.value

    async def _begin(self) -> Epoch:
        epoch = self._epoch = await self._dataset.begin_epoch()
        epoch.report = self._report
        return epoch

    async def read(self) -> Item | None:
        """Return the next batch, None at the end; `delivered` has to follow, or `put_back`.

        Other workers are not asked whether they have one: who calls this agrees with them.

        Raises:
            Exception: As `anext` does.
        """
        epoch = self._epoch or await self._begin()
        try:
            return await epoch.next(asks=False)
        finally:
            if epoch.is_over:
                self._dataset.ended(epoch)

    def delivered(self, item: Item | None) -> None:
        """Let a state say that a batch that was read, or the end, is behind it."""
        if self._epoch is not None:
            self._epoch.was_read()
            self._dataset.delivered(self._epoch, item)

    async def end(self, *, is_exhausted: bool) -> None:
        """End the epoch, because there is a worker that gives no more batches.

        Args:
            is_exhausted: Whether that one has none. If its epoch has failed or was closed, the
                place stays behind the newest batch delivered; so it does if this epoch did.

        Raises:
            Exception: What closing the source raised.

        Cancellation:
            Raised again once the source is closed.
        """
        if self._epoch is not None:
            if is_exhausted and not self._epoch.is_over:
                self._epoch.is_exhausted = True
                self._epoch.warn_of_rest()
                self._dataset.delivered(self._epoch, None)
            await self.aclose()

    def put_back(self, items: Sequence[Item], error: BaseException | None) -> None:
        """Give batches again that were read but not delivered, and then the error.

        Args:
            items: In their order.
            error: What the source raised behind them, if it was not told.
        """
        if self._epoch is not None:
            was_over = self._epoch.is_over
            self._epoch.put_back(items, error)
            if was_over and not self._epoch.is_over:
                self._dataset.reopened(self._epoch)

    def follow(self, report: Callable[[], None] | None) -> None:
        """Have `report` called before anything looks at the place: it may call `delivered`."""
        self._report = report
        if self._epoch is not None:
            self._epoch.report = report

    async def aclose(self) -> None:
        """End the loop and close the source of its epoch. Idempotent."""
        if self._epoch is not None:
            self._dataset.ended(self._epoch)
            await self._epoch.aclose()

    def __del__(self) -> None:
        epoch = getattr(self, "_epoch", None)
        if epoch is not None:
            epoch.leave("")

    def __repr__(self) -> str:
        return f"<DistributedIterator of {self._dataset!r}>"


def _fingerprint_of(identity: tuple[object, ...]) -> int:
    """Return a number below 2**48 that differs from those of other datasets.

    It fits the numbers of every JSON reader.
    """
    digest = blake2b(digest_size=6)
    for entry in identity:
        data = entry if isinstance(entry, bytes) else repr(entry).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def _pack_state(
    place: Start, num_pipelines: int, fingerprints: tuple[int, int], worker: int | None
) -> dict[str, object]:
    """Return a place as plain data.

    Where each worker reads a dataset of its own, a checkpoint keeps what the first one returns: the
    fingerprint is one that fits all, and its own goes along.
    """
    own, common = fingerprints
    state: dict[str, object] = {
        "version": place.version,
        "epoch": place.epoch,
        "position": place.offset,
        "pipelines": num_pipelines,
        "fingerprint": own if worker is None else common,
    }
    if worker is not None:
        state |= {"worker": worker, "own_fingerprint": own}
    if place.own_state is not None:
        state["source"] = place.own_state
    return state


def _unpack_state(
    state: object,
    num_pipelines: int,
    fingerprints: tuple[int, int],
    worker: int | None,
    label: str,
) -> Start:
    """Return the place that a state names; of another worker's, without its source's own state.

    Raises:
        ValueError: If it is not complete, or of another version, dataset or number of pipelines.
        TypeError: If it is not a dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes what state_dict returned, got {state!r}.")
    if state.get("version") not in range(1, VERSION + 1):
        raise ValueError(
            f"The state of {label} has version {state.get('version')!r}, but this release reads "
            f"versions 1 to {VERSION}. Load it with the release that saved it."
        )
    found = {}
    for name in NUMBERS:
        number = count_or_none(state.get(name))  # NumPy's too: a checkpoint may hold arrays
        if number is None:
            raise ValueError(
                f"The state of {label} has {name}={state.get(name)!r}, which is not a natural "
                "number. Load what state_dict returned, unchanged."
            )
        found[name] = number
    if found["pipelines"] != num_pipelines:
        raise ValueError(
            f"The state was saved with {found['pipelines']} input pipelines, but {label} has "
            f"{num_pipelines}. Datasets that a function made can go on with as many of them only; "
            "what distribute_dataset splits can with any number of replicas and workers."
        )
    is_own = count_or_none(state.get("worker", 0)) == (worker or 0)
    saved, fits = found["fingerprint"], found["fingerprint"] in fingerprints
    if fits and is_own and worker is not None and "own_fingerprint" in state:
        saved = count_or_none(state["own_fingerprint"]) or 0
        fits = saved == fingerprints[0]
    if not fits:
        raise ValueError(
            f"The state was saved by another dataset (fingerprint {saved}, {label} has "
            f"{fingerprints[0]}). Load it into the dataset, with the seed, that it is of; with one "
            "dataset per replica, the batch size must be the same too."
        )
    return Start(
        found["epoch"],
        found["position"],
        state.get("source") if is_own else None,
        may_be_over=worker is not None,  # that of a worker with more examples
        version=found["version"],
    )
