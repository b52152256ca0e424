"""The current place: which strategy, and as replica, merge function or update component.

One ContextVar holds one object, which is not changed while its run lasts. A collective checks "am I
in my own replica?" with one identity comparison, and entering a merge function is one `set` in a
copied context that need not be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, final


class CurrentReplica(Protocol):
    """Interface of the object behind the current replica's context, for lower layers."""

    @property
    def context(self) -> Any:  # Any: the replica layer lies above this one
        """The context that the step sees."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica in its sync group."""

    @property
    def local_replica_id(self) -> int:
        """Index among the replicas of this process, and so of its component of a value."""

    @property
    def device_name(self) -> str | None:
        """Name of this replica's device, or None without one."""

    @property
    def blocking(self) -> Any:  # Any: the replica layer lies above this one
        """The calls that wait on the device thread of a plain step function."""

    @property
    def op_tracker(self) -> Any:  # Any: the devices layer lies above this one
        """Tracker of the ops of this replica's run that are in flight."""

    def check_running(self) -> None:
        """Raise CancelledError if the run was aborted."""

    def rng(self, name: str) -> Any:  # Any: this layer imports no NumPy
        """Return this replica's random stream of this name for this step."""

    def stand_in(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what ops in a device process get in its place: a call, and its arguments."""

    def op_abandoned(self) -> None:
        """Learn that a started op was left to its thread because of an interrupt."""


class CurrentStrategy(Protocol):
    """Interface of the object behind the current strategy, for lower layers.

    Attributes:
        num_local_replicas: How many there are in this process, as components of a value.
        device_names: One device name per replica; "-" under the default strategy.
        has_plain_values: Whether values stay plain instead of becoming PerReplica (the default
            strategy).
        facade: The strategy that users hold.
        workers: The same strategy on other workers; None if there are none.
        variable_table: Its variables, and their names.
        elsewhere: Fetcher of values that live on parameter servers; None if they live here.
        reducer: Carries out collectives on arrays.
        recorder: Keeps the newest merges of all runs.
        observers: Those of its runs.
        events: What steps have recorded.
        merge_place: Where merge functions run.
        blocking_merge_place: The same for merge functions that device threads wait for.
    """

    num_local_replicas: int
    device_names: tuple[str, ...]
    has_plain_values: bool
    facade: Any  # Any, here and below: of layers above this one
    workers: Any
    variable_table: Any
    elsewhere: object
    reducer: Any
    recorder: Any
    observers: Any
    events: Any
    merge_place: Place
    blocking_merge_place: Place

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of a run."""

    @property
    def trainable_variables(self) -> object:
        """Trainable variables, in order of creation."""

    def create_variable(self, value: Any, options: Any) -> Any:
        """Make the strategy's kind of variable."""

    def view_of(self, members: tuple[int, ...], across: Any = None) -> object:
        """Return what merge functions of some of the replicas get as their strategy."""

    def open(self) -> None:
        """Bind to the running loop, at the first use."""

    def abandon(self) -> None:
        """Close at once because the interpreter is interrupted."""


@final
class Place:
    """One place that code can run in.

    Attributes:
        strategy: The strategy in charge, or None in the default context.
        replica: The replica, or None in cross-replica context.
        update_replica_id: The component being updated, in the update context only.
        in_merge: True inside a merge function.
        staging: Holds the components written so far, in the update context only.
        is_outside: True in a host function that a device program waits for.
        holds_devices: True inside a merge function that device programs wait for.
        lacks_workers: True inside a merge function that some workers do not run.
    """

    __slots__ = (
        "holds_devices", "in_merge", "is_outside", "lacks_workers", "replica", "staging",
        "strategy", "update_replica_id",
    )  # fmt: skip

    def __init__(
        self,
        strategy: CurrentStrategy | None = None,
        replica: CurrentReplica | None = None,
        update_replica_id: int | None = None,
        *,
        in_merge: bool = False,
        staging: Any = None,  # Any: so does the values layer
        is_outside: bool = False,
        holds_devices: bool = False,
        lacks_workers: bool = False,
    ) -> None:
        self.strategy = strategy
        self.replica = replica
        self.update_replica_id = update_replica_id
        self.in_merge = in_merge
        self.staging = staging
        self.is_outside = is_outside
        self.holds_devices = holds_devices
        self.lacks_workers = lacks_workers

    @property
    def is_in_step(self) -> bool:
        """True in a replica, and where one component is updated."""
        return self.replica is not None or self.update_replica_id is not None

    def end(self) -> None:
        """Make this a place outside every strategy, as the run or update it belonged to is over.

        Tasks that were started in it and live on are outside from then on.
        """
        self.strategy = self.replica = self.update_replica_id = self.staging = None

    def describe(self) -> str:
        """Say where this is, for error messages.

        Without the replica's number: a mistake that all replicas make must read the same on each,
        so that it can be reported as one error.
        """
        if self.replica is not None:
            return f"a replica of {self.strategy!r}"
        if self.update_replica_id is not None:
            return f"the update of component {self.update_replica_id} of {self.strategy!r}"
        if self.in_merge:
            return f"a merge function of {self.strategy!r}"
        if self.strategy is not None:
            return f"the scope of {self.strategy!r}"
        return "no strategy's scope"


DEFAULT_PLACE = Place()
"""The place of code outside every strategy."""

PLACE: ContextVar[Place] = ContextVar("aioreplica_place", default=DEFAULT_PLACE)
"""The strategy, replica and update that are current."""

DEVICE: ContextVar[object | None] = ContextVar("aioreplica_device", default=None)
"""The device of the innermost `ar.device` block."""

OVERRIDES: ContextVar[Any] = ContextVar("aioreplica_overrides", default=None)
"""Values that stand in for variables while a loss is differentiated (see autodiff)."""

DIFFERENTIATING: ContextVar[bool] = ContextVar("aioreplica_differentiating", default=False)
"""Whether a derivative is being taken, so that one inside it keeps its trace (see autodiff)."""


CREATORS: ContextVar[tuple[tuple[object, Any], ...]] = ContextVar("aioreplica_creators", default=())
"""Functions that make variables here, outermost first, each with the strategy that it is for."""

BESIDE: ContextVar[object] = ContextVar("aioreplica_beside", default=None)
"""Variable beside which new ones are to live; strategies with one place for all need not look."""


class Carrier(Protocol):
    """Carrier of objects to another process and back."""

    def refer(self, thing: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what `thing.__reduce__` shall give: it is sent as a name, not as a copy."""


CARRIER: ContextVar[Carrier | None] = ContextVar("aioreplica_carrier", default=None)
"""What pickles here, if that is for the process of a device (see devices.processes)."""


CLUSTER: ContextVar[str | None] = ContextVar("aioreplica_cluster", default=None)
"""Name of the outside call that runs here (see device_loop)."""


@final
class LoopStep:
    """Step of a device loop that one replica is in, and which steps are not run again.

    Args:
        replica_id: Whose it is.
        completed: How many steps of the loop each replica has completed; shared by all.
        published: Likewise how many when it is done with the newest that has published a write.

    Attributes:
        at_end: Called when the loop has ended and no replica runs any more.
    """

    __slots__ = ("_completed", "_published", "_replica_id", "at_end")

    def __init__(self, replica_id: int, completed: list[int], published: list[int]) -> None:
        self._replica_id = replica_id
        self._completed = completed
        self._published = published
        self.at_end: dict[Callable[[], None], None] = {}  # a set in order

    @property
    def number(self) -> int:
        """Number of the step in the loop."""
        return self._completed[self._replica_id]

    def has_written(self) -> None:
        """Note that the step has published a write of all replicas."""
        self._published[self._replica_id] = self.number + 1

    def ended(self, count: int = 1) -> None:
        """Go on to the next step, or `count` of them at once."""
        self._completed[self._replica_id] += count

    def num_taken(self) -> int:
        """Return how many steps of the loop are not run again: they are complete, or published.

        A step that fails behind its update would apply it twice if it were run again. All replicas
        are in the step of their update; what some of them write ahead of the others does not count.
        """
        published = tuple(self._published)  # first: threads go on, and the result never shrinks
        complete = min(self._completed)
        return complete + ((complete + 1) in published)


LOOP: ContextVar[LoopStep | None] = ContextVar("aioreplica_loop", default=None)
"""The step of a device loop that runs here (see device_loop)."""


AWAITED_BY: ContextVar[tuple[object, ...]] = ContextVar("aioreplica_awaited_by", default=())
"""Runs of several workers that wait for what runs here: a device loop for its infeed and outside
functions. The loops around it come first."""


INLINE_STEP: ContextVar[int | None] = ContextVar("aioreplica_inline_step", default=None)
"""How many bytes an optimizer's step may read and write on the event loop; None for as many as are
done soonest there. A service that answers meanwhile sets fewer."""


CLOSURE: ContextVar[Any] = ContextVar("aioreplica_closure", default=None)
"""The closure of a coordinator that runs here (see strategies.parameter_server)."""


STAGE: ContextVar[bool | None] = ContextVar("aioreplica_stage", default=None)
"""Whether the stage of a pipeline that runs here is run again on the way back; None outside of
stages, and in one that is the whole model (see strategies)."""


TRACE: ContextVar[Any] = ContextVar("aioreplica_trace", default=None)
"""The step that is recorded here to be compiled (see device_loop._compiled)."""


def in_cross_replica_context() -> bool:
    """Tell whether the code runs in a strategy's scope or merge function, outside any replica.

    Example:
        >>> in_cross_replica_context()
        False
    """
    place = PLACE.get()
    return place.strategy is not None and not place.is_in_step


def get_update_replica_id() -> int | None:
    """Return the component being updated inside an update function, None elsewhere.

    Example:
        >>> get_update_replica_id() is None
        True
    """
    return PLACE.get().update_replica_id
