"""The parameter servers as the program sees them: what lives where, and what was lost.

Invariants:
    * A variable is pending, or every shard of it is on its server, or it is among the lost ones.
    * While a server is lost nothing is asked of it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle
from typing import Any, final
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from ...cluster import ClosureEngine, StateHandle
from ...context import BESIDE
from ...errors import WorkerLostError
from ._copies import CopiedServer, Copies
from ._messages import (
    Array,
    NewShard,
    ServerStatistics,
    ShardRows,
    Spec,
)
from ._partition import ServedRows
from ._progress import ClosureProgress, Numbered, Reopened
from ._server import ParameterServer
from ._variables import ServedVariable, split_value

MAX_REPAIRS = 5
"""So many times a call is made again to a copy that has taken the place of its server."""

READS = ("pull", "slots", "leases")
"""What changes nothing, so that copies need not know of it."""

LEASES = 0
"""Number of the server that knows what closures have taken from iterators."""


@final
class Servers:
    """Makes parameter servers, places variables on them and asks them.

    Args:
        engine: Where they are.
        num_servers: How many.
        max_staleness: Gradients that are older are dropped; None drops none.
        replicate: Whether each server has a copy.

    Attributes:
        engine, num_servers: As given.
        require_open: Checks that the strategy is not closed, whose use would begin another cluster.
        strategy_id: Tells the strategy from others, on workers.
        epoch: Counts how often a checkpoint was restored.
        num_made: How many servers were made so far; versions on a new one begin anew.
        oldest: The oldest closure that is not over, as the servers were told last.
        birth: How often the server was made anew that keeps the leases of iterators.
        is_started: Whether the servers were made.
        lock: Held while servers are made, and variables placed on them.
        variables: By number, as long as the program has them.
        pending: Those that are not placed yet.
        missing: Numbers of those that were lost.
        settings: Of the optimizers that closures use, by number.
        places: Chooses servers for new variables.
        resources: What workers keep.
        copies: Looks after the copies; None without them.
        progress: What closures have done since the last checkpoints.
        is_reopening: Whether lost servers are being made anew, on a new cluster.
    """

    def __init__(
        self, engine: ClosureEngine, num_servers: int, max_staleness: int | None,
        replicate: bool, require_open: Callable[[], None],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.strategy_id = uuid4().hex
        self.epoch = self.oldest = self.birth = self.num_made = 0
        self.num_servers = num_servers
        self._max_staleness = max_staleness
        self._handles: dict[int, StateHandle] = {}
        self.require_open = require_open
        self._has_engine = self.is_started = False
        self.lock = asyncio.Lock()
        self.variables: WeakValueDictionary[int, ServedVariable] = WeakValueDictionary()
        self.pending: dict[int, ServedVariable] = {}
        self.missing: dict[int, None] = {}
        self._makers: dict[int, tuple[object, Array]] = {}
        self.places = Places(num_servers, self.variables)
        self.resources = Resources()
        self._newest: dict[int, tuple[int, bytes]] = {}
        self._recipes: dict[int, tuple[int, bytes]] = {}  # that servers have
        self.settings: dict[int, Any] = {}
        self.progress = ClosureProgress()
        self.is_reopening = self._is_left = False
        self.copies = Copies(self._handles, self._new_copy) if replicate else None

    # ---- variables -------------------------------------------------------------------------

    def add(self, variable: ServedVariable, rows_from: object = None) -> None:
        """Place a variable at the next occasion; servers call what makes its rows, if anything."""
        if rows_from is not None:
            self._makers[variable.spec.variable_id] = rows_from, variable._cell.components[0]
        self.variables[variable.spec.variable_id] = variable
        self.pending[variable.spec.variable_id] = variable

    def know(self, number: int, settings: object, recipe: bytes) -> int:
        """Remember the settings of an optimizer that closures use; return which ones they are."""
        self.settings[number] = settings
        version, newest = self._newest.get(number, (-1, b""))
        if recipe != newest:
            version += 1
            self._newest[number] = version, recipe
        return version

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """Every server, by number."""
        return tuple(self._handles[i] for i in range(self.num_servers))

    # ---- starting and asking ---------------------------------------------------------------

    async def ready(self) -> None:
        """Start the cluster and place variables that are new.

        Raises:
            ContextError: If the strategy is closed.
            WorkerLostError: If a parameter server was lost and not restored.
            Exception: As `ClosureEngine.start`.
        """
        self.require_open()
        if self.is_lost:
            raise self.lost_error()
        if self.is_started and not self.pending and not self.missing:
            return
        async with self.lock:
            await self._begin_once()
            self.require_all()
            await self.place(self.pending.values())

    async def _begin_once(self) -> None:
        if not self.is_started:
            await self._begin()
            self.is_started = True

    async def _begin(self) -> None:
        """Make all servers, on a cluster that is started, or made anew if it was lost."""
        num_processes = max(self.num_servers, 1 if self.copies is None else 2)
        if self._has_engine:
            await self.engine.reopen(num_processes)
        else:
            await self.engine.start(num_processes)
            self._has_engine = True
        for server in range(self.num_servers):
            await self._create(server)

    async def _create(self, server: int) -> None:
        self.num_made += 1
        create, owner = self.engine.create_state, self.strategy_id
        args = (server, self._max_staleness, self.epoch, self.oldest, self.birth)
        if self.copies is None:
            self._handles[server] = await create(owner, ParameterServer, args, server)
        else:
            self._handles[server] = await create(owner, CopiedServer, (False, *args), server)
            await self.copies.begin(server)
        for number, (version, recipe) in self._recipes.items():
            await self.call(server, "learn", number, recipe, version)

    async def _new_copy(self, server: int, apart_from: Sequence[StateHandle]) -> StateHandle:
        args, create = (True, server, self._max_staleness), self.engine.create_state
        return await create(self.strategy_id, CopiedServer, args, server, apart_from=apart_from)

    async def place(self, variables: Iterable[ServedVariable]) -> None:
        batch = [*variables]
        new: dict[int, list[NewShard]] = {}
        for variable in batch:
            made_by = self._makers.get(variable.spec.variable_id, (None, None))
            for server, shard in _new_shards(variable, *made_by):
                new.setdefault(server, []).append(shard)
        await self.all({server: (shards,) for server, shards in new.items()}, "create")
        for variable in batch:
            variable.leave_home()
            self.missing.pop(variable.spec.variable_id, None)
            self.pending.pop(variable.spec.variable_id, None)
            self._makers.pop(variable.spec.variable_id, None)

    async def call(self, server: int, method: str, *args: Any) -> Any:
        """Ask a server.

        Raises:
            WorkerLostError: If it is gone; names its variables.
            Exception: What the method raises.
        """
        num_repairs, copies = 0, self.copies
        while True:
            handle = self._handles.get(server)
            if handle is None:
                raise self.lost_error(server)
            try:
                result = await handle.call(method, *args)
                if copies is not None and method not in READS:
                    await handle.call("followed", is_wait=True)
            except WorkerLostError as error:
                num_repairs += 1
                has_tried = num_repairs > MAX_REPAIRS
                if copies is None or has_tried or not await copies.repair(server):
                    raise self.noticed(error) from error
            else:
                return result

    async def all(self, calls: Mapping[int, tuple[object, ...]], method: str) -> dict[int, Any]:
        """Ask several servers at once; if some fail, wait for the others."""
        asked = [self.call(server, method, *args) for server, args in calls.items()]
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return dict(zip(calls, results, strict=True))

    # ---- losing ----------------------------------------------------------------------------

    def noticed(self, error: WorkerLostError) -> WorkerLostError:
        """Learn that a server was lost; return the error that says what was on it."""
        if self.is_lost:
            return self.lost_error()
        for server in error.ranks:
            if self.copies is not None and not self.copies.is_lost(server):
                continue  # somebody could not reach it, but it is there
            if self._handles.pop(server, None) is not None:
                for variable in living(self.variables):
                    places = {shard.server for shard in variable.spec.shards}
                    if variable.spec.variable_id not in self.pending and server in places:
                        self.missing[variable.spec.variable_id] = None
        return self.lost_error(error.ranks[0]) if error.ranks else error

    @property
    def is_lost(self) -> bool:
        """True if the cluster was lost, until all of it was made anew."""
        return self._is_left or (self.is_started and self.engine.lost is not None)

    def lose(self, closures: Iterable[Numbered]) -> None:
        """Note closures that end with an error, if something is lost."""
        if self.has_lost:
            self.progress.lost(closures)

    @property
    def has_lost(self) -> bool:
        """True if the cluster was lost, or a server."""
        living = [handle for handle in self._handles.values() if not handle.is_lost]
        return self.is_lost or (self.is_started and len(living) < self.num_servers)

    @property
    def lost_variables(self) -> tuple[ServedVariable, ...]:
        """The variables that were on lost servers and were not restored."""
        lost = numbers_of(self.variables) - self.pending.keys() if self.is_lost else self.missing
        alive = (self.variables.get(number) for number in sorted(lost))
        return tuple(v for v in alive if v is not None and v.spec.slot is None)

    def lost_error(self, server: int = 0) -> WorkerLostError:
        """Say what was lost with a server, or with the cluster."""
        why = (self.engine.lost or "The cluster was lost.") if self.is_lost else None
        return _lost_error(why, server, [each.name for each in self.lost_variables])

    def require_all(self) -> None:
        """Check that nothing is lost.

        Raises:
            WorkerLostError: If a parameter server is, or a variable that was on one.
        """
        if not self.is_started:
            return
        if self.is_lost:
            raise self.lost_error()
        lost = [server for server in range(self.num_servers) if server not in self._handles]
        lost += [each.spec.shards[0].server for each in self.lost_variables]
        if lost:
            raise self.lost_error(lost[0])

    async def revive(self) -> None:
        """Make lost servers anew, without variables."""
        self.require_cluster()
        await self._begin_once()
        for server in [i for i, handle in self._handles.items() if handle.is_lost]:
            if self.copies is None or not await self.copies.repair(server):
                self.noticed(WorkerLostError("Its process is gone.", ranks=(server,)))
        for server in range(self.num_servers):
            if server not in self._handles:
                self.birth += server == LEASES
                await self._create(server)

    def require_cluster(self) -> None:
        """Check that there is a cluster, on which lost servers can be made anew.

        Raises:
            ContextError: If the strategy is closed.
            WorkerLostError: If it is lost.
        """
        self.require_open()
        if self.is_lost and not self.is_reopening:
            raise self.lost_error()

    def give_up(self) -> None:
        """Take the cluster and all it holds for lost, until `go_back`."""
        self.missing |= dict.fromkeys(sorted(numbers_of(self.variables) - self.pending.keys()))
        self._is_left = True

    async def reopen(self, engine: ClosureEngine) -> None:
        """Make all servers anew, without variables, on a cluster that may be another one.

        Raises:
            Exception: As `ClosureEngine.start`; all is lost then, as it is when cancelled.
        """
        async with self.lock:
            self.give_up()
            self.epoch += 1  # what the former workers still send is nothing any more
            await self._leave_engine(engine)
            await self._begin()

    async def go_back(self, step: int | None, next_step: int) -> Reopened:
        """Have iterators go back with a checkpoint, if there is one, and all be there again."""
        cut = None if step is None else self.progress.found(next_step)
        leases = {} if cut is None else {n: each.as_learned() for n, each in cut.leases.items()}
        birth = self.birth + (cut is None)
        await self.call(LEASES, "lease", leases, birth)
        self.birth, self._is_left = birth, False
        return self.progress.go_back(step, cut)

    async def make_anew(self, variable: ServedVariable, value: Any) -> Array:
        """Give a variable that was lost a value, on a server that is there."""
        if self.is_reopening:  # what the checkpoint has would take its place
            raise self.lost_error()
        async with self.lock:
            await self.revive()
            new = np.array(value)
            variable.come_home(new)
            await self.place([variable])
        return new

    # ---- for the coordinator -------------------------------------------------------------------

    async def learn(self, recipes: Mapping[int, tuple[int, bytes]], closure: int) -> None:
        """Tell all servers of optimizers that are new or have changed, as a closure has them."""
        for number, (version, recipe) in recipes.items():
            if self._recipes.get(number, (-1, b""))[0] < version:
                what = number, recipe, version, closure
                await self.all(dict.fromkeys(range(self.num_servers), what), "learn")
                self._recipes[number] = version, recipe

    async def report(self, oldest: int, newest: int = 0) -> list[ServerStatistics]:
        """Tell all servers which closures are over; return what they have done.

        Args:
            oldest: The oldest closure that is not over.
            newest: The number after the last closure; what nobody has any more may be used by
                those below.
        """
        self.oldest = oldest
        dropped = self.resources.dropped(oldest, newest)
        if dropped:
            self.progress.forget_iterators(dropped)
            self.engine.release(self.strategy_id, [("resource", number) for number in dropped])
        failed, finished = self.progress.untold(oldest)
        calls = dict.fromkeys(sorted(self._handles), (oldest, failed, dropped, finished))
        found = await self.all(calls, "report")
        self.progress.told((*failed, *finished))
        return [*found.values()]

    # ---- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let the cluster go; the variables are lost with it."""
        self.is_started = False
        await self._leave_engine()
        self.give_up()
        self._is_left = False

    async def _leave_engine(self, successor: ClosureEngine | None = None) -> None:
        self._handles.clear()
        if self.copies is not None:
            await self.copies.aclose()
        if self._has_engine:
            self.engine.release(self.strategy_id)
            self.strategy_id = uuid4().hex  # what workers had for themselves is made anew
            if successor is not self.engine:
                self._has_engine = False
                await self.engine.aclose()
        self.engine = successor or self.engine

    def __repr__(self) -> str:
        return f"<Servers | {self.num_servers} servers, {len(self.lost_variables)} variables lost>"


