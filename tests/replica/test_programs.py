"""Random programs of groups and handles in real runs: they finish or mismatch, and never hang."""

import asyncio
import random
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
from tests.conftest import mirrored
from tests.replica.gated import cycles, me, my_id
from tests.replica.programs import Await, Meet, Program, Start, can_finish, random_program

pytestmark = pytest.mark.usefixtures("no_task_left")

OPS = {"A": "sum", "B": "max", "C": "min"}
LIMIT_S = 10


def told_apart(program: Program) -> Program:
    """The same for the oracle, to which a started call is no other than an awaited one."""
    return [
        [s if isinstance(s, Await) else type(s)(s.group, s.kind + type(s).__name__) for s in part]
        for part in program
    ]


async def play(strategy: ar.Strategy, program: Program, seed: int) -> list[list[Any]]:
    """Run a program; every replica loiters at random between its calls."""

    got: dict[int, list[Any]] = {}

    async def step() -> None:
        rng = random.Random(1000 * seed + my_id())
        handles: list[Any] = []
        results = got[my_id()] = []
        for one in program[my_id()]:
            await cycles(rng.randint(0, 3))
            if isinstance(one, Await):
                results.append(await handles[one.index])
                continue
            group = me().group(rng.sample(one.group, len(one.group)))
            if isinstance(one, Start):
                handles.append(group.start_all_reduce(OPS[one.kind], my_id()))
            else:
                results.append(await group.all_reduce(OPS[one.kind], my_id()))
        for handle in handles:
            handle.cancel()

    async with asyncio.timeout(LIMIT_S):
        await strategy.run(step)
    return [got[i] for i in range(len(program))]


def expected(program: Program) -> list[list[Any]]:
    ways = {"A": sum, "B": max, "C": min}
    results: list[list[Any]] = []
    for part in program:
        started = [ways[s.kind](s.group) for s in part if isinstance(s, Start)]
        results.append([
            started[s.index] if isinstance(s, Await) else ways[s.kind](s.group)
            for s in part if not isinstance(s, Start)
        ])  # fmt: skip
    return results


async def check(num_programs: int, *, bend: bool) -> dict[bool, int]:
    rng = random.Random(3 + bend)
    strategies = {count: mirrored(count) for count in (2, 3, 4)}
    verdicts = {True: 0, False: 0}
    for number in range(num_programs):
        program = random_program(rng, bend=bend)
        finishes = can_finish(told_apart(program))
        verdicts[finishes] += 1
        playing = play(strategies[len(program)], program, number)
        if finishes:
            assert await playing == expected(program), program
        else:
            with pytest.raises(MergeMismatchError):
                await playing
    for strategy in strategies.values():
        await strategy.aclose()
    return verdicts


@pytest.mark.asyncio
@pytest.mark.parametrize("bend", [False, True], ids=["sound", "bent"])
async def test_random_programs_finish_or_mismatch(bend: bool) -> None:
    verdicts = await check(300, bend=bend)

    assert verdicts[True] > 30
    assert (verdicts[False] > 30) is bend


@pytest.mark.asyncio
@pytest.mark.parametrize("bend", [False, True], ids=["sound", "bent"])
async def test_a_few_random_programs(bend: bool) -> None:
    assert sum((await check(25, bend=bend)).values()) == 25


@pytest.mark.asyncio
async def test_a_program_by_hand(triple: ar.MirroredStrategy) -> None:
    program: Program = [
        [Start((0, 1)), Meet((0, 1, 2), "B"), Await(0)],
        [Start((0, 1)), Meet((0, 1, 2), "B"), Await(0)],
        [Meet((0, 1, 2), "B")],
    ]

    assert await play(triple, program, 0) == expected(program) == [[2, 1], [2, 1], [2]]
