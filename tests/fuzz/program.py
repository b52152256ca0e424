"""Programs of collectives as plain data: what replicas do in common, and what one does otherwise.

A program is a list of statements. Every member of a statement makes the same call, so a program
without plants is sound: it ends with the results that NumPy gives, in every order of events. A
plant makes one replica do something else at one statement, and so decides how the run must end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

MEETINGS = frozenset({
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "any",
    "all", "agree", "merge_call", "write", "assign",
})  # fmt: skip
CALLS = MEETINGS | {"start"}
TALKS = CALLS | {"message"}

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """What a replica brings: the shape of a tree, and of its leaves."""

    tree: str = "leaf"  # leaf, pair, dict, nest
    dtype: str = "f8"  # of NumPy, or "int", "float", "bool" for Python's numbers
    shape: tuple[int, ...] = (2,)


@dataclass(frozen=True)
class Statement:
    """One thing that the members do in common.

    Attributes:
        uid: Its number; results and plants go by it.
        kind: One of `TALKS`, or "finish", "give_up", "device".
        members: Ids of the replicas; of a message first who sends, then who receives.
        ways: How each member waits.
        naps: What each member does before: so many loop cycles, from 10 on so many time units.
        value: What each member brings.
        op: The operator; of a merge_call, the merge function.
        number: An axis, the source of a broadcast, or the tag of a message.
        handles: The starts that a finish waits for.
        swapped: Members that make this start before the one before.
    """

    uid: int
    kind: str
    members: Ids
    ways: tuple[str, ...] = ()
    naps: Ids = ()
    value: Value = Value()
    op: str = "sum"
    number: int = 0
    handles: Ids = ()
    swapped: Ids = ()

    def way_of(self, replica: int) -> str:
        return self.ways[self.members.index(replica)] if self.ways else "await"

    def nap_of(self, replica: int) -> int:
        return self.naps[self.members.index(replica)] if self.naps else 0


@dataclass(frozen=True)
class Plant:
    """What one replica does otherwise, at one statement of its own.

    Attributes:
        replica: Who; -1 for the merge function of the statement.
        uid: Where.
        kind: What; see `model.verdict_of`.
        late: Another member that comes much later, so that this replica has to wait; or -1.
    """

    replica: int
    uid: int
    kind: str
    late: int = -1


@dataclass(frozen=True)
class Program:
    """A program of replicas, and how it is run.

    Attributes:
        seed: Of the numbers that replicas bring.
        size: How many replicas.
        statements: What they do.
        plants: What is wrong.
        flavour: "async" or "plain" step functions.
        real: Whether it runs on a real event loop, with real threads and time.
        schedule: Seed of the simulated order of events; None for asyncio's own order.
        outside: What happens to the run: "", "cancel" or "timeout".
        moment: When, as a nap.
        cleanups: What each replica does when it is cancelled: "", "nap", "device", "collective",
            "raise" or "swallow".
        watched: Whether a task takes snapshots of the variables meanwhile.
        streams: When devices with streams give memory back, "late" or "early"; "" for the host.
    """

    seed: int
    size: int
    statements: tuple[Statement, ...]
    plants: tuple[Plant, ...] = ()
    flavour: str = "async"
    real: bool = False
    schedule: int | None = None
    outside: str = ""
    moment: int = 0
    cleanups: tuple[str, ...] = ()
    watched: bool = False
    streams: str = ""

    def part_of(self, replica: int) -> list[Statement]:
        """Return what a replica does, in its own order."""
        part: list[Statement] = []
        for statement in self.statements:
            if replica not in statement.members:
                continue
            before = part[-1] if part else None
            if (
                replica in statement.swapped
                and before is not None
                and before.kind == statement.kind == "start"
                and before.members != statement.members
            ):
                part.insert(-1, statement)
            else:
                part.append(statement)
        return part

    def plant_of(self, replica: int, uid: int) -> Plant | None:
        """Return what a replica does otherwise at a statement."""
        for plant in self.plants:
            if plant.replica == replica and plant.uid == uid:
                return plant
        return None

    def is_late(self, replica: int, uid: int) -> bool:
        """Tell whether a replica comes much later than the others to a statement."""
        return any(plant.late == replica and plant.uid == uid for plant in self.plants)

    def statement(self, uid: int) -> Statement:
        """Return a statement by its number."""
        return next(s for s in self.statements if s.uid == uid)

    def __str__(self) -> str:
        """Return Python text that makes the program again, without what is as usual."""
        lines = [f"    {_text(s)}," for s in self.statements]
        rest = _rest(self, {"statements"})
        return "Program(\n  statements=(\n" + "\n".join(lines) + f"\n  ),\n  {rest},\n)"


def _text(part: object) -> str:
    return f"{type(part).__name__}({_rest(part, set())})"


def _rest(part: object, without: set[str]) -> str:
    pairs = [(f, getattr(part, f.name)) for f in fields(part) if f.name not in without]  # type: ignore[arg-type]
    return ", ".join(f"{f.name}={value!r}" for f, value in pairs if value != f.default)


# ---- making programs smaller ----------------------------------------------------------------


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with something left out, the large cuts first."""
    statements = program.statements
    half = len(statements) // 2
    if half > 1:
        yield _with(program, statements[:half])
        yield _with(program, statements[half:])
    if program.size > 1:
        yield _without_last(program)
    for i in range(len(statements)):
        yield _with(program, statements[:i] + statements[i + 1 :])
    for i in range(len(program.plants)):
        yield replace(program, plants=program.plants[:i] + program.plants[i + 1 :])
    for change in (
        {"outside": "", "moment": 0},
        {"cleanups": ()},
        {"watched": False},
        {"schedule": None},
        {"real": False},
    ):
        yield replace(program, **change)  # type: ignore[arg-type]
    for i, statement in enumerate(statements):
        for simpler in _simpler(statement):
            yield _with(program, (*statements[:i], simpler, *statements[i + 1 :]))


