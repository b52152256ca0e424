"""The parameter servers as the program sees them: what lives where, and what was lost.

Invariants:
    * A variable is pending, or every shard of it is on its server, or it is among the lost ones.
    * While a server is lost nothing is asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, final
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from ...cluster import ClosureEngine, StateHandle
from ...errors import ContextError, WorkerLostError
from ...values import IndexedSlices, Variable, VariableOptions
from ._messages import (
    FROM_COORDINATOR,
    Array,
    Key,
    NewShard,
    Pull,
    ServerStatistics,
    Spec,
    Stamp,
    Write,
)
from ._partition import Shard
from ._server import ParameterServer
from ._variables import ServedVariable, new_served, split_value


@final
class Servers:
    """Makes parameter servers, places variables on them and asks them.

    Args:
        engine: Where they are.
        num_servers: How many.
        is_sync: Whether pushes wait for the commit of their step.
        max_staleness: Gradients that are older are dropped; None drops none.
    """

    def __init__(
        self, engine: ClosureEngine, num_servers: int, is_sync: bool, max_staleness: int | None
    ) -> None:
        self.engine = engine
        self.strategy_id = uuid4().hex
        self.epoch = 0
        self.oldest = 0
        self._num_servers = num_servers
        self._is_sync = is_sync
        self._max_staleness = max_staleness
        self._handles: dict[int, StateHandle] = {}
        self._lock = asyncio.Lock()
        self._is_started = False
        self._variables: WeakValueDictionary[int, ServedVariable] = WeakValueDictionary()
        self._pending: dict[int, ServedVariable] = {}
        self._missing: dict[int, None] = {}
        self._numbers = count()
        self._resources = count()
        self._next_server = 0
        self._recipes: dict[int, bytes] = {}
        self._settings: dict[int, Any] = {}

    # ---- variables -------------------------------------------------------------------------

    def new_spec(
        self, name: str, value: Array, trainable: bool, cuts: Sequence[tuple[int, int]]
    ) -> Spec:
        """Number a new variable and choose servers for its shards, one after the other."""
        shards = []
        for begin, end in cuts:
            shards.append(Shard(self._next_server, begin, end))
            self._next_server = (self._next_server + 1) % self._num_servers
        return Spec(next(self._numbers), name, value.shape, value.dtype, trainable, tuple(shards))

    def add(self, variable: ServedVariable) -> None:
        """Place a variable at the next occasion."""
        self._variables[variable.spec.variable_id] = variable
        self._pending[variable.spec.variable_id] = variable

    def variable(self, number: int) -> ServedVariable:
        """Return a variable by its number."""
        return self._variables[number]

    def next_resource(self) -> int:
        """Number a resource of the workers."""
        return next(self._resources)

    def know(self, number: int, settings: Any) -> None:
        """Remember the settings of an optimizer that closures use."""
        self._settings[number] = settings

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """Every server, by number."""
        return tuple(self._handles[i] for i in range(self._num_servers))

    # ---- starting and asking ---------------------------------------------------------------

    async def ready(self) -> None:
        """Start the cluster and place variables that are new.

        Raises:
            WorkerLostError: If a parameter server was lost and not restored.
            Exception: As `ClosureEngine.start`.
        """
        if self._is_started and not self._pending and not self._missing:
            return
        async with self._lock:
            if not self._is_started:
                await self.engine.start(self._num_servers)
                for server in range(self._num_servers):
                    await self._create(server)
                self._is_started = True
            self.require_all()
            await self._place(self._pending.values())

    async def _create(self, server: int, first_index: int = 0) -> None:
        args = (
            server, self._is_sync, self._max_staleness, self.epoch, self.oldest, first_index
        )  # fmt: skip
        self._handles[server] = await self.engine.create_state(ParameterServer, args, server)

    async def _place(self, variables: Iterable[ServedVariable]) -> None:
        batch = [*variables]
        new: dict[int, list[NewShard]] = {}
        for variable in batch:
            spec, value = variable.spec, variable.cell.components[0]
            for i, part in split_value(spec, value):
                constraint = variable.constraint
                shard = NewShard((spec.variable_id, i), part, spec.name, spec.trainable, constraint)
                new.setdefault(spec.shards[i].server, []).append(shard)
        await self._all({server: (shards,) for server, shards in new.items()}, "create")
        for variable in batch:
            variable.leave_home()
            self._missing.pop(variable.spec.variable_id, None)
            self._pending.pop(variable.spec.variable_id, None)

    async def call(self, server: int, method: str, *args: Any) -> Any:
        """Ask a server.

        Raises:
            WorkerLostError: If it is gone; names its variables.
            Exception: What the method raises.
        """
        handle = self._handles.get(server)
        if handle is None:
            raise self.lost_error(server)
        try:
            return await handle.call(method, *args)
        except WorkerLostError as error:
            raise self.noticed(error) from error

    async def _all(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> dict[int, Any]:
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
            if self._handles.pop(server, None) is not None:
                for number, variable in self._variables.items():
                    if number not in self._pending and any(
                        shard.server == server for shard in variable.spec.shards
                    ):
                        self._missing[number] = None
        return self.lost_error(error.ranks[0])

    @property
    def lost_variables(self) -> tuple[ServedVariable, ...]:
        """The variables that were on lost servers and were not restored."""
        alive = (self._variables.get(number) for number in sorted(self._missing))
        return tuple(v for v in alive if v is not None and v.spec.slot is None)

    def lost_error(self, server: int) -> WorkerLostError:
        """Say what was lost with a server."""
        names = tuple(variable.name for variable in self.lost_variables)
        listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        what = f", and with it the variables {listed}" if names else ""
        return WorkerLostError(
            f"Parameter server {server} was lost{what}. Restore the newest checkpoint: `await "
            "manager.restore(state)` puts them on another one.",
            ranks=(server,),
            variables=names,
        )

    def require_all(self) -> None:
        """Check that nothing is lost.

        Raises:
            WorkerLostError: If a parameter server is, or a variable that was on one.
        """
        if not self._is_started:
            return
        for server in range(self._num_servers):
            if server not in self._handles:
                raise self.lost_error(server)
        lost = self.lost_variables
        if lost:
            raise self.lost_error(lost[0].spec.shards[0].server)

    async def _revive(self) -> None:
        """Make lost servers anew, without variables."""
        for server in range(self._num_servers):
            if server not in self._handles:
                await self._create(server, first_index=self.engine.num_workers)
                for number, recipe in self._recipes.items():
                    await self.call(server, "learn", number, recipe)

    # ---- reading and writing -----------------------------------------------------------------

    async def read(self, variable: ServedVariable, rows: Array | None) -> Array:
        """Return a value, or rows whose indices were checked."""
        await self.ready()
        spec = variable.spec
        flat: Array | None = None
        inverse: Array | None = None
        if rows is not None:
            flat, inverse = np.unique(rows.reshape(-1), return_inverse=True)
        requests: dict[int, list[Pull]] = {}
        for i, shard in enumerate(spec.shards):
            pull = Pull((spec.variable_id, i), slot=spec.slot)
            if flat is not None:
                mine = flat[(flat >= shard.begin) & (flat < shard.end)] - shard.begin
                if not mine.size:
                    continue
                pull = pull._replace(rows=mine)
            requests.setdefault(shard.server, []).append(pull)
        answers = await self._all({s: (pulls,) for s, pulls in requests.items()}, "pull")
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
        if verb == "assign" and variable.spec.variable_id in self._missing:
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
        stamp = Stamp(self.epoch, FROM_COORDINATOR, self.oldest)
        await self._all({s: (stamp, each) for s, each in items.items()}, "push")
        if verb == "assign" and not isinstance(value, IndexedSlices):
            new = np.array(value)
            new.flags.writeable = False
            return new
        return await self.read(variable, None)

    async def _make_anew(self, variable: ServedVariable, value: Any) -> Array:
        async with self._lock:
            await self._revive()
            new = np.array(value)
            variable.come_home(new)
            await self._place([variable])
        return new

    # ---- for the coordinator -------------------------------------------------------------------

    async def learn(self, recipes: Mapping[int, bytes]) -> None:
        """Tell all servers of optimizers that are new or have changed."""
        for number, recipe in recipes.items():
            if self._recipes.get(number) != recipe:
                self._recipes[number] = recipe
                everyone = dict.fromkeys(range(self._num_servers), (number, recipe))
                await self._all(everyone, "learn")

    async def commit(self, step: int, closures: Sequence[int], num_replicas: int) -> None:
        """Apply a step of the synchronous mode on all servers."""
        args = (step, tuple(closures), num_replicas)
        await self._all(dict.fromkeys(range(self._num_servers), args), "commit")

    async def report(self, oldest: int, step: int) -> list[ServerStatistics]:
        """Tell all servers which closures are over; return what they have done."""
        self.oldest = oldest
        living = [server for server in range(self._num_servers) if server in self._handles]
        found = await self._all(dict.fromkeys(living, (oldest, step)), "report")
        return [found[server] for server in living]

    # ---- checkpoints ---------------------------------------------------------------------------

    async def bring_home(self, variables: Iterable[Variable]) -> None:
        """Hold the values of variables in the program, and list the slots of their optimizers.

        Raises:
            WorkerLostError: If a parameter server is gone.
        """
        await self.ready()
        own = [v for v in variables if isinstance(v, ServedVariable) and not v.is_home]
        own += await self._list_slots()
        for variable in dict.fromkeys(own):
            variable.come_home(await self.read(variable, None))

    def leave_home(self) -> None:
        """Let go of the values that `bring_home` has brought."""
        for variable in [*self._variables.values(), *self._slots()]:
            is_pending = variable.spec.slot is None and variable.spec.variable_id in self._pending
            if variable.is_home and not is_pending:
                variable.leave_home()

    def _slots(self) -> list[ServedVariable]:
        return [slot for each in self._settings.values() for slot in each.slots.all()]

    async def _list_slots(self) -> list[ServedVariable]:
        """Make a variable for each slot on the servers, as part of its optimizer."""
        found = await self._all(dict.fromkeys(range(self._num_servers), ()), "slots")
        pairs = {(key[0], slot[0]) for each in found.values() for key, slot in each}
        made: list[ServedVariable] = []
        for number, optimizer in sorted(pairs):
            variable, settings = self._variables.get(number), self._settings.get(optimizer)
            if variable is None or settings is None:
                continue
            settings.slots.restored.pop(variable)
            known = settings.slots.made.get(variable)
            if known is None:
                known = tuple(
                    self._slot_variable(variable, optimizer, name) for name in settings.slots.names
                )
                settings.slots.made[variable] = known
            made += [slot for slot in known if not slot.is_home]
        return made

    def _slot_variable(self, variable: ServedVariable, optimizer: int, name: str) -> ServedVariable:
        full = f"{variable.name}/{name}"
        spec = variable.spec._replace(name=full, trainable=False, slot=(optimizer, name))
        options = VariableOptions(full, trainable=False, aggregation=variable.aggregation)
        return new_served(spec, options, variable.strategy, variable.store, self)

    async def send_out(self, variables: Iterable[Variable], composites: Iterable[Any]) -> None:
        """Give the servers what a checkpoint has put into variables and optimizers.

        Lost servers are made anew first.
        """
        if not self._is_started:
            return  # what is restored is placed at the start
        restored = [
            v
            for v in variables
            if isinstance(v, ServedVariable) and v.spec.slot is None and v.cell.number > 0
        ]
        async with self._lock:
            self.epoch += 1
            await self._revive()
            anew = [v for v in restored if v.spec.variable_id in self._missing]
            for variable in anew:
                variable.come_home(variable.cell.components[0])
            values: dict[int, dict[Key, Array]] = {s: {} for s in range(self._num_servers)}
            for variable in restored:
                if variable.spec.variable_id in self._pending:
                    continue
                spec = variable.spec
                for i, part in split_value(spec, variable.cell.components[0]):
                    values[spec.shards[i].server][spec.variable_id, i] = part
            slots = self._restored_slots(composites)
            await self._place([*anew, *self._pending.values()])
            calls = {
                server: (each, slots.get(server, {}), self.epoch, self.oldest)
                for server, each in values.items()
            }
            await self._all(calls, "load")
            for variable in restored:
                variable.leave_home()
        self.leave_home()

    def _restored_slots(
        self, composites: Iterable[Any]
    ) -> dict[int, dict[tuple[Key, int], dict[str, Array]]]:
        found: dict[int, dict[tuple[Key, int], dict[str, Array]]] = {}
        for settings in composites:
            iterations = getattr(settings, "iterations", None)
            if not isinstance(iterations, ServedVariable):
                continue
            table, number = settings.slots, iterations.spec.variable_id
            self._settings[number] = settings
            values: dict[ServedVariable, dict[str, Array]] = {}
            for owner, slots in table.made.items():
                if all(slot.cell.number > 0 for slot in slots):
                    values[owner] = {
                        name: slot.cell.components[0]
                        for name, slot in zip(table.names, slots, strict=True)
                    }
            values.update(table.restored.items())
            for owner, named in values.items():
                for name, value in named.items():
                    for i, part in split_value(owner.spec, value):
                        server = owner.spec.shards[i].server
                        key = ((owner.spec.variable_id, i), number)
                        found.setdefault(server, {}).setdefault(key, {})[name] = part
        return found

    # ---- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let the cluster go; the variables are lost with it."""
        was_started, self._is_started = self._is_started, False
        self._handles.clear()
        await self.engine.aclose()
        if was_started:
            for number in tuple(self._variables):
                if number not in self._pending:
                    self._missing[number] = None

    def __repr__(self) -> str:
        size, lost = len(self._variables), len(self.lost_variables)
        return f"<Servers | {self._num_servers} servers, {size} variables, {lost} lost>"