def living(variables: WeakValueDictionary[int, ServedVariable]) -> list[ServedVariable]:
    """Return the variables that there are; others may die on any thread meanwhile."""
    found = (each() for each in variables.valuerefs())
    return [variable for variable in found if variable is not None]


def numbers_of(variables: WeakValueDictionary[int, ServedVariable]) -> set[int]:
    """Return the numbers of the variables that there are."""
    return {variable.spec.variable_id for variable in living(variables)}


@final
class Places:
    """Numbers new variables and chooses servers for their shards.

    Args:
        num_servers: How many there are.
        variables: By number.
    """

    def __init__(self, num_servers: int, variables: Mapping[int, ServedVariable]) -> None:
        self._num_servers = num_servers
        self._variables = variables
        self._numbers = count()
        self._next = 0

    def new_spec(
        self, name: str, value: Array, trainable: bool, cuts: Sequence[tuple[int, int]]
    ) -> Spec:
        """Describe a new variable: on servers in turn, or on those of another one."""
        beside = BESIDE.get()
        if isinstance(beside, ServedVariable) and beside.spec.variable_id in self._variables:
            places = cycle([shard.server for shard in beside.spec.shards])
            shards = [ServedRows(next(places), *cut) for cut in cuts]
        else:
            first = self._next
            shards = [
                ServedRows((first + i) % self._num_servers, *cut) for i, cut in enumerate(cuts)
            ]
            self._next = (first + len(cuts)) % self._num_servers
        return Spec(next(self._numbers), name, value.shape, value.dtype, trainable, tuple(shards))

    def __repr__(self) -> str:
        return f"<Places | {self._num_servers} servers, {self._next} is next>"


