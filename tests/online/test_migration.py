"""Migrations: what older programs have written is learned, restored and read by a newer one."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import CheckpointError, JournalError, PoisonedExampleError
from aioreplica.online import (
    ExampleSpec,
    Journal,
    Migration,
    OnlineLearner,
    SnapshotReader,
    publish_snapshot,
)
from aioreplica.online._journal_format import VERSION
from tests.conftest import mirrored

STEPS = {
    1: Migration(
        lambda row: {**row, "z": 0.25},
        renamed={"w": "model/w"},
        added=["model/v"],
    ),
    2: Migration(
        lambda row: {"input": {"x": row["x"], "z": row["z"]}, "target": row["y"]},
        renamed={"model/w": "net/kernel", "model/v": "net/wide"},
        added=["net/bias"],
    ),
}
SPECS: Mapping[int, Any] = {
    1: {"x": np.zeros(2), "y": 0.0},
    2: {"x": np.zeros(2), "y": 0.0, "z": 0.0},
    3: {"input": {"x": np.zeros(2), "z": 0.0}, "target": 0.0},
}
BAD = 1e6
"""A target that no version learns."""


def example(number: int, version: int, target: float | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    x, z, y = rng.normal(size=2), float(rng.normal()), float(rng.normal())
    y = y if target is None else target
    if version == 1:
        return {"x": x, "y": y}
    return {"x": x, "y": y, "z": z} if version == 2 else {"input": {"x": x, "z": z}, "target": y}


class Model:
    """What all versions of a program have: each uses its part, under its own keys."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.strategy = mirrored(1)
        with self.strategy.scope():
            self.w, self.v, self.b = (ar.Variable(np.full(n, 0.5)) for n in (2, 1, 1))
            self.adam = ar.optimizers.Adam(0.1)
        self.variables: dict[str, Any] = {
            1: {"w": self.w, "adam": self.adam},
            2: {"model": {"w": self.w, "v": self.v}, "adam": self.adam},
            3: {"net": {"kernel": self.w, "wide": self.v, "bias": self.b}, "adam": self.adam},
        }[version]

    async def step(self, ctx: object, batch: Any) -> None:
        y = batch["target" if self.version == 3 else "y"]
        given = batch["input"] if self.version == 3 else batch
        x = given["x"]
        if (y == BAD).any():
            raise ValueError("bad target")
        error = x @ self.w.value - y
        if self.version > 1:
            error = error + given["z"] * self.v.value
        if self.version > 2:
            error = error + self.b.value
        pairs = [(error @ x, self.w)]
        if self.version > 1:
            pairs.append((np.array([error @ given["z"]]), self.v))
        if self.version > 2:
            pairs.append((np.array([error.sum()]), self.b))
        await self.adam.apply_gradients(pairs)

    def bits(self) -> bytes:
        return b"".join(variable.value.tobytes() for variable in (self.w, self.v, self.b))


class Program:
    """A version of a program: its model, and its learner in a folder."""

    def __init__(self, folder: Path, version: int, **options: Any) -> None:
        self.model = model = Model(version)
        self.manager = ar.CheckpointManager(folder / "checkpoints", max_to_keep=None)
        settings: dict[str, Any] = {
            "max_batch": 1, "max_delay_s": 0.0, "queue_size": 20, "checkpoints": self.manager,
            "journal": Journal(folder / "journal.db", label_ttl_s=60.0), "spec_version": version,
            "migrate": {each: STEPS[each] for each in range(1, version)},
            "validate": ExampleSpec(SPECS[version]),
        }  # fmt: skip
        settings |= options
        self.learner = OnlineLearner(model.strategy, model.step, model.variables, **settings)


@asynccontextmanager
async def opened(folder: Path, version: int, **options: Any) -> AsyncIterator[Program]:
    program = Program(folder, version, **options)
    async with program.model.strategy, program.manager, program.learner:
        yield program


async def caught_up(program: Program) -> None:
    while not program.learner.is_ready:
        await asyncio.sleep(0)


async def learn(program: Program, *numbers: int) -> None:
    for number in numbers:
        await (await program.learner.submit(example(number, program.model.version)))