def _simpler(statement: Statement) -> Iterator[Statement]:
    yield replace(statement, naps=())
    yield replace(statement, ways=())
    yield replace(statement, swapped=())
    yield replace(statement, value=Value())
    for i, way in enumerate(statement.ways):
        if way != "await":
            ways = (*statement.ways[:i], "await", *statement.ways[i + 1 :])
            yield replace(statement, ways=ways)
    for i, nap in enumerate(statement.naps):
        if nap:
            yield replace(statement, naps=(*statement.naps[:i], 0, *statement.naps[i + 1 :]))
    if len(statement.members) > 1 and statement.kind in {"finish", "give_up", "device"}:
        for i in range(len(statement.members)):
            yield _without_member(statement, i)


def _with(program: Program, statements: tuple[Statement, ...]) -> Program:
    """Return the program with other statements, and without what hangs on those that went."""
    starts = {s.uid: s for s in statements if s.kind == "start"}
    kept = []
    for statement in statements:
        if statement.kind in {"finish", "give_up"}:
            handles = tuple(
                h
                for h in statement.handles
                if h in starts and set(statement.members) <= set(starts[h].members)
            )
            if not handles:
                continue
            kept.append(replace(statement, handles=handles))
        else:
            kept.append(statement)
    found = {s.uid: s for s in kept}
    plants = tuple(
        p
        for p in program.plants
        if p.uid in found and {p.replica, p.late} - {-1} <= set(found[p.uid].members)
    )
    return replace(program, statements=tuple(kept), plants=plants)


def _without_last(program: Program) -> Program:
    last = program.size - 1
    kept = []
    for statement in program.statements:
        if last in statement.members and statement.kind == "message":
            continue
        if last in statement.members:
            statement = _without_member(statement, statement.members.index(last))  # noqa: PLW2901
        if statement.members:
            kept.append(statement)
    return _with(replace(program, size=last, cleanups=program.cleanups[:last]), tuple(kept))


def _without_member(statement: Statement, position: int) -> Statement:
    def cut(values: tuple) -> tuple:  # type: ignore[type-arg]
        return values[:position] + values[position + 1 :]

    members = cut(statement.members)
    number = statement.number
    if statement.kind == "broadcast":
        number = min(number, max(len(members) - 1, 0))
    return replace(
        statement,
        members=members,
        ways=cut(statement.ways),
        naps=cut(statement.naps),
        number=number,
    )


# ---- making programs ------------------------------------------------------------------------

DTYPES = ("f8", "f4", "f2", "i4", "i8", "u1", "?", "c8", "int", "float", "bool")
SHAPES = ((), (1,), (3,), (2, 3), (0,), (5, 1))
MERGES = (
    "total", "turned", "async turned", "raise", "async raise", "base raise", "reduced",
)  # fmt: skip
PLAIN_MERGES = ("total", "turned", "raise", "base raise")
WAYS = (
    "await", "await", "task", "wait_for", "timeout", "gather", "group", "shield", "op", "scope",
)  # fmt: skip
FINISHES = (
    "await", "await", "task", "wait_for", "gather", "group", "shield", "impatient", "twice",
    "wait", "callback",
)  # fmt: skip
PLANTS = (
    "raise", "raise", "return", "return", "other", "differs", "skip", "withdraw", "withdraw on",
    "cancel child", "two at once", "never awaited", "merge raises", "sibling raises",
    "timeout strikes", "bare cancel", "raise hostile",
)  # fmt: skip
PLAIN_PLANTS = ("raise", "return", "other", "differs", "skip", "merge raises", "raise hostile")
CLEANUPS = ("", "", "", "nap", "device", "collective", "raise", "swallow")


