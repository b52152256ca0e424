"""Checkpoints of variables on parameter servers: values come home, and go out again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from ...values import Variable, VariableOptions
from ._messages import Array, Key, SlotSpec
from ._servers import LEASES, Servers, living
from ._variables import ServedVariable, new_served, read_from, split_value


@final
class Elsewhere:
    """Brings values of variables and slots into the program, and sends out those of a checkpoint.

    Args:
        servers: Where they live.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def bring_home(self, variables: Iterable[Variable]) -> None:
        """Hold the values of variables in the program, and list the slots of their optimizers.

        Closures are held back. The number of the next one is that of a cut then, by which closures
        and iterators know again where they were.

        Raises:
            WorkerLostError: If a parameter server is gone.
        """
        await self._servers.ready()
        own = [v for v in variables if isinstance(v, ServedVariable) and not v.is_home]
        own += await self._list_slots()
        for variable in dict.fromkeys(own):
            variable.come_home(await read_from(self._servers, variable, None))
        leases = await self._servers.call(LEASES, "leases")
        for gate in {v.store.gate: None for v in variables if isinstance(v, ServedVariable)}:
            gate.next_step = self._servers.progress.cut(gate.next_step, leases)

    def require_cluster(self) -> None:
        """Check that there is a cluster that a checkpoint can go to.

        Raises:
            WorkerLostError: If it was lost, and is not being made anew.
        """
        self._servers.require_cluster()

    def leave_home(self) -> None:
        """Let go of the values that `bring_home` has brought."""
        for variable in [*living(self._servers.variables), *self._slots()]:
            is_pending = (
                variable.spec.slot is None and variable.spec.variable_id in self._servers.pending
            )
            if variable.is_home and not is_pending:
                variable.leave_home()

    def _slots(self) -> list[ServedVariable]:
        return [slot for each in self._servers.settings.values() for slot in each.slots.all()]

    async def _list_slots(self) -> list[ServedVariable]:
        """Make a variable for each slot on the servers, as part of its optimizer."""
        found = await self._servers.all(
            dict.fromkeys(range(self._servers.num_servers), ()), "slots"
        )
        pairs: dict[tuple[int, int], dict[str, SlotSpec]] = {}
        for each in found.values():
            for spec in each:
                pairs.setdefault((spec.key[0], spec.slot[0]), {})[spec.slot[1]] = spec
        made: list[ServedVariable] = []
        for (number, optimizer), specs in sorted(pairs.items()):
            variable, settings = (
                self._servers.variables.get(number),
                self._servers.settings.get(optimizer),
            )
            if variable is None or settings is None:
                continue
            settings.slots.restored.pop(variable)
            known = settings.slots.made.get(variable)
            if known is None:
                known = tuple(
                    self._slot_variable(variable, specs[name])
                    for name in settings.slots.names_of(variable)
                )
                settings.slots.made[variable] = known
            made += [slot for slot in known if not slot.is_home]
        return made

    def _slot_variable(self, variable: ServedVariable, slot: SlotSpec) -> ServedVariable:
        full = f"{variable.name}/{slot.slot[1]}"
        shape = slot.shape if variable.num_shards == 1 else variable.shape
        spec = variable.spec._replace(
            name=full, shape=shape, dtype=slot.dtype, trainable=False, slot=slot.slot
        )
        options = VariableOptions(full, trainable=False, aggregation=variable.aggregation)
        return new_served(spec, options, variable.store, self._servers)

    async def send_out(self, variables: Iterable[Variable], composites: Iterable[object]) -> None:
        """Give the servers what a checkpoint has put into variables and optimizers.

        Servers are started if there are slots for them; lost ones are made anew.
        """
        slots = self._restored_slots(composites := [*composites])
        if not (self._servers.is_started or self._servers.missing or slots):
            return  # what is restored is placed at the start
        restored = [
            v
            for v in variables
            if isinstance(v, ServedVariable) and v.spec.slot is None and v._cell.number > 0
        ]
        async with self._servers.lock:
            self._servers.epoch += 1
            await self._servers.revive()
            anew = [v for v in restored if v.spec.variable_id in self._servers.missing]
            for variable in anew:
                variable.come_home(variable._cell.components[0])
            values: dict[int, dict[Key, Array]] = {s: {} for s in range(self._servers.num_servers)}
            for variable in restored:
                if variable.spec.variable_id in self._servers.pending:
                    continue
                spec = variable.spec
                for i, part in split_value(spec, variable._cell.components[0]):
                    values[spec.shards[i].server][spec.variable_id, i] = part
            optimizers = _optimizers_among(restored, composites)
            await self._servers.place([*anew, *self._servers.pending.values()])
            epoch, oldest = self._servers.epoch, self._servers.oldest
            calls = {
                server: (each, slots.get(server, {}), epoch, oldest, optimizers)
                for server, each in values.items()
            }
            await self._servers.all(calls, "load")
            for variable in restored:
                variable.leave_home()
        self.leave_home()
        progress = self._servers.progress
        cuts = (progress.found(v.store.gate.next_step) for v in restored[:1])
        if not self._servers.is_reopening and (cut := next(cuts, None)) is not None:
            progress.go_back(None, cut)  # what that undoes is not to be told by a later reopening

    def _restored_slots(
        self, composites: Iterable[Any]
    ) -> dict[int, dict[tuple[Key, int], dict[str, Array]]]:
        found: dict[int, dict[tuple[Key, int], dict[str, Array]]] = {}
        for settings in composites:
            iterations = getattr(settings, "iterations", None)
            if not isinstance(iterations, ServedVariable):
                continue
            table, number = settings.slots, iterations.spec.variable_id
            self._servers.settings[number] = settings
            values: dict[ServedVariable, dict[str, Array]] = {}
            for owner, slots in table.made.items():
                if all(slot._cell.number > 0 for slot in slots):
                    values[owner] = {
                        name: slot._cell.components[0]
                        for name, slot in zip(table.names_of(owner), slots, strict=True)
                    }
            values.update(table.restored.items())
            for owner, named in values.items():
                for name, value in named.items():
                    for i, part in split_value(owner.spec, value):
                        server = owner.spec.shards[i].server
                        key = ((owner.spec.variable_id, i), number)
                        found.setdefault(server, {}).setdefault(key, {})[name] = part
        return found

    def __repr__(self) -> str:
        return f"<Elsewhere | {self._servers!r}>"


def _optimizers_among(restored: Iterable[ServedVariable], composites: Iterable[Any]) -> list[int]:
    """Return the numbers of the optimizers that a checkpoint has brought."""
    numbers = {variable.spec.variable_id for variable in restored}
    counters = (getattr(settings, "iterations", None) for settings in composites)
    own = (each.spec.variable_id for each in counters if isinstance(each, ServedVariable))
    return [number for number in own if number in numbers]
