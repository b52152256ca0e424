"""Several models on one journal whose program goes up by versions: each learns all as now, once."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import PoisonedExampleError
from aioreplica.online import Journal

from .test_migration import (
    BAD,
    Model,
    Program,
    challenger,
    example,
    learn,
    migrated,
    offline,
    opened,
)

OLD = [example(n, 1) for n in range(10)]
"""Examples of the oldest version, by id."""


def now(*numbers: int) -> list[Any]:
    """Examples of the oldest version as the newest one has them."""
    return [migrated(n, 1) for n in numbers]


@asynccontextmanager
async def both(
    folder: Path, version: int, *, rival: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Program, Model]]:
    """Open a program of a version with a challenger; gives it, and the challenger's model."""
    model, learner = challenger(folder, version, **(rival or {}))
    async with (
        asyncio.timeout(60),
        model.strategy,
        opened(folder, version, challengers={"b": learner}, **options) as program,
    ):
        yield program, model


def second_of(program: Program) -> Any:
    return program.learner._settings.challengers["b"]


async def all_learned(program: Program) -> None:
    while True:
        stats = program.learner.statistics()
        learned = [stats.learned_number, *(c.learned_number for c in stats.challengers.values())]
        if {*learned} == {stats.last_number}:
            return
        await asyncio.sleep(0)


async def save_both(program: Program) -> None:
    await all_learned(program)
    for learner in (program.learner, second_of(program)):
        await learner.checkpoint()


def killed(folder: Path, name: str) -> Path:
    """Copy what a process leaves that is killed now."""
    shutil.copytree(folder, folder.parent / name, ignore=shutil.ignore_patterns("*.lock"))
    return folder.parent / name


@pytest.mark.asyncio
async def test_both_go_two_versions_up_with_a_backlog(folder: Path) -> None:
    (at := folder / "one").mkdir()
    async with both(at, 1) as (one, _):
        await learn(one, 0, 1, 2)
        await save_both(one)
        await one.learner.pause()
        for number in (3, 4, 5):
            await one.learner.submit(example(number, 1))
        at = killed(at, "two")
    async with both(at, 2) as (two, _):
        await two.learner.pause()
        for number in (6, 7):
            await two.learner.submit(example(number, 2))
        at = killed(at, "three")
    async with both(at, 3) as (three, b):
        await learn(three, 8, 9)
        await all_learned(three)
        bits = three.model.bits(), b.bits()
    rows = [*now(3, 4, 5), migrated(6, 2), migrated(7, 2), example(8, 3), example(9, 3)]
    expected = await offline([(1, OLD[:3]), (3, rows)])
    assert bits == (expected, expected)
    async with both(at, 3) as (again, b):
        assert (again.model.bits(), b.bits()) == bits


@pytest.mark.asyncio
async def test_a_promotion_outlives_an_upgrade_and_another_one_follows(folder: Path) -> None:
    (at := folder / "one").mkdir()
    async with both(at, 1) as (one, _):
        await learn(one, 0, 1)
        await save_both(one)
        version = await one.learner.promote("b")
        await learn(one, 2)
        newest = one.learner.version
        assert newest > version
        at = killed(at, "two")
    async with both(at, 3) as (three, b):
        await all_learned(three)
        assert three.learner.champion == "b"
        assert three.learner.version > newest
        assert np.array_equal(three.learner.snapshot()["net/kernel"], b.w.value)
        await learn(three, 3)
        newest = three.learner.version
        await all_learned(three)
        assert await three.learner.promote("main") > newest
        await learn(three, 4)
        newest = three.learner.version
        await all_learned(three)
        bits = three.model.bits(), b.bits()
        at = killed(at, "three")
    expected = await offline([(1, OLD[:2]), (3, [*now(2), example(3, 3), example(4, 3)])])
    assert bits == (expected, expected)
    async with both(at, 3) as (again, b):
        await all_learned(again)
        assert again.learner.champion == "main"
        assert again.learner.version > newest
        assert (again.model.bits(), b.bits()) == bits


@pytest.mark.asyncio
async def test_a_challenger_goes_back_over_an_upgrade_alone(folder: Path) -> None:
    async with both(folder, 1) as (one, _):
        await learn(one, 0, 1)
        await save_both(one)
        await learn(one, 2, 3)
    async with both(folder, 3) as (three, b):
        await learn(three, 4)
        await save_both(three)
        second = second_of(three)
        assert await second.rollback(to=2, skip=[4]) == 2
        await all_learned(three)
        [letter] = await second.dead_letters()
        assert letter.example["y"] == OLD[3]["y"]  # as it was taken
        bits = three.model.bits(), b.bits()
    assert bits == (
        await offline([(1, OLD[:4]), (3, [example(4, 3)])]),
        await offline([(1, OLD[:2]), (3, [*now(2), example(4, 3)])]),
    )
    async with both(folder, 3) as (again, b):
        assert (again.model.bits(), b.bits()) == bits
        await again.learner.promote("b")
        await (await second_of(again).retry(4))
        assert b.bits() == await offline([(1, OLD[:2]), (3, [*now(2), example(4, 3), *now(3)])])


@pytest.mark.asyncio
async def test_one_that_is_detached_begins_with_the_champion_once_it_is_newer(
    folder: Path,
) -> None:
    async with both(folder, 1, max_lag=2) as (one, _):
        await learn(one, 0)
        await save_both(one)
        await second_of(one).pause()
        await learn(one, 1, 2, 3)
        while second_of(one).state != "detached":
            await asyncio.sleep(0)
    async with both(folder, 3) as (three, b):
        began = three.learner.statistics().challengers["b"].began
        assert began == "with the champion's checkpoint 4"
        await learn(three, 4)
        await all_learned(three)
        bits = three.model.bits(), b.bits()
    expected = await offline([(1, OLD[:4]), (3, [example(4, 3)])])
    assert bits == (expected, expected)