def random_program(seed: int, *, real: bool = False, streams: bool = False) -> Program:
    """Make a program; the same seed gives the same one."""
    real = real or streams  # simulated devices have none
    rng = random.Random(seed)
    size = rng.choice((1, 2, 2, 3, 3, 4, 5))
    flavour = "plain" if rng.random() < 0.12 else "async"
    statements = _statements(rng, size, flavour)
    program = Program(
        seed=seed,
        size=size,
        statements=tuple(statements),
        flavour=flavour,
        real=real,
        schedule=None if real or rng.random() < 0.1 else rng.randrange(10**6),
        watched=rng.random() < 0.2 and any(s.kind in {"write", "assign"} for s in statements),
        streams=("late", "early")[seed % 2] if streams else "",
    )
    if rng.random() < 0.5:
        program = replace(program, plants=_plants(rng, program))
    if rng.random() < 0.25:
        program = replace(
            program, outside=rng.choice(("cancel", "cancel", "timeout")), moment=_nap(rng)
        )
    if flavour == "async" and rng.random() < 0.4:
        own = {p.replica for p in program.plants if p.kind in OWN_CANCELLATIONS}
        cleanups = ["" if i in own else rng.choice(CLEANUPS) for i in range(size)]
        program = replace(program, cleanups=tuple(cleanups))
    return program


def may_stall(program: Program) -> bool:
    """Tell whether replicas may wait for each other in ways that nobody can prove."""
    return any(is_circle(program, plant) for plant in program.plants) and any(
        (s.kind == "finish" and CHILD_WAYS & set(s.ways))
        or (s.kind in MEETINGS and "op" in s.ways)
        or (has_messages(program) and {"op", "group"} | CHILD_WAYS & set(s.ways))
        for s in program.statements
    )


def has_messages(program: Program) -> bool:
    """Tell whether replicas send each other anything."""
    return any(s.kind == "message" for s in program.statements)


def is_circle(program: Program, plant: Plant) -> bool:
    """Tell whether replicas may wait for each other because of a plant."""
    is_message = program.statement(plant.uid).kind == "message"
    return plant.kind in CIRCLES or (is_message and plant.kind in GIVEN_UP)


def is_sliding(program: Program, plant: Plant) -> bool:
    """Tell whether later calls may meet others than theirs because of a plant."""
    is_message = program.statement(plant.uid).kind == "message"
    return plant.kind in SLIDING or (is_message and plant.kind in GIVEN_UP)


def _statements(rng: random.Random, size: int, flavour: str) -> list[Statement]:
    everyone = tuple(range(size))
    groups = [everyone, everyone]
    groups += [tuple(sorted(rng.sample(everyone, rng.randint(1, size)))) for _ in range(2)]
    statements: list[Statement] = []
    open_handles: list[tuple[int, int]] = []  # replica and start
    for uid in range(rng.randint(1, 8)):
        kinds = [*sorted(CALLS), "start", "start", "all_reduce", "device"]
        if size > 1 and rng.random() < 0.3:
            statements.append(_message(rng, 200 + uid, size, flavour))
        kind = rng.choice(kinds)
        if kind == "start" and flavour == "plain":
            kind = "all_reduce"
        members = everyone if kind in {"write", "assign"} else rng.choice(groups)
        statements.append(_statement(rng, uid, kind, members, size, flavour))
        if kind == "start":
            open_handles += [(replica, uid) for replica in members]
        rng.shuffle(open_handles)
        while open_handles and rng.random() < 0.3:
            statements.append(_finish(rng, 100 + len(statements), open_handles))
    while open_handles:
        statements.append(_finish(rng, 100 + len(statements), open_handles))
    return statements


def _finish(rng: random.Random, uid: int, open_handles: list[tuple[int, int]]) -> Statement:
    replica, start = open_handles.pop()
    handles = [start]
    if rng.random() < 0.3:
        handles += [s for r, s in open_handles if r == replica]
        open_handles[:] = [pair for pair in open_handles if pair[0] != replica]
        rng.shuffle(handles)
    fate = rng.random()
    if fate < 0.05:
        return Statement(uid, "device", (replica,), ("await",), (0,))  # the handles are forgotten
    kind = "give_up" if fate < 0.1 else "finish"
    return Statement(
        uid, kind, (replica,), (rng.choice(FINISHES),), (_nap(rng),), handles=tuple(handles)
    )