async def offline(parts: Sequence[tuple[int, Sequence[Any]]]) -> bytes:
    """Learn examples with the step functions of some versions, one by one, in one process."""
    model = Model(1)

    async def learn_one(batch: Any) -> None:
        await model.step(None, batch)

    async with model.strategy:
        for version, examples in parts:
            model.version = version
            for each in examples:
                batch = {
                    "input": {n: np.stack([v]) for n, v in each["input"].items()},
                    "target": np.stack([each["target"]]),
                } if version == 3 else {n: np.stack([v]) for n, v in each.items()}  # fmt: skip
                await model.strategy.run(learn_one, args=(batch,))
    return model.bits()


def migrated(number: int, version: int, target: float | None = None) -> Any:
    found = example(number, version, target)
    for each in range(version, 3):
        change = STEPS[each].examples
        assert change is not None
        found = change(found)
    return found


async def left_behind(folder: Path) -> None:
    """Leave what programs of two versions do that are killed: 3 learned, 3 and 2 that are not."""
    before = folder / "before"
    before.mkdir()
    async with opened(before, 1) as one:
        await learn(one, 0, 1, 2)
        await one.learner.checkpoint()
        await one.learner.pause()
        for number in (3, 4, 5):
            await one.learner.submit(example(number, 1), key=f"key {number}")
        shutil.copytree(before, folder / "between")
    async with opened(folder / "between", 2) as two:
        await two.learner.pause()
        for number in (6, 7):
            await two.learner.submit(example(number, 2), key=f"key {number}")
        shutil.copytree(folder / "between", folder / "now")
    for each in ("before", "between"):
        shutil.rmtree(folder / each)
    for lock in (folder / "now").rglob("*.lock"):
        lock.unlink()


def facts(path: Path) -> tuple[int, dict[str, int]]:
    connection = sqlite3.connect(path)
    [[version]] = connection.execute("PRAGMA user_version")
    found = dict(connection.execute("SELECT name, value FROM facts WHERE name GLOB 'spec *'"))
    connection.close()
    return version, found


def dump(folder: Path) -> list[str]:
    """All that is durable, but for the journal's clock."""
    connection = sqlite3.connect(folder / "journal.db")
    found = [line for line in connection.iterdump() if "clock_s'" not in line]
    connection.close()
    return found + sorted(str(path) for path in (folder / "checkpoints").rglob("*"))


# ---- two versions up -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_two_versions_up_with_a_backlog_has_the_bits_of_the_offline_run(folder: Path) -> None:
    await left_behind(folder)
    at = folder / "now"
    assert facts(at / "journal.db") == (VERSION, {"spec 2": 7})
    async with opened(at, 3) as three:
        await caught_up(three)
        await learn(three, 8, 9)
        first = three.model.bits()
    rows = [migrated(n, 1) for n in (3, 4, 5)] + [migrated(n, 2) for n in (6, 7)]
    expected = await offline(
        [(1, [example(n, 1) for n in (0, 1, 2)]), (3, [*rows, example(8, 3), example(9, 3)])]
    )
    assert first == expected
    assert facts(at / "journal.db") == (VERSION, {"spec 2": 7, "spec 3": 9})
    async with opened(at, 3) as again:  # from its own checkpoint
        assert again.model.bits() == expected
        await learn(again, 10)
    assert facts(at / "journal.db") == (VERSION, {"spec 2": 7, "spec 3": 9})


@pytest.mark.asyncio
async def test_a_journal_has_a_version_once_something_of_it_is_taken(folder: Path) -> None:
    async with opened(folder, 1) as program:
        await learn(program, 0)
    assert facts(folder / "journal.db") == (VERSION, {})
    async with opened(folder, 2):  # takes nothing
        pass
    assert facts(folder / "journal.db") == (VERSION, {})


