"""The object behind a strategy: what the rest of the library knows of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final
from weakref import WeakValueDictionary

from ..collectives import CommunicationOptions, Reducer
from ..context import CREATORS, DEVICE, PLACE, Place
from ..devices import Device
from ..errors import ContextError
from ..telemetry import EventLog, Observer, Observers, Recorder
from ..values import Variable, VariableOptions, VariableStore, default_store, rename
from ._lifecycle import Lifecycle

if TYPE_CHECKING:
    from ..cluster import Workers, WorkersRun
    from ..device_loop import KeptIterators, Topology
    from ..device_loop._compiled import CompiledSteps

S = TypeVar("S")


@final
class Runtime:
    """Devices, variables, runs and observers of a strategy; a `Strategy` is the facade over it.

    `Place` holds it, variables belong to it, and other packages know nothing else of a strategy.

    Args:
        facade: The strategy that users hold.
        devices: One device per replica, or None for the default strategy.
        new_variable: Makes the strategy's kind of variable, when `ar.Variable` is called.
        new_view: Makes what merge functions of a group of replicas get as their strategy.
        options: How collectives are carried out unless a call says otherwise.
        topology: Which replica is on which host; None is one host.
        parameter_devices: Where variables live, if not with the replicas.
        workers: The same strategy in other processes, if there are some.
        elsewhere: Fetcher of values that live on parameter servers; None if they live here.

    Attributes:
        replica_devices: One device per replica; None under the default strategy.
        device_names: One device name per replica; "-" under the default strategy.
        num_local_replicas: How many there are in this process, as components of a value.
        has_plain_values: Whether values stay plain instead of becoming PerReplica (the default
            strategy).
        reducer: Carries out collectives on arrays.
        recorder: Keeps the newest merges of all runs.
        observers: Those of the runs.
        events: What steps and device loops have recorded.
        store: Numbers and publishes the writes of the variables.
        variable_table: The variables made here, and their names.
        lifecycle: Binds to the event loop and the lanes; knows the runs in progress.
        iterators: Those that device loops have read from; None before the first.
        compiled: The programs of compiled steps; None before the first.
        scope_place: Where code in the scope runs; None for the default strategy.
        merge_place: Where merge functions run.
        blocking_merge_place: The same for merge functions that device threads wait for.
    """

    def __init__(
        self,
        facade: Any,  # Any: the facade lies above this
        devices: tuple[Device, ...] | None,
        new_variable: Callable[[Runtime, Any, VariableOptions], Variable],
        new_view: Callable[[Replicas], object],
        options: CommunicationOptions | None,
        *,
        topology: Topology | None,
        parameter_devices: tuple[Device, ...],
        workers: Workers | None,
        elsewhere: object,
    ) -> None:
        kind, is_default = type(facade).__name__, devices is None
        self.facade = facade
        self._new_variable, self._new_view = new_variable, new_view
        self.topology = topology
        self.parameter_devices = parameter_devices
        self.workers = workers
        self.elsewhere = elsewhere
        self.replica_devices: tuple[Device | None, ...] = (None,) if devices is None else devices
        self.device_names = ("-",) if devices is None else tuple(map(str, devices))
        self.num_local_replicas = len(self.device_names)
        self.has_plain_values = is_default
        self.reducer = Reducer(options)
        self.recorder = Recorder()
        self.observers = Observers(Observer(merge_ended=self.recorder.merge_ended))
        self.events = EventLog(observers=self.observers)
        self.scope_place = None if is_default else Place(self)
        self.merge_place = Place(self, in_merge=True)
        self.blocking_merge_place = Place(self, in_merge=True, holds_devices=True)
        self.store = default_store() if is_default else VariableStore(self.observers, self)
        self.variable_table = VariableTable()
        self.iterators: KeptIterators | None = None
        self.compiled: CompiledSteps | None = None
        self.lifecycle = Lifecycle(
            f"<{kind}>",
            () if is_default else self.device_names,
            is_bound=not is_default,
            store=self.store,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of a run."""
        return self.num_local_replicas if self.workers is None else self.workers.num_replicas

    @property
    def host_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica ids of each host; every host has an infeed of its own."""
        if self.topology is None:
            return (tuple(range(self.num_local_replicas)),)
        return self.topology.host_replicas

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Trainable variables made by this strategy, in order of creation."""
        return tuple(variable for variable in self.variable_table.all() if variable.trainable)

    def create_variable(self, value: Any, options: VariableOptions) -> Variable:
        """Make the strategy's kind of variable."""
        return self._new_variable(self, value, options)

    def view_of(self, members: tuple[int, ...], across: WorkersRun | None = None) -> object:
        """Return what merge functions of some of the replicas get as their strategy.

        Args:
            members: Their ids, ascending; if these are all replicas, it is the strategy itself.
            across: The same run of other workers, some of whose replicas are in the group too.
        """
        is_whole = len(members) == self.num_local_replicas and self.workers is None
        workers = None if across is None else across.workers
        return self.facade if is_whole else self._new_view(Replicas(self, members, workers))

    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where this strategy may be in charge.

        Raises:
            ContextError: Inside a replica or an update, or under another strategy.
        """
        place = PLACE.get()
        if place.is_in_step:
            advice = f"Use {twin} there" if twin else "Call it outside the step"
            raise ContextError(
                f"{what} is a cross-replica method but was called in {place.describe()}. {advice}."
            )
        if place.strategy is not None and place.strategy is not self:
            raise ContextError(
                f"{what} of {self!r} was called in {place.describe()}. Leave that scope first."
            )

    def open(self) -> None:
        """Bind to the running loop, at the first use.

        Raises:
            ContextError: If the strategy is closed.
            LoopMismatchError: If it is bound to another loop.
        """
        self.lifecycle.open()

    def abandon(self) -> None:
        """Close at once because the interpreter is interrupted; started ops are left running."""
        self.lifecycle.close_now()
        if self.workers is not None:
            self.workers.abandon()

    async def aclose(self) -> None:
        """End runs and loops over datasets, give threads back; see `Strategy.aclose`."""
        with self.lifecycle.closing():
            try:
                await self.lifecycle.aclose()
            finally:
                if self.lifecycle.state == "closed":
                    await self._let_go()

    async def _let_go(self) -> None:
        self.reducer.clear()
        if self.iterators is not None:
            self.iterators.close()
        if self.compiled is not None:
            self.compiled.clear()
        try:
            if self.lifecycle.open_loops is not None:
                await self.lifecycle.open_loops.aclose(repr(self))
        except GeneratorExit:  # on no event loop any more
            if self.workers is not None:
                self.workers.abandon()
            raise
        except BaseException:  # or the other workers would wait for this one
            if self.workers is not None:
                await self.workers.aclose()
            raise
        if self.workers is not None:
            await self.workers.aclose()

    def __repr__(self) -> str:
        return repr(self.facade)


@final
@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas whose values are combined outside them: all of a strategy, or a group.

    Attributes:
        runtime: The strategy.
        members: Their ids in this process, ascending; None for all.
        others: Workers with members of the group, if it is one of several.
    """

    runtime: Runtime
    members: tuple[int, ...] | None = None
    others: Workers | None = None

    @property
    def num(self) -> int:
        """Number of them in this process."""
        members = self.members
        return self.runtime.num_local_replicas if members is None else len(members)

    @property
    def workers(self) -> Workers | None:
        """The same strategy on other workers; None if none of them has some of these."""
        return self.runtime.workers if self.members is None else self.others

    @property
    def num_in_sync(self) -> int:
        """Number of them on all workers."""
        return self.num if self.workers is None else self.workers.num_replicas

    def __repr__(self) -> str:
        return repr(self.runtime if self.members is None else self.runtime.view_of(self.members))