def _statement(
    rng: random.Random, uid: int, kind: str, members: Ids, size: int, flavour: str
) -> Statement:
    value = Value(rng.choice(("leaf", "leaf", "pair", "dict", "nest")), rng.choice(DTYPES[:8]))
    op, number, naps = "sum", 0, tuple(_nap(rng) for _ in members)
    ways = tuple(rng.choice(WAYS) for _ in members)
    if kind in {"all_reduce", "start"}:
        dtype = rng.choice(DTYPES)
        op = rng.choice(("sum", "mean", "min", "max") if dtype != "c8" else ("sum", "mean"))
        value = replace(value, dtype=dtype, shape=rng.choice(SHAPES))
        if rng.random() < 0.01:
            value = Value("leaf", "f8", (1200 * 1024,))
    elif kind == "reduce_scatter":
        op = rng.choice(("sum", "mean"))
        value = replace(value, shape=rng.choice(SHAPES[1:]))
    elif kind in {"all_gather", "all_to_all"}:
        value = replace(value, shape=rng.choice(((2,), (1, 3), (2, 1, 2))))
        number = rng.randrange(-len(value.shape), len(value.shape))
    elif kind == "broadcast":
        number = rng.randrange(len(members))
    elif kind == "merge_call":
        merges = MERGES if flavour == "async" else PLAIN_MERGES
        op = rng.choice(merges)
    if kind == "start":
        ways = tuple("op" if rng.random() < 0.2 else "await" for _ in members)
    if flavour == "plain" or kind == "device":
        ways = ()
    if kind == "write" or (kind == "merge_call" and op not in {"total", "turned"}):
        ways = tuple("await" if way == "op" else way for way in ways)
    swapped = tuple(r for r in members if rng.random() < 0.3) if kind == "start" else ()
    return Statement(uid, kind, members, ways, naps, value, op, number, swapped=swapped)


def _message(rng: random.Random, uid: int, size: int, flavour: str) -> Statement:
    """Make a value go from one replica to another, on one of two ways between the two."""
    value = Value(rng.choice(("leaf", "dict", "nest")), rng.choice(DTYPES), rng.choice(SHAPES))
    ways = tuple(rng.choice(WAYS) for _ in range(2)) if flavour == "async" else ()
    pair = tuple(rng.sample(range(size), 2))
    naps = tuple(_nap(rng) for _ in range(2))
    return Statement(uid, "message", pair, ways, naps, value, number=rng.randrange(2))


def _nap(rng: random.Random) -> int:
    draw = rng.random()
    if draw < 0.4:
        return 0
    return rng.randint(1, 4) if draw < 0.7 else rng.randint(10, 14)


def _plants(rng: random.Random, program: Program) -> tuple[Plant, ...]:
    calls = [s for s in program.statements if s.kind in TALKS]
    if not calls:
        return ()
    first = _plant(rng, program, rng.choice(calls))
    if first is None:
        return ()
    if rng.random() < 0.15 and program.size > 1 and first.kind not in {"merge raises", "skip"}:
        statement = rng.choice(calls)
        others = [r for r in statement.members if r != first.replica]
        if others:
            return first, Plant(rng.choice(others), statement.uid, "raise")
    return (first,)


def _plant(rng: random.Random, program: Program, statement: Statement) -> Plant | None:
    kinds = PLANTS if program.flavour == "async" else PLAIN_PLANTS
    kind = rng.choice(kinds)
    replica = rng.choice(statement.members)
    if statement.kind == "message" and kind == "two at once":
        return None  # it is allowed
    if kind == "merge raises":
        merges = [s for s in program.statements if s.kind == "merge_call"]
        return Plant(-1, rng.choice(merges).uid, kind) if merges else None
    if kind in NEED_LATE:
        if statement.kind == "start" or len(statement.members) < 2 or program.real:
            return None
        if statement.kind == "message":  # a send does not wait
            return Plant(statement.members[1], statement.uid, kind, statement.members[0])
        late = rng.choice([r for r in statement.members if r != replica])
        return Plant(replica, statement.uid, kind, late)
    return Plant(replica, statement.uid, kind)


OWN_CANCELLATIONS = frozenset({"withdraw", "withdraw on", "cancel child", "bare cancel"})
SLIDING = frozenset({"skip", "never awaited", "return", "other", "differs"})
GIVEN_UP = frozenset({"withdraw", "withdraw on", "cancel child", "other", "differs"})
CIRCLES = frozenset({"skip", "never awaited"})  # then replicas may wait for each other
UNSEEN_WAYS = frozenset({"wait", "callback"})  # the library is not told who waits
CHILD_WAYS = UNSEEN_WAYS | {"task", "wait_for", "gather", "group", "shield"}
NEED_LATE = frozenset({
    "withdraw", "withdraw on", "cancel child", "two at once", "sibling raises", "timeout strikes",
})  # fmt: skip
