"""The parameter servers as the program sees them: what lives where, and what was lost.

Invariants:
    * A variable is pending, or every shard of it is on its server, or it is among the lost ones.
    * While a server is lost nothing is asked of it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle
from typing import Any, final
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from ...cluster import ClosureEngine, StateHandle
from ...context import BESIDE
from ...errors import ContextError, WorkerLostError
from ...values import IndexedSlices
from ._copies import CopiedServer, Copies
from ._messages import (
    FROM_COORDINATOR,
    Array,
    Key,
    NewShard,
    Pull,
    ServerStatistics,
    ShardRows,
    Spec,
    Stamp,
    Write,
)
from ._partition import ServedRows
from ._server import ParameterServer, frozen
from ._variables import ServedVariable, split_value

MAX_REPAIRS = 5
"""So many times a call is made again to a copy that has taken the place of its server."""

READS = ("pull", "slots")
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
        engine: As given.
        num_servers: As given.
        strategy_id: Tells the strategy from others, on workers.
        epoch: Counts how often a checkpoint was restored.
        oldest: The oldest closure that is not over, as the servers were told last.
        birth: How often the server was made anew that keeps the leases of iterators.
        is_started: Whether the servers were made.
        lock: Held while servers are made, and variables placed on them.
        variables: By number, as long as the program has them.
        pending: Those that are not placed yet.
        missing: The numbers of those that were lost with a server.
        settings: Of the optimizers that closures use, by number.
        resources: Numbers what workers keep.
        copies: Looks after the copies; None without them.
    """

    def __init__(
        self, engine: ClosureEngine, num_servers: int, max_staleness: int | None,
        replicate: bool = False,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.strategy_id = uuid4().hex
        self.epoch = 0
        self.oldest = 0
        self.num_servers = num_servers
        self._max_staleness = max_staleness
        self._handles: dict[int, StateHandle] = {}
        self._has_engine = False
        self._dropped: list[int] = []  # filled by whatever thread collects
        self._leaving: dict[int, int] = {}
        self.birth = 0
        self.lock = asyncio.Lock()
        self.is_started = False
        self.variables: WeakValueDictionary[int, ServedVariable] = WeakValueDictionary()
        self.pending: dict[int, ServedVariable] = {}
        self.missing: dict[int, None] = {}
        self._makers: dict[int, tuple[object, Array]] = {}
        self._numbers = count()
        self.resources = count()
        self._next_server = 0
        self._newest: dict[int, tuple[int, bytes]] = {}
        self._recipes: dict[int, tuple[int, bytes]] = {}  # that servers have
        self.settings: dict[int, Any] = {}
        self.copies = Copies(self._handles, self._new_copy) if replicate else None

    # ---- variables -------------------------------------------------------------------------

    def new_spec(
        self, name: str, value: Array, trainable: bool, cuts: Sequence[tuple[int, int]]
    ) -> Spec:
        """Number a new variable and choose servers for its shards: in turn, or as another one's."""
        beside = BESIDE.get()
        if isinstance(beside, ServedVariable) and beside.spec.variable_id in self.variables:
            places = cycle([shard.server for shard in beside.spec.shards])
            shards = [ServedRows(next(places), *cut) for cut in cuts]
        else:
            first = self._next_server
            shards = [
                ServedRows((first + i) % self.num_servers, *cut) for i, cut in enumerate(cuts)
            ]
            self._next_server = (first + len(cuts)) % self.num_servers
        return Spec(next(self._numbers), name, value.shape, value.dtype, trainable, tuple(shards))

    def add(self, variable: ServedVariable, rows_from: object = None) -> None:
        """Place a variable at the next occasion; servers call what makes its rows, if anything."""
        if rows_from is not None:
            self._makers[variable.spec.variable_id] = rows_from, variable._cell.components[0]
        self.variables[variable.spec.variable_id] = variable
        self.pending[variable.spec.variable_id] = variable

    def variable(self, number: int) -> ServedVariable:
        """Return a variable by its number."""
        return self.variables[number]

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
            WorkerLostError: If a parameter server was lost and not restored.
            Exception: As `ClosureEngine.start`.
        """
        if self.is_started and not self.pending and not self.missing:
            return
        async with self.lock:
            if not self.is_started:
                least = 1 if self.copies is None else 2  # a copy is in another process
                await self.engine.start(max(self.num_servers, least))
                self._has_engine = True
                for server in range(self.num_servers):
                    await self._create(server)
                self.is_started = True
            self.require_all()
            await self.place(self.pending.values())

    async def _create(self, server: int) -> None:
        create, owner = self.engine.create_state, self.strategy_id
        args = (server, self._max_staleness, self.epoch, self.oldest, self.birth)
        if self.copies is None:
            self._handles[server] = await create(owner, ParameterServer, args, server)
        else:
            self._handles[server] = await create(owner, CopiedServer, (False, *args), server)
            await self.copies.begin(server)

    async def _new_copy(self, server: int, primary: StateHandle) -> StateHandle:
        return await self.engine.create_state(
            self.strategy_id, CopiedServer, (True, server), server, apart_from=primary
        )

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
        if not error.ranks:
            return error
        for server in error.ranks:
            if self.copies is not None and not self.copies.is_lost(server):
                continue  # somebody could not reach it, but it is there
            if self._handles.pop(server, None) is not None:
                for number, variable in self.variables.items():
                    if number not in self.pending and any(
                        shard.server == server for shard in variable.spec.shards
                    ):
                        self.missing[number] = None
        return self.lost_error(error.ranks[0])

    @property
    def lost_variables(self) -> tuple[ServedVariable, ...]:
        """The variables that were on lost servers and were not restored."""
        alive = (self.variables.get(number) for number in sorted(self.missing))
        return tuple(v for v in alive if v is not None and v.spec.slot is None)

    def lost_error(self, server: int) -> WorkerLostError:
        """Say what was lost with a server."""
        return _lost_error(server, tuple(variable.name for variable in self.lost_variables))

    def require_all(self) -> None:
        """Check that nothing is lost.

        Raises:
            WorkerLostError: If a parameter server is, or a variable that was on one.
        """
        if not self.is_started:
            return
        for server in range(self.num_servers):
            if server not in self._handles:
                raise self.lost_error(server)
        lost = self.lost_variables
        if lost:
            raise self.lost_error(lost[0].spec.shards[0].server)

    async def revive(self) -> None:
        """Make lost servers anew, without variables."""
        for server in [i for i, handle in self._handles.items() if handle.is_lost]:
            if self.copies is None or not await self.copies.repair(server):
                self.noticed(WorkerLostError("Its process is gone.", ranks=(server,)))
        for server in range(self.num_servers):
            if server not in self._handles:
                self.birth += server == LEASES
                await self._create(server)
                for number, (version, recipe) in self._recipes.items():
                    await self.call(server, "learn", number, recipe, version)

    # ---- reading and writing -----------------------------------------------------------------

    async def read(self, variable: ServedVariable, rows: Array | None) -> Array:
        """Return a value, or rows whose indices were checked."""
        await self.ready()
        spec = variable.spec
        flat: Array | None = None
        inverse: Array | None = None
        if rows is not None:
            flat, inverse = np.unique(rows.reshape(-1), return_inverse=True)
        requests = _pulls_of(spec, flat)
        answers = await self.all({s: (pulls,) for s, pulls in requests.items()}, "pull")
        found: dict[Key, Array] = {}
        for server, pulls in requests.items():
            for pull, (_, value) in zip(pulls, answers[server], strict=True):
                found[pull.key] = value
        parts = [found[key] for key in sorted(found)]
        if inverse is None or rows is None:
            whole: Array = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
        else:
            empty = np.empty((0, *spec.shape[1:]), spec.dtype)
            whole = np.concatenate([empty, *parts])[inverse]
            whole = whole.reshape(*rows.shape, *spec.shape[1:])
        whole.flags.writeable = False
        return whole

    async def write(self, variable: ServedVariable, verb: str, value: Any) -> Array:
        """Write from the program; return the new value."""
        if verb == "assign" and variable.spec.variable_id in self.missing:
            return await self._make_anew(variable, value)
        await self.ready()
        spec = variable.spec
        if spec.slot is not None:
            raise ContextError(
                f"{variable.name!r} is a slot of an optimizer, which only updates write. Restore a "
                "checkpoint to replace it."
            )
        items: dict[int, list[Write]] = {}
        for i, part in split_value(spec, value):
            write = Write((spec.variable_id, i), 0, verb, part)
            items.setdefault(spec.shards[i].server, []).append(write)
        stamp = Stamp(self.epoch, FROM_COORDINATOR, self.oldest, uuid4().hex)
        await self.all({s: (stamp, each) for s, each in items.items()}, "push")
        if verb == "assign" and not isinstance(value, IndexedSlices):
            return frozen(value)
        return await self.read(variable, None)

    async def _make_anew(self, variable: ServedVariable, value: Any) -> Array:
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
                self._recipes[number] = version, recipe
                what = number, recipe, version, closure
                await self.all(dict.fromkeys(range(self.num_servers), what), "learn")

    async def report(
        self, oldest: int, newest: int = 0, failed: Sequence[int] = ()
    ) -> list[ServerStatistics]:
        """Tell all servers which closures are over; return what they have done.

        Args:
            oldest: The oldest closure that is not over.
            newest: The number after the last closure; what nobody has any more may be used by
                those below.
            failed: Closures that have ended badly.
        """
        self.oldest = oldest
        dropped = self._release_dropped(oldest, newest)
        living = [server for server in range(self.num_servers) if server in self._handles]
        calls = dict.fromkeys(living, (oldest, tuple(failed), dropped))
        found = await self.all(calls, "report")
        return [found[server] for server in living]

    def release_after(self, resource: Any) -> None:
        """Have workers let go of a resource when the program has let go of it."""
        weakref.finalize(resource, self._dropped.append, resource.number).atexit = False

    def _release_dropped(self, oldest: int, newest: int) -> tuple[int, ...]:
        """Release what was dropped before the oldest closure was scheduled; return its numbers."""
        while self._dropped:
            self._leaving[self._dropped.pop()] = newest
        gone = tuple(number for number, after in self._leaving.items() if after <= oldest)
        self._leaving = {n: after for n, after in self._leaving.items() if after > oldest}
        if gone:
            self.engine.release(self.strategy_id, [("resource", number) for number in gone])
        return gone

    # ---- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let the cluster go; the variables are lost with it."""
        was_started, self.is_started = self.is_started, False
        if self.copies is not None:
            await self.copies.aclose()
        self._handles.clear()
        if self._has_engine:
            self._has_engine = False
            self.engine.release(self.strategy_id)
            await self.engine.aclose()
        if was_started:
            self.missing |= dict.fromkeys(sorted({*self.variables} - self.pending.keys()))

    def __repr__(self) -> str:
        size, lost = len(self.variables), len(self.lost_variables)
        return f"<Servers | {self.num_servers} servers, {size} variables, {lost} lost>"


def _pulls_of(spec: Spec, rows: Array | None) -> dict[int, list[Pull]]:
    """Return how to ask each server for a variable, or for rows of it."""
    requests: dict[int, list[Pull]] = {}
    for i, shard in enumerate(spec.shards):
        pull = Pull((spec.variable_id, i), slot=spec.slot)
        if rows is not None:
            mine = rows[(rows >= shard.begin) & (rows < shard.end)] - shard.begin
            if not mine.size:
                continue
            pull = pull._replace(rows=mine)
        requests.setdefault(shard.server, []).append(pull)
    return requests


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


def _lost_error(server: int, names: tuple[str, ...]) -> WorkerLostError:
    listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    what = f", and with it the variables {listed}" if names else ""
    return WorkerLostError(
        f"Parameter server {server} was lost{what}. Restore the newest checkpoint: `await "
        "manager.restore(state)` puts them on another one.",
        ranks=(server,),
        variables=names,
    )
