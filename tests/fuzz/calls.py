"""The calls that a program's replicas make, its merge functions, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.devices.backends import reduce_in_namespace
from aioreplica.tree import map_leaves
from aioreplica.typing import ReduceOp
from tests.fuzz import model
from tests.fuzz.program import Plant, Program, Statement

UNIT_S = {False: 0.05, True: 0.001}  # simulated, real


class PlantedError(Exception):
    """What programs raise; every one is told apart."""


class PlantedBaseError(BaseException):
    """What is no Exception."""


class HostileError(PlantedError):
    """One that refuses notes and whose texts raise."""

    def add_note(self, note: str, /) -> None:
        raise RuntimeError(f"no notes here: {note}")

    def __str__(self) -> str:
        raise RuntimeError("no text here")

    __repr__ = __str__


@dataclass
class Outcome:
    """How a program ended.

    Attributes:
        error: What its run raised.
        results: What every replica got, by statement.
        booms: The exceptions that were raised, by replica (-1 for a merge) and statement.
        sent: Whether the cancellation or the timeout from outside struck.
        left: What was left behind.
        snapshots: What readers saw of the variables meanwhile, and at the end.
        probe: What a small run on the same strategy gave afterwards.
        alarms: Warnings, logged errors and exceptions that nobody could see.
        warned: How often a lost handle was warned of.
        circles: How often it was warned that replicas seem to wait for each other.
    """

    error: BaseException | None = None
    results: list[dict[int, Any]] = field(default_factory=list)
    booms: dict[tuple[int, int], BaseException] = field(default_factory=dict)
    sent: bool = False
    left: list[str] = field(default_factory=list)
    snapshots: list[tuple[float, float, float]] = field(default_factory=list)
    probe: Any = None
    alarms: list[str] = field(default_factory=list)
    warned: int = 0
    circles: int = 0


PLANTED = PlantedError, PlantedBaseError


class Calls:
    """The calls of one run of a program, and its merge functions."""

    pair: tuple[ar.Variable, ar.Variable]
    lone: ar.Variable
    sgd: ar.optimizers.SGD

    def __init__(self, program: Program, outcome: Outcome) -> None:
        self.program = program
        self.outcome = outcome
        self.merges = {
            "total": self.total, "turned": self.turned, "async turned": self.async_turned,
            "raise": self.raising, "base raise": self.base_raising,
            "async raise": self.async_raising, "reduced": self.reduced,
        }  # fmt: skip

    def make_variables(self, strategy: ar.Strategy) -> None:
        """Make what programs write to."""
        with strategy.scope():
            self.pair = ar.Variable(0.0, name="u"), ar.Variable(0.0, name="v")
            self.lone = ar.Variable(0.0, name="w", aggregation="sum")
            self.sgd = ar.optimizers.SGD(1.0)

    # ---- naps ----------------------------------------------------------------------------

    def seconds(self, nap: int) -> float:
        return max(nap - 9, 0) * UNIT_S[self.program.real]

    async def nap(self, nap: int) -> None:
        if nap >= 10:
            await asyncio.sleep(self.seconds(nap))
        for _ in range(nap if nap < 10 else 0):
            await asyncio.sleep(0)

    # ---- arrays --------------------------------------------------------------------------

    def argument(self, statement: Statement, me: int) -> Any:
        """Return what a replica brings; on a device with streams it is there some time later."""
        value = model.argument(self.program, statement, me)
        if not self.program.streams or statement.kind == "agree":
            return value
        from tests.devices import streams

        return map_leaves(lambda x: streams.upload(x) if isinstance(x, np.ndarray) else x, value)

    def keep(self, results: list[Any], me: int, uid: int) -> None:
        """Take a result out of a list, and keep its numbers.

        Arrays of a device are read behind the stream of the thread alone, and from copies: when
        these are made, on the device, the result itself has been let go. Tasks read some of them
        at once, before other streams may have run, and the rest at the end of the run, when
        everybody has let go of what was copied.
        """
        if self.program.streams:
            from tests.devices import streams

            results[:] = [map_leaves(streams.copied, results.pop())]
            if uid % 2 == 0 or self.program.flavour == "plain":
                results[:] = [map_leaves(streams.frozen, results.pop())]
        self.outcome.results[me][uid] = results.pop()

    def read_the_rest(self) -> None:
        """Read the results that are on a device still; on the event loop."""
        if self.program.streams:
            from tests.devices import streams

            for found in self.outcome.results:
                for uid, result in found.items():
                    found[uid] = map_leaves(streams.frozen, result)

    # ---- calls ---------------------------------------------------------------------------

    def members(self, statement: Statement, own: Any) -> Any:
        """Return the context of everyone or of a group."""
        return own if len(statement.members) == self.program.size else own.group(statement.members)

    def call(self, statement: Statement, me: int, kind: str = "", differs: bool = False) -> Any:
        """Make the statement's call; return what to await."""
        made = self.call_on(context(), statement, me, kind, differs)
        if statement.kind == "merge_call" and statement.op.endswith("raise"):
            return self.expecting(made, statement)
        return self.nothing(made) if statement.kind == "assign" and not kind else made

    async def expecting(self, made: Awaitable[Any], statement: Statement) -> Any:
        try:
            return await made
        except PLANTED as error:
            return self.seen(error, statement)

    def seen(self, error: BaseException, statement: Statement) -> str:
        """Look at what a merge raised; that everyone catches it is part of the program."""
        if self.program.plant_of(-1, statement.uid):
            raise error
        return "raised" if error is self.outcome.booms.get((-1, statement.uid)) else "otherwise"

    def call_blocking(
        self, statement: Statement, me: int, own: Any, kind: str = "", differs: bool = False
    ) -> Any:
        """Make the statement's call on the device thread."""
        try:
            return self.call_on(own.blocking, statement, me, kind, differs)
        except PLANTED as error:
            if statement.kind == "merge_call" and statement.op.endswith("raise"):
                return self.seen(error, statement)
            raise

    def call_on(
        self, own: Any, statement: Statement, me: int, kind: str = "", differs: bool = False
    ) -> Any:
        """Make the statement's call, or one of another kind, or one that differs in a detail."""
        members, op = self.members(statement, own), statement.op
        is_blocking = not isinstance(own, ar.ReplicaContext)
        value: Any = None
        if statement.kind not in {"barrier", "any", "all", "write", "assign"}:
            giver = statement.members[0] if statement.kind == "agree" else me
            value = self.argument(statement, giver)
            value = [value] if differs and statement.kind != "message" else value
        match kind or statement.kind:
            case "message":
                source, destination = statement.members
                tag = "another" if differs else statement.number or None
                if me == source:
                    return own.send(value, to=destination, tag=tag)
                return own.receive(from_=source, tag=tag)
            case "barrier":
                return members.barrier()
            case "any" | "all" as name:
                return getattr(members, name)(model.flag(self.program, statement, me))
            case "agree":
                return members.agree(value)
            case "all_reduce" | "reduce_scatter" | "start" as name:
                name = "start_all_reduce" if name == "start" else name
                return getattr(members, name)(op, value)
            case "all_gather" | "all_to_all" as name:
                return getattr(members, name)(value, statement.number)
            case "broadcast":
                source = (statement.number + differs) % len(statement.members)
                return members.broadcast(value, source)
            case "merge_call":
                other = "turned" if op == "total" else "total"
                merge = self.merges[other if differs else op]
                return members.merge_call(merge, (str(statement.uid), value))
            case "write":
                x = model.step_of(self.program, statement, me)
                pairs = [(-x, self.pair[0]), (-2 * x, self.pair[1])]
                sgd: Any = self.sgd.blocking if is_blocking else self.sgd
                return sgd.apply_gradients(pairs)
        lone: Any = self.lone.blocking if is_blocking else self.lone
        return lone.assign_add(model.step_of(self.program, statement, me))

    async def nothing(self, made: Awaitable[Any]) -> None:
        await made

    # ---- merge functions -----------------------------------------------------------------

    def check_plant(self, uid: str) -> None:
        if self.program.plant_of(-1, int(uid)):
            raise self.boom(-1, int(uid))

    def total(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        statement = self.program.statement(int(uid))
        columns = zip(*map(model.leaves_of, _parts(values, len(statement.members))), strict=True)
        sums = [self.summed(column) for column in columns]
        return model.tree(statement.value, sums)

    def summed(self, parts: tuple[Any, ...]) -> Any:
        if not self.program.streams or isinstance(parts[0], (bool, int, float)):
            return model.reduced("sum", list(parts))
        return reduce_in_namespace(ReduceOp.SUM, parts)

    def turned(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        parts = _parts(values, len(self.program.statement(int(uid)).members))
        return ar.PerReplica(parts[::-1])

    async def async_turned(self, strategy: Any, uid: str, values: Any) -> Any:
        await self.nap(11)
        return self.turned(strategy, uid, values)

    def raising(self, strategy: Any, uid: str, values: Any) -> Any:
        raise self.boom(-1, int(uid))

    def base_raising(self, strategy: Any, uid: str, values: Any) -> Any:
        raise self.boom(-1, int(uid), PlantedBaseError)

    async def async_raising(self, strategy: Any, uid: str, values: Any) -> Any:
        await self.nap(11)
        raise self.boom(-1, int(uid))

    async def reduced(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        return await strategy.reduce("sum", values)

    def boom(
        self, replica: int, uid: int, kind: type[BaseException] = PlantedError
    ) -> BaseException:
        """Return the exception of a plant; made once, so that it can be known again."""
        if (replica, uid) in self.outcome.booms:
            raise AssertionError(f"what only one may raise was raised twice: {replica}, {uid}")
        made = kind(f"planted in replica {replica} at {uid}")
        self.outcome.booms[replica, uid] = made
        return made

    def otherwise(self, plant: Plant, statement: Statement, me: int, own: Any) -> Any:
        """Make another call than the others do, or the same with another argument."""
        plain = {"any", "all", "barrier", "write", "assign"}
        if statement.kind == "message":
            return self.call_on(own, statement, me, differs=True)
        if plant.kind == "other" or statement.kind in plain:
            return self.call_on(
                own, statement, me, "any" if statement.kind == "barrier" else "barrier"
            )
        return self.call_on(own, statement, me, differs=True)


def context() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def _parts(values: Any, count: int) -> list[Any]:
    """Take a tree of PerReplica values apart, replica by replica."""

    def part(value: Any, i: int) -> Any:
        if isinstance(value, ar.PerReplica):
            return value.values[i]
        if isinstance(value, dict):
            return {key: part(one, i) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(part(one, i) for one in value)
        return value

    return [part(values, i) for i in range(count)]