@pytest.mark.asyncio
async def test_one_that_is_not_here_when_the_program_goes_up_follows_later(folder: Path) -> None:
    async with both(folder, 1) as (one, _):
        await learn(one, 0, 1)
        await all_learned(one)
    for version in (1, 2):
        async with opened(folder, version) as alone:
            await learn(alone, 2 * version, 2 * version + 1)
            await alone.learner.checkpoint()
    async with both(folder, 3) as (three, b):
        await all_learned(three)
        assert three.learner.statistics().challengers["b"].began == ""
        assert b.bits() == await offline(
            [(1, OLD[:2]), (3, [*now(2, 3), migrated(4, 2), migrated(5, 2)])]
        )


@pytest.mark.asyncio
async def test_both_fall_back_behind_what_the_newer_program_has_saved(folder: Path) -> None:
    (at := folder / "one").mkdir()
    async with both(at, 1) as (one, _):
        await learn(one, 0, 1)
        await all_learned(one)
    async with both(at, 3) as (three, b):
        await learn(three, 2)
        await save_both(three)
        await learn(three, 3)
        await all_learned(three)
        bits = three.model.bits(), b.bits()
        damage(at / "checkpoints", 3)
        damage(at / "b", 3)
        at = killed(at, "two")
    with pytest.warns(RuntimeWarning, match="Restored step 2 .* step 3"):  # noqa: PT031 - at its begin
        async with both(at, 3) as (again, b):
            await all_learned(again)
            assert (again.model.bits(), b.bits()) == bits
            assert again.learner.statistics().challengers["b"].began == ""
    assert bits == (await offline([(1, OLD[:2]), (3, [example(2, 3), example(3, 3)])]),) * 2


def damage(folder: Path, step: int) -> None:
    assert ar.CheckpointManager(folder).steps()[-1] == step
    files = (folder / f"step-{step:010d}").rglob("*")
    largest = max(files, key=lambda path: path.is_file() and path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size - 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_saved", [False, True])
@pytest.mark.parametrize("migrates", [False, True])
async def test_a_late_one_begins_with_what_the_champion_has_of_an_older_version(
    folder: Path, *, has_saved: bool, migrates: bool
) -> None:
    async with opened(folder, 1) as one:
        await learn(one, 0, 1)
        await one.learner.checkpoint()
    if has_saved:
        async with opened(folder, 3) as three:
            await learn(three, 2)
    else:
        async with opened(folder, 1) as one:
            await one.learner.pause()
            await one.learner.submit(OLD[2])
            (left := folder / "left").mkdir()
            for name in ("checkpoints", "journal.db", "journal.db-wal"):
                path = folder / name
                (shutil.copytree if path.is_dir() else shutil.copy)(path, left / name)
        folder = left
    rival = {} if migrates else {"migrate": None}
    async with both(folder, 3, rival=rival) as (three, b):
        assert three.learner.statistics().not_open == {}
        saved = 3 if has_saved else 2
        began = three.learner.statistics().challengers["b"].began
        assert began == f"with the champion's checkpoint {saved}"
        await all_learned(three)
        assert b.bits() == three.model.bits()


# ---- clients that are older --------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_an_older_program_took_is_known_to_a_client_that_is_older_still(
    folder: Path,
) -> None:
    async with opened(folder, 1) as one:
        await (await one.learner.submit(OLD[0], key="a"))
        await asyncio.gather(*await one.learner.submit_many(OLD[1:3], key="many"))
        with pytest.raises(PoisonedExampleError):
            await (await one.learner.submit(example(3, 1, BAD), key="bad"))
        await one.learner.pause()
        await one.learner.submit(OLD[4], key="left")
        await one.learner.checkpoint()
    async with opened(folder, 3) as three:
        learner = three.learner
        again = await learner.submit(OLD[0], key="a")
        assert (again.number, again.is_duplicate) == (1, True)
        assert await again <= learner.version
        many = await learner.submit_many(OLD[1:3], key="many")
        assert [ticket.number for ticket in many] == [2, 3]
        with pytest.raises(PoisonedExampleError, match="Example 4 was set aside"):
            await (await learner.submit(example(3, 1, BAD), key="bad"))
        assert await (await learner.submit(OLD[4], key="left")) <= learner.version
        assert learner.statistics().num_duplicates == 5
        bits, last = three.model.bits(), learner.statistics().last_number
        refused: list[tuple[list[Any], str | None]] = [
            ([OLD[5]], "new"), ([OLD[5]], None), ([OLD[5]], ""), ([OLD[5]], "\ud800"),
            ([OLD[0]] * 9, "a"), ([], "a"),
        ]  # fmt: skip
        for examples, key in refused:
            with pytest.raises(ValueError, match=r"has the keys|key must be|queue has 20"):
                await learner.submit_many(examples, key=key)
        with pytest.raises(ValueError, match="has the keys"):
            learner.submit_nowait(OLD[0], key="a")
        await (await learner.submit(example(6, 3), key="now"))
        with pytest.raises(ValueError, match="has the keys"):  # that was no older program
            await learner.submit(OLD[6], key="now")
        assert learner.statistics().last_number == last + 1
        assert three.model.bits() != bits
    async with opened(folder, 3, journal=Journal(folder / "journal.db", keep_keys_s=0.0)) as three:
        with pytest.raises(ValueError, match="has the keys"):  # it is forgotten
            await three.learner.submit(OLD[0], key="a")
