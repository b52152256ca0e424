"""What a program must do: its results by NumPy alone, and how its run must end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fuzz.program import MEETINGS, TALKS, Plant, Program, Statement, Value, may_stall

LEAVES = {"leaf": 1, "pair": 2, "dict": 2, "nest": 3}


# ---- what replicas bring --------------------------------------------------------------------


def argument(program: Program, statement: Statement, replica: int) -> Any:
    """Return what a replica brings to a collective."""
    value = statement.value
    shape = value.shape
    if statement.kind in {"all_gather", "all_to_all"}:
        axis = statement.number % len(shape)
        rng = np.random.default_rng([program.seed, statement.uid, replica, 99])
        shape = (*shape[:axis], int(rng.integers(0, 6)), *shape[axis + 1 :])
    leaves = [
        leaf(value.dtype, shape, (program.seed, statement.uid, replica, i))
        for i in range(LEAVES[value.tree])
    ]
    return tree(value, leaves)


def leaf(dtype: str, shape: tuple[int, ...], key: tuple[int, ...]) -> Any:
    """Return whole numbers, small enough to be added exactly in every dtype."""
    rng = np.random.default_rng(list(key))
    if dtype in {"int", "float", "bool"}:
        number = int(rng.integers(-9, 9))
        return {"int": int, "float": float, "bool": lambda n: n > 0}[dtype](number)
    numbers = rng.integers(0 if dtype == "u1" else -9, 9, shape)
    if dtype == "?":
        return np.asarray(numbers > 0)
    if dtype == "c8":
        return np.asarray(numbers + 1j * rng.integers(-9, 9, shape)).astype("c8")
    return np.asarray(numbers).astype(dtype)


def tree(value: Value, leaves: list[Any]) -> Any:
    """Build the tree of a value from its leaves."""
    if value.tree == "leaf":
        return leaves[0]
    if value.tree == "pair":
        return (leaves[0], leaves[1])
    if value.tree == "dict":
        return {"b": leaves[0], "a": leaves[1]}
    return {"x": [leaves[0], (leaves[1],)], "y": leaves[2]}


def leaves_of(found: Any) -> list[Any]:
    """Take a tree apart, in the order of `tree`."""
    if isinstance(found, dict):
        keys = list(found) if set(found) != {"a", "b"} else ["b", "a"]
        return [one for key in keys for one in leaves_of(found[key])]
    if isinstance(found, (list, tuple)):
        return [one for part in found for one in leaves_of(part)]
    return [found]


def flag(program: Program, statement: Statement, replica: int) -> bool:
    """Return what a replica brings to any and all."""
    rng = np.random.default_rng([program.seed, statement.uid, replica])
    return bool(rng.integers(0, 3))


# ---- what they get --------------------------------------------------------------------------


def reduced(op: str, parts: list[Any]) -> Any:
    """Combine one leaf of every replica."""
    if isinstance(parts[0], (bool, int, float)):
        ways = {"sum": sum, "min": min, "max": max, "mean": lambda p: sum(p) / len(p)}
        return ways[op](parts)
    stack, dtype = np.stack(parts), parts[0].dtype
    if op in {"min", "max"}:
        return stack.min(0) if op == "min" else stack.max(0)
    if dtype.kind in "iub" and op == "mean":
        return stack.sum(0, dtype=np.int64 if dtype.kind == "b" else dtype) / len(parts)
    total = {"?": np.int64, "e": np.float32}.get(dtype.char, dtype)
    summed = stack.sum(0, dtype=total)
    if op == "mean":
        summed = summed / len(parts)
    return np.asarray(summed).astype(np.int64 if dtype.char == "?" else dtype)


def expected(program: Program, statement: Statement) -> dict[int, Any]:
    """Return what every member gets of a call, all of them taking part."""
    members = statement.members
    kind = statement.kind
    if kind in {"any", "all"}:
        flags = [flag(program, statement, r) for r in members]
        return dict.fromkeys(members, any(flags) if kind == "any" else all(flags))
    if kind in {"barrier", "write", "assign", "device", "give_up"}:
        return dict.fromkeys(members)
    if kind == "finish":
        starts = [expected(program, program.statement(h)) for h in statement.handles]
        return {r: [start[r] for start in starts] for r in members}
    if kind == "agree":
        return dict.fromkeys(members, argument(program, statement, members[0]))
    if kind == "message":
        return {members[0]: None, members[1]: argument(program, statement, members[0])}
    args = {r: argument(program, statement, r) for r in members}
    if kind == "broadcast":
        return dict.fromkeys(members, args[members[statement.number]])
    if kind == "merge_call":
        return _merged(statement, args)
    columns = list(zip(*(leaves_of(args[r]) for r in members), strict=True))
    handed = [_handed(statement, column) for column in columns]
    return {
        r: tree(statement.value, [column[i] for column in handed]) for i, r in enumerate(members)
    }


def _handed(statement: Statement, column: tuple[Any, ...]) -> list[Any]:
    """Return what each member gets of one leaf."""
    count, axis = len(column), statement.number
    if statement.kind in {"all_reduce", "start"}:
        return [reduced(statement.op, list(column))] * count
    if statement.kind == "reduce_scatter":
        return np.array_split(reduced(statement.op, list(column)), count, axis)
    if statement.kind == "all_gather":
        return [np.concatenate(column, axis)] * count
    cut = [np.array_split(one, count, axis) for one in column]
    return [np.concatenate(own, axis) for own in zip(*cut, strict=True)]


def _merged(statement: Statement, args: dict[int, Any]) -> dict[int, Any]:
    members = statement.members
    if statement.op.endswith("raise"):
        return dict.fromkeys(members, "raised")
    if statement.op.endswith("turned"):
        turned = [args[r] for r in reversed(members)]
        return dict(zip(members, turned, strict=True))
    columns = zip(*(leaves_of(args[r]) for r in members), strict=True)
    total = tree(statement.value, [reduced("sum", list(column)) for column in columns])
    return dict.fromkeys(members, total)


def states(program: Program, kind: str) -> list[float]:
    """Return what the variables hold after none, one, two and all of the writes of a kind."""
    found = [0.0]
    for statement in program.statements:
        if statement.kind == kind:
            numbers = (step_of(program, statement, r) for r in statement.members)
            found.append(found[-1] + sum(numbers))
    return found


def step_of(program: Program, statement: Statement, replica: int) -> float:
    """Return what a replica adds to the variables; never nothing in total."""
    rng = np.random.default_rng([program.seed, statement.uid, replica])
    return float(rng.integers(1, 9))


# ---- how the run ends -----------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One way in which a run may end.

    Attributes:
        kind: "ok", "boom", "group", "mismatch", "context", "timeout", "stall", "cancelled" or
            "replica cancelled".
        replicas: Who is to blame: those whose exception comes out, or whom a mismatch names.
        uid: The statement.
    """

    kind: str
    replicas: tuple[int, ...] = ()
    uid: int = -1