@pytest.mark.asyncio
async def test_a_rollback_to_an_older_version_migrates_again(folder: Path) -> None:
    async with opened(folder, 1) as one:
        await learn(one, 0, 1)
        await one.learner.checkpoint()
        await learn(one, 2, 3)
    async with opened(folder, 3) as three:
        await learn(three, 4)
        await three.learner.checkpoint()
        assert await three.learner.rollback(to=2, skip=[4]) == 2
        await caught_up(three)
        expected = await offline(
            [(1, [example(0, 1), example(1, 1)]), (3, [migrated(2, 1), example(4, 3)])]
        )
        assert three.model.bits() == expected
        [letter] = await three.learner.dead_letters()
        assert letter.example["y"] == example(3, 1)["y"]  # as it was taken
        await (await three.learner.retry(4))
        bits = three.model.bits()
    assert bits == await offline(
        [
            (1, [example(0, 1), example(1, 1)]),
            (3, [migrated(2, 1), example(4, 3), migrated(3, 1)]),
        ]
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("empty", [{}, []])
async def test_a_container_that_was_empty_is_removed_where_something_is_added_in_it(
    folder: Path, empty: Any
) -> None:
    """A checkpoint has an empty container as an entry, under the key that is the parts' now."""
    one, two = Model(1), Model(2)
    key = "extra/0" if empty == [] else "extra/v"
    async with program_of(
        folder, one, 1, {"w": one.w, "adam": one.adam, "extra": empty}
    ) as learner:
        await (await learner.submit(example(0, 1)))
        bits = one.w.value.tobytes()
    extra: Any = [two.v] if empty == [] else {"v": two.v}
    variables = {"w": two.w, "adam": two.adam, "extra": extra}
    said = "Only in the checkpoint: variables/extra"
    with pytest.raises(CheckpointError, match=said):
        async with program_of(folder, two, 2, variables, migrate={1: Migration(added=[key])}):
            pass
    step = Migration(added=[key], removed=["extra"])
    async with program_of(folder, two, 2, variables, migrate={1: step}):
        assert two.w.value.tobytes() == bits
        assert two.v.value.tolist() == [0.5]


@asynccontextmanager
async def program_of(
    folder: Path, model: Model, version: int, variables: Any, **options: Any
) -> AsyncIterator[OnlineLearner]:
    async def step(ctx: object, batch: Any) -> None:
        await model.adam.apply_gradients([(batch["x"].sum(0), model.w)])

    learner = OnlineLearner(
        model.strategy, step, variables, max_batch=1, max_delay_s=0.0, queue_size=9,
        journal=folder / "journal.db", spec_version=version,
        checkpoints=ar.CheckpointManager(folder / "checkpoints"), **options,
    )  # fmt: skip
    async with model.strategy, learner:
        yield learner


# ---- dead letters, keys, labels, sources ---------------------------------------------------


@pytest.mark.asyncio
async def test_dead_letters_of_older_versions_are_kept_as_they_were_and_retried_as_now(
    folder: Path,
) -> None:
    async with opened(folder, 1) as one:
        with pytest.raises(PoisonedExampleError):
            await (await one.learner.submit(example(0, 1, BAD)))
        await one.learner.pause()
        await one.learner.submit(example(1, 1, BAD))
        shutil.copytree(folder, folder / "killed", ignore=shutil.ignore_patterns("*.lock"))
    async with opened(folder / "killed", 3) as three:
        while len(letters := await three.learner.dead_letters()) < 2:
            await asyncio.sleep(0)
        assert [letter.example.keys() for letter in letters] == [{"x", "y"}] * 2

        seen: list[Any] = []

        async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
            seen.append(batch["input"]["z"])

        three.learner.step_fn = step
        for number in (1, 2):
            await (await three.learner.retry(number))
        assert [float(z[0]) for z in seen] == [0.25, 0.25]
        assert await three.learner.dead_letters() == ()


@pytest.mark.asyncio
async def test_keys_are_known_by_what_was_taken_with_them(folder: Path) -> None:
    async with opened(folder, 1) as one:
        await (await one.learner.submit(example(0, 1), key="a"))
    async with opened(folder, 3, validate=None) as three:
        again = await three.learner.submit(example(0, 1), key="a")
        assert (again.number, again.is_duplicate) == (1, True)


@pytest.mark.asyncio
async def test_a_label_joins_an_input_of_an_older_version(folder: Path) -> None:
    forms = {
        1: Migration(lambda row: {**row, "input": {"x": row["input"]}}),
        2: Migration(lambda row: {**row, "target": [row["target"]]}),
    }
    batches: list[Any] = []

    async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        batches.append(batch)

    def learner(strategy: ar.Strategy, version: int, spec: Any) -> OnlineLearner:
        return OnlineLearner(
            strategy, step, {"w": ar.Variable(np.zeros(1))}, max_batch=1, max_delay_s=0.0,
            queue_size=9, journal=Journal(folder / "journal.db", label_ttl_s=60.0),
            spec_version=version, migrate={each: forms[each] for each in range(1, version)},
            validate=ExampleSpec(spec),
        )  # fmt: skip

    older, newer = {"input": 0.0, "target": 0}, {"input": {"x": 0.0}, "target": [0]}
    async with mirrored(1) as strategy, learner(strategy, 1, older) as one:
        one.expect(1.5, prediction_id="a")
        one.expect(2.5, prediction_id="b")
        await (await one.label("b", 7))
    async with mirrored(1) as strategy, learner(strategy, 3, newer) as three:
        ticket = await three.label("a", 4)
        await ticket
        assert batches[-1]["input"]["x"].tolist() == [1.5]
        assert [column.tolist() for column in batches[-1]["target"]] == [[4]]
        assert (await three.label("a", 4)).number == ticket.number
        assert (await three.label("b", 7)).is_duplicate
        three.expect({"x": 3.5}, prediction_id="c")
        await (await three.label("c", [5]))
        assert batches[-1]["input"]["x"].tolist() == [3.5]


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_source_goes_on_where_the_older_version_has_read_it(folder: Path) -> None:
    class Two:
        def __init__(self, version: int) -> None:
            self.version = version

        async def read(self, *, after: str | None) -> list[tuple[str, object]]:
            if after == str(2 * self.version):
                await asyncio.Event().wait()
            number = int(after or 0)
            return [(str(number + 1), example(number, self.version))]

    for version in (1, 2):
        async with opened(folder, version, sources={"two": Two(version)}) as program:
            while program.learner.statistics().learned_number < 2 * version:
                await asyncio.sleep(0)
            bits = program.model.bits()
    assert bits == await offline(
        [(1, [example(n, 1) for n in (0, 1)]), (2, [example(n, 2) for n in (2, 3)])]
    )


# ---- several models ------------------------------------------------------------------------


def challenger(folder: Path, version: int, **options: Any) -> tuple[Model, OnlineLearner]:
    model = Model(version)
    settings: dict[str, Any] = {
        "max_batch": 1, "max_delay_s": 0.0, "queue_size": 20, "spec_version": version,
        "checkpoints": ar.CheckpointManager(folder / "b", max_to_keep=None),
        "migrate": {each: STEPS[each] for each in range(1, version)},
    }  # fmt: skip
    settings |= options
    return model, OnlineLearner(model.strategy, model.step, model.variables, **settings)


@pytest.mark.asyncio
async def test_a_challenger_goes_up_with_its_champion(folder: Path) -> None:
    for version in (1, 3):
        model, learner = challenger(folder, version)
        async with model.strategy, opened(folder, version, challengers={"b": learner}) as program:
            await learn(program, version, version + 1)
            while learner.statistics().learned_number < version + 1:
                await asyncio.sleep(0)
            bits = program.model.bits(), model.bits()
            assert program.learner.statistics().not_open == {}
    parts = [(v, [example(v, v), example(v + 1, v)]) for v in (1, 3)]
    assert bits == (await offline(parts),) * 2


def test_a_challenger_of_another_version_is_refused(folder: Path) -> None:
    for options, said in (
        ({"version": 1}, "'b' has spec_version 1, and the learner 3"),
        (
            {"version": 3, "migrate": {2: Migration(lambda row: row)}},
            r"'b' has migrate\[2\] with another `examples` than the learner",
        ),
    ):
        _, learner = challenger(folder, **options)
        with pytest.raises(ValueError, match=said):
            Program(folder, 3, challengers={"b": learner})


# ---- what is served ------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_version_pinned_by_an_older_program_is_served_under_the_new_keys(
    folder: Path,
) -> None:
    async with opened(folder, 1) as one:
        await learn(one, 0)
        await one.learner.pin()
        pinned = one.learner.snapshot()[one.model.w]
        await learn(one, 1)
    async with opened(folder, 3, publish_to=folder / "published") as three:
        assert np.array_equal(three.learner.snapshot()[three.model.w], pinned)
        assert three.learner.snapshot()[three.model.b].tolist() == [0.5]
        with SnapshotReader(folder / "published", spec_version=3) as reader:
            assert np.array_equal(reader.read()["net/kernel"], pinned)