@final
class Scope(Generic[S]):
    """The context manager behind `strategy.scope()`; it may be entered again, nested too.

    Args:
        runtime: The strategy that it makes current; the default one's scope changes nothing.

    Raises:
        ContextError: If another strategy is in charge, if entered inside a replica, if left in
            another context than it was entered in, or inside a block that was entered in it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tokens: list[tuple[Token[Place], tuple[object, object]]] = []

    def __enter__(self) -> S:
        current = PLACE.get()
        own_place = self._runtime.scope_place
        is_own = current.strategy is None or current.strategy is self._runtime
        is_inside = current.is_in_step
        if is_inside and not (is_own and own_place is None):
            raise ContextError(
                f"scope() of {self._runtime!r} was entered in {current.describe()}. Enter it "
                "around run, not inside a step."
            )
        if not is_own:
            raise ContextError(
                f"scope() of {self._runtime!r} was entered in {current.describe()}. Leave the "
                "other scope first: two strategies cannot be in charge at once."
            )
        place = current if own_place is None or current.in_merge else own_place
        self._tokens.append((PLACE.set(place), (DEVICE.get(), CREATORS.get())))
        return self._runtime.facade  # type: ignore[no-any-return]  # see there

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for entered in reversed(self._tokens):  # the last one of this context: tasks may share it
            token, (device, creators) = entered
            try:
                PLACE.reset(token)
            except ValueError:
                continue
            self._tokens.remove(entered)
            if kind is None and (DEVICE.get() is not device or CREATORS.get() is not creators):
                block = "ar.device" if DEVICE.get() is not device else "variable_creator_scope"
                raise ContextError(
                    f"scope() of {self._runtime!r} was left inside a block of {block} that was "
                    "entered in it. Leave the inner one first."
                )
            return
        raise ContextError(
            f"scope() of {self._runtime!r} was left in another context than it was entered "
            "in. Enter and leave it in the same task; do not let it span a `yield`."
        )


@final
class VariableTable:
    """Lists a strategy's living variables in order of creation; no two have one name.

    Variables are held weakly: one that the program has dropped is gone, and its name is free.
    """

    __slots__ = (
        "_by_name", "_by_number", "_equal_names", "_last_numbers", "_lock", "_next", "_num_equal",
        "_num_gone",
    )  # fmt: skip

    def __init__(self) -> None:
        self._by_number: WeakValueDictionary[int, Variable] = WeakValueDictionary()
        self._by_name: WeakValueDictionary[str, Variable] = WeakValueDictionary()
        self._next = self._num_equal = self._num_gone = 0
        self._last_numbers: dict[str, int] = {}  # given last to each name, unless any was freed
        self._equal_names: set[str] = set()
        self._lock = threading.Lock()  # device threads make slots and variables too

    def __len__(self) -> int:
        """Return the number of variables."""
        return len(self._by_number)

    def all(self) -> tuple[Variable, ...]:
        """Return every variable, in order of creation."""
        with self._lock:
            return tuple(variable for _, variable in self._living())

    def made_since_last(self) -> tuple[int, tuple[Variable, ...]]:
        """Return the variables that are not known to be equal on all workers, and a number."""
        with self._lock:
            if self._next == self._num_equal:
                return self._next, ()
            known = self._equal_names
            made = (v for i, v in self._living() if i >= self._num_equal and v.name not in known)
            return self._next, tuple(made)

    def are_equal_up_to(self, number: int) -> None:
        """Record that the variables made before the number was given are equal on all workers."""
        self._num_equal = number

    def are_equal(self, names: Iterable[str]) -> None:
        """Record that all variables of now, and any of these names, are equal on all workers."""
        self._equal_names = set(names)
        self._num_equal = self._next

    def has(self, name: str) -> bool:
        """Tell whether a variable has that name."""
        return name in self._by_name

    def add(self, name: str, make: Callable[[str], Variable]) -> Variable:
        """Make a variable under `name`, with a number added if it is taken, and list it."""
        with self._lock:
            variable = make(self._free(name))
            self._by_number[self._next] = variable
            self._by_name[variable.name] = variable
            self._next += 1
        return variable

    def require_free(self, name: str, strategy: object) -> None:
        """Check that a name that was asked for is free.

        In an interactive session a cell that runs again makes its variables again while the old
        ones still live: there the new one gets the name, and the old one a number.

        Raises:
            ValueError: If a variable has the name.
        """
        with self._lock:
            old = self._by_name.get(name)
            if old is None:
                return
            if "ps1" not in vars(sys):  # set in interactive sessions only, Jupyter included
                raise ValueError(
                    f"There is a variable named {name!r} in {strategy!r} already. Choose another "
                    "name, or leave it out to get a free one."
                )
            rename(old, self._free(name))
            del self._by_name[name]
            self._by_name[old.name] = old

    def _living(self) -> Iterator[tuple[int, Variable]]:
        for reference in self._by_number.valuerefs():  # copied at once: others may drop some
            variable = reference()
            if variable is not None:
                yield reference.key, variable

    def _free(self, name: str) -> str:
        """Return the name, or that with the first number that is free; under the lock."""
        if name not in self._by_name:
            return name
        num_gone = self._next - len(self._by_number)
        if num_gone != self._num_gone:  # names below those that were given last may be free again
            self._num_gone = num_gone
            self._last_numbers.clear()
        number = self._last_numbers.get(name, 1)
        while (free := f"{name}_{number}") in self._by_name:
            number += 1
        self._last_numbers[name] = number
        return free