@final
class Resources:
    """Numbers what workers keep, and knows what they can let go of."""

    def __init__(self) -> None:
        self._numbers = count()
        self._dropped: list[int] = []  # filled by whatever thread collects
        self._leaving: dict[int, int] = {}

    def new_number(self) -> int:
        """Return a number for one."""
        return next(self._numbers)

    def release_after(self, resource: Any) -> None:
        """Have workers let go of a resource when the program has let go of it."""
        weakref.finalize(resource, self._dropped.append, resource.number).atexit = False

    def dropped(self, oldest: int, newest: int) -> tuple[int, ...]:
        """Return what was dropped before the oldest closure was scheduled, each once."""
        while self._dropped:
            self._leaving[self._dropped.pop()] = newest
        gone = tuple(number for number, after in self._leaving.items() if after <= oldest)
        self._leaving = {n: after for n, after in self._leaving.items() if after > oldest}
        return gone

    def __repr__(self) -> str:
        return f"<Resources | {len(self._dropped) + len(self._leaving)} to be let go of>"


def _new_shards(
    variable: ServedVariable, call: object, stand_in: Array | None
) -> Iterator[tuple[int, NewShard]]:
    """Give the shards of a variable, each with its server."""
    spec, value = variable.spec, variable._cell.components[0]
    for i, part in split_value(spec, value):
        first: Array | ShardRows = part
        if call is not None and value is stand_in:  # no checkpoint has brought another
            first = ShardRows(call, spec.shards[i].begin, spec.shape_of(i), spec.dtype)
        key = spec.variable_id, i
        shard = NewShard(key, first, spec.name, spec.trainable, variable.constraint)
        yield spec.shards[i].server, shard


def _lost_error(why: str | None, server: int, names: Sequence[str]) -> WorkerLostError:
    listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    if why is not None:
        what = f" Lost are the variables {listed}." if names else ""
        return WorkerLostError(
            f"{why}{what} Call `await strategy.reopen(manager=manager, state=state)`, which goes "
            "back to the newest checkpoint.",
            variables=tuple(names),
        )
    what = f", and with it the variables {listed}" if names else ""
    return WorkerLostError(
        f"Parameter server {server} was lost{what}. Restore the newest checkpoint: `await "
        "manager.restore(state)` puts them on another one.",
        ranks=(server,),
        variables=tuple(names),
    )