def test_a_reader_migrates_what_an_older_program_has_published(tmp_path: Path) -> None:
    path, steps = tmp_path / "model", {1: Migration(renamed={"w": "net"}, removed=["old"])}
    publish_snapshot(path, 7, {"w/0": np.ones(1), "old": np.ones(1), "b": np.ones(2)})
    with SnapshotReader(path, spec_version=2, migrate=steps) as reader:
        snapshot = reader.read()
        assert (snapshot.version, [*snapshot]) == (7, ["net/0", "b"])
        publish_snapshot(path, 8, {"net/0": np.zeros(1)}, spec_version=2)
        assert [*reader.read()] == ["net/0"]
        publish_snapshot(path, 9, {"net": np.zeros(1)}, spec_version=3)
        assert reader.read().version == 8  # what it holds
        assert "has spec version 3, and this program is of version 2" in reader.error
    with (
        SnapshotReader(path, spec_version=4, migrate={3: Migration(added=["v"])}) as reader,
        pytest.raises(CheckpointError, match="in which v is missing, added with version 4"),
    ):
        reader.read()
    for renamed, said in (({"net/0": "v"}, "would have 'v' twice"), ({"x": "y"}, "has no 'x'")):
        publish_snapshot(path, 9, {"net/0": np.ones(1), "v": np.zeros(1)})
        with (
            SnapshotReader(path, spec_version=2, migrate={1: Migration(renamed=renamed)}) as reader,
            pytest.raises(CheckpointError, match=said),
        ):
            reader.read()
    with pytest.raises(ValueError, match="spec_version must be at least 1, got 0"):
        publish_snapshot(path, 9, {}, spec_version=0)


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "steps", "said"),
    [
        (0, {}, "spec_version must be at least 1, got 0"),
        (3, {1: STEPS[1]}, r"steps from the versions \[1\], and spec_version is 3"),
        (2, STEPS, r"steps from the versions \[1, 2\], and spec_version is 2"),
        (2, {0: Migration(), 1: Migration()}, r"versions \[0, 1\]"),
        (2, {1: Migration(added=["b"])}, r"migrate\[1\] has the key 'b', which would be 'b' now"),
        (2, {1: Migration(renamed={"a": "b"})}, r"migrate\[1\] has the key 'b'"),
    ],
)
def test_steps_that_cannot_be_are_refused(version: int, steps: Any, said: str) -> None:
    model = Model(1)
    with pytest.raises(ValueError, match=said):
        OnlineLearner(
            model.strategy, model.step, model.variables, max_batch=1, max_delay_s=0.0,
            queue_size=1, spec_version=version, migrate=steps,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"examples": 3}, TypeError, "examples must be a plain function, got 3"),
        ({"renamed": ["a"]}, TypeError, "renamed must be a dict"),
        ({"added": "net"}, TypeError, "added are several keys, got 'net'"),
        ({"added": [""]}, TypeError, "Keys of a state are text, got ''"),
        ({"renamed": {"a": "b"}, "added": ["b"]}, ValueError, "named twice by a Migration: b, b"),
    ],
)
def test_a_migration_that_is_none_is_refused(
    options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Migration(**options)


def raising(row: Any) -> Any:
    raise KeyError("z")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("version", "steps", "error", "said"),
    [
        (3, {2: Migration()}, CheckpointError, "Checkpoint 3 has spec version 1.*begins with 2"),
        (3, {}, CheckpointError, "is no step from 1: migrate= was not given"),
        (1, {}, JournalError, "has examples of spec version 2, from number 7 on, and this program"),
        (
            3,
            {1: Migration(raising, renamed=STEPS[1].renamed, added=STEPS[1].added), 2: STEPS[2]},
            JournalError,
            r"Example 4 in .* from spec version 1 to 2: KeyError\('z'\). It was {'x': array",
        ),
        (
            3,
            {1: Migration(lambda row: {**row, "z": [1]}, STEPS[1].renamed, STEPS[1].added),
             2: STEPS[2]},
            JournalError,
            r"validate refuses it: \['input'\]\['z'\] is \[1\] \(list\), expected float",
        ),
        (
            3,
            {1: Migration(renamed={"v": "model/w"}, added=["model/v"]), 2: STEPS[2]},
            CheckpointError,
            r"Checkpoint 3, of spec version 1, has no 'v', which migrate\[1\] renames.*'w'",
        ),
        (
            3,
            {1: Migration(renamed={"w": "model/w"}, added=["model/v", "adam/iterations"]),
             2: STEPS[2]},
            CheckpointError,
            r"would have 'adam/iterations' twice after migrate\[1\]",
        ),
        (
            3,
            {1: Migration(renamed={"w": "model/w"}), 2: STEPS[2]},
            CheckpointError,
            "has no 'model/v', which migrate",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_migrated_is_told_before_anything_has_changed(
    folder: Path, version: int, steps: Any, error: type[Exception], said: str
) -> None:
    await left_behind(folder)
    at = folder / "now"
    before = dump(at)
    program = Program(at, version, migrate=steps)
    untouched = program.model.bits()
    with pytest.raises(error, match=said):
        async with program.model.strategy, program.manager, program.learner:
            pass
    assert dump(at) == before
    assert program.model.bits() == untouched


@pytest.mark.asyncio
async def test_a_rollback_tries_what_it_would_learn_again(folder: Path) -> None:
    async with opened(folder, 1) as one:
        await learn(one, 0)
        await one.learner.checkpoint()
        await learn(one, 1)
    steps = {1: Migration(raising, STEPS[1].renamed, STEPS[1].added), 2: STEPS[2]}
    async with opened(folder, 3, migrate=steps) as three:  # nothing is left to learn
        bits = three.model.bits()
        with pytest.raises(JournalError, match=r"Example 2 in .* KeyError\('z'\)"):
            await three.learner.rollback(to=1)
        assert (three.model.bits(), three.learner.statistics().generation) == (bits, 0)
        await learn(three, 2)


# ---- killed ----------------------------------------------------------------------------------


class Dies:
    """A connection that fails at one of its statements, and at all behind it: the process died."""

    num_left = 0

    def __init__(self, path: str, **options: Any) -> None:
        self._inner = sqlite3.connect(path, **options)
        self.close, self.executemany = self._inner.close, self._inner.executemany

    def execute(self, statement: str, *values: Any) -> Any:
        Dies.num_left -= 1
        if Dies.num_left < 0:
            raise sqlite3.OperationalError("disk I/O error")
        return self._inner.execute(statement, *values)


@pytest.mark.asyncio
@pytest.mark.xslow
async def test_an_upgrade_that_dies_at_any_statement_has_happened_or_not(folder: Path) -> None:
    await left_behind(folder)
    rows = [migrated(n, 1) for n in (3, 4, 5)] + [migrated(n, 2) for n in (6, 7)]
    parts = [(1, [example(n, 1) for n in (0, 1, 2)])]
    without = await offline([*parts, (3, rows)])
    with_it = await offline([*parts, (3, [*rows, example(8, 3)])])
    outcomes = []
    for number in range(200):
        at = folder / "run"
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(folder / "now", at)
        Dies.num_left = number
        journal = Journal(at / "journal.db", label_ttl_s=60.0, connect=Dies)
        is_acknowledged = False
        try:
            async with opened(at, 3, journal=journal) as three:
                try:
                    await three.learner.submit(example(8, 3))
                    is_acknowledged = True
                finally:
                    shutil.copytree(at, folder / "left", ignore=shutil.ignore_patterns("*.lock"))
        except (JournalError, sqlite3.OperationalError):
            pass
        left = folder / "left" if (folder / "left").exists() else at
        Dies.num_left = 10**9
        async with opened(left, 3) as again:
            await caught_up(again)
            assert again.model.bits() in ({with_it} if is_acknowledged else {with_it, without})
            outcomes.append(again.model.bits() == with_it)
        shutil.rmtree(folder / "left", ignore_errors=True)
        if is_acknowledged:
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