def verdicts(program: Program) -> list[Verdict]:
    """Return the ways in which a run may end, nothing from outside counted."""
    if not program.plants:
        return [Verdict("ok")]
    alone = [verdict_of(program, plant) for plant in program.plants]
    if may_stall(program):
        alone.append(Verdict("stall"))
    if len(program.plants) == 1:
        return alone
    unhappy = [verdict for verdict in alone if verdict.kind != "ok"] or [Verdict("ok")]
    booms = [verdict for verdict in unhappy if verdict.kind in {"boom", "replica cancelled"}]
    if len(booms) > 1:
        unhappy.append(Verdict("booms", tuple(b.replicas[0] for b in booms)))
    return unhappy


def verdict_of(program: Program, plant: Plant) -> Verdict:
    """Return how a run ends that has one plant."""
    statement = program.statement(plant.uid)
    me, alone = (plant.replica,), len(statement.members) == 1
    match plant.kind:
        case "raise" | "raise hostile":
            return Verdict("boom", me, plant.uid)
        case "merge raises":
            return Verdict("boom", (-1,), plant.uid)
        case "sibling raises":
            return Verdict("group", me, plant.uid)
        case "timeout strikes":
            return Verdict("timeout", me)
        case "bare cancel":
            return Verdict("replica cancelled", me)
        case "two at once":
            return Verdict("context or mismatch", me)
        case "never awaited":
            if statement.kind == "start":
                return Verdict("ok")
            return Verdict("context" if alone else "context or mismatch", me)
        case "return":
            ids = [s.uid for s in program.part_of(plant.replica)]
            rest = program.part_of(plant.replica)[ids.index(plant.uid) :]
            awaited = [s for s in rest if s.kind in TALKS and len(s.members) > 1]
            return Verdict("mismatch", me) if awaited else Verdict("ok")
        case "skip":
            return Verdict("ok") if alone else Verdict("mismatch")
        case "other" | "differs" | "withdraw" | "withdraw on" | "cancel child" if (
            statement.kind == "message"
        ):
            return Verdict("mismatch")
        case "other" | "differs":
            return Verdict("ok") if alone else Verdict("mismatch", me)
        case "withdraw" | "withdraw on" | "cancel child":
            return Verdict("mismatch", me)
    raise AssertionError(plant)


def is_changed(plant: Plant) -> bool:
    """Tell whether a plant makes its replica's results at the statement another thing."""
    return plant.kind in {"other", "differs", "skip", "never awaited", "return"}


def forgotten(program: Program) -> bool:
    """Tell whether some handle is neither awaited nor given up in a run that ends well."""
    for replica in range(program.size):
        part = program.part_of(replica)
        stops = [s.uid for s in part]
        for plant in program.plants:
            if plant.replica == replica and plant.kind == "return":
                part = part[: stops.index(plant.uid)]
        used = {h for s in part if s.kind in {"finish", "give_up"} for h in s.handles}
        for s in part:
            plant_here = program.plant_of(replica, s.uid)
            is_made = plant_here is None or plant_here.kind not in {"skip", "other"}
            if s.kind == "start" and s.uid not in used and is_made:
                return True
    return False


def same(found: Any, wanted: Any) -> bool:
    """Tell whether a result is what the model says: structure, dtypes, shapes and numbers."""
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(
            same(a, b) for a, b in zip(found, wanted, strict=True)
        )  # fmt: skip
    if isinstance(wanted, dict):
        return type(found) is dict and set(found) == set(wanted) and all(
            same(found[key], one) for key, one in wanted.items()
        )  # fmt: skip
    if isinstance(wanted, (np.ndarray, np.generic)):
        if not isinstance(found, (np.ndarray, np.generic)):
            return False
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            return False
        return bool(np.allclose(found, wanted, rtol=2e-3 if wanted.dtype.char == "e" else 1e-6))
    if isinstance(found, (np.ndarray, np.generic)):
        return False
    return bool(found == wanted)


__all__ = ["MEETINGS", "Verdict", "argument", "expected", "same", "states", "verdicts"]
