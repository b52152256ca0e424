"""The fuzzer in short: some random programs, and that its oracle does tell right from wrong."""

from dataclasses import replace

import pytest

from tests.fuzz.judge import problem, shrink, try_program
from tests.fuzz.model import verdicts
from tests.fuzz.play import play
from tests.fuzz.program import Plant, Program, Statement, Value, random_program

SHORT = 6


@pytest.mark.parametrize("block", range(2))
def test_random_programs(block: int) -> None:
    for seed in range(block * SHORT, (block + 1) * SHORT):
        program = random_program(seed)
        assert try_program(program) is None, f"seed {seed}\n{program}"


@pytest.mark.xslow
def test_more_random_programs() -> None:
    for seed in (*range(2 * SHORT, 4 * SHORT), *range(1000, 1080)):
        program = random_program(seed)
        assert try_program(program) is None, f"seed {seed}\n{program}"


@pytest.mark.xslow
def test_random_programs_on_a_real_loop() -> None:
    for seed in range(5):
        program = random_program(seed, real=True)
        assert try_program(program) is None, f"seed {seed}\n{program}"


@pytest.mark.xslow
def test_more_random_programs_on_a_real_loop() -> None:
    for seed in range(5, 30):
        program = random_program(seed, real=True)
        assert try_program(program) is None, f"seed {seed}\n{program}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 16, 19])
def test_random_programs_on_devices_with_streams(seed: int) -> None:
    pytest.importorskip("torch")
    program = random_program(seed, streams=True)

    assert try_program(program) is None, program


def test_the_same_seed_gives_the_same_program() -> None:
    assert random_program(17) == random_program(17)
    assert str(random_program(17)) != str(random_program(18))


def test_a_program_prints_as_the_text_that_makes_it() -> None:
    names = {"Program": Program, "Statement": Statement, "Plant": Plant, "Value": Value}
    for seed in range(50):
        program = random_program(seed)
        assert eval(str(program), names) == program


# ---- the oracle --------------------------------------------------------------------------------

REDUCE = Statement(0, "all_reduce", (0, 1))
WRITE = Statement(1, "write", (0, 1))
BOTH = Program(3, 2, (REDUCE, WRITE))


def test_a_wrong_result_is_seen() -> None:
    outcome = play(BOTH)
    assert problem(BOTH, outcome) is None

    outcome.results[1][0] = outcome.results[1][0] + 1
    assert "gave replica 1" in str(problem(BOTH, outcome))


def test_a_wrong_dtype_is_seen() -> None:
    outcome = play(BOTH)
    outcome.results[0][0] = outcome.results[0][0].astype("f4")

    assert "gave replica 0" in str(problem(BOTH, outcome))


def test_a_missing_result_is_seen() -> None:
    outcome = play(BOTH)
    del outcome.results[0][0]

    assert "got nothing" in str(problem(BOTH, outcome))


def test_half_a_write_is_seen() -> None:
    outcome = play(BOTH)
    u, v, w = outcome.snapshots[-1]
    outcome.snapshots.append((u, v - 1, w))

    assert "no whole write" in str(problem(BOTH, outcome))


@pytest.mark.xslow
def test_leftovers_of_a_program_are_found() -> None:
    for change in ({"left": ["a task"]}, {"alarms": ["a warning"]}, {"probe": None}):
        outcome = play(BOTH)
        outcome.__dict__.update(change)
        assert problem(BOTH, outcome) is not None


@pytest.mark.parametrize(
    "kind", ["raise", "return", "other", "differs", "skip", "two at once", "never awaited"]
)
def test_a_plant_ends_the_run_as_it_must(kind: str) -> None:
    program = replace(BOTH, plants=(Plant(1, 0, kind, 0 if kind == "two at once" else -1),))

    outcome = play(program)

    assert problem(program, outcome) is None
    assert outcome.error is not None
    assert problem(replace(program, plants=()), outcome) is not None
    assert [verdict.kind for verdict in verdicts(program)] != ["ok"]


MESSAGE = Program(3, 2, (Statement(0, "message", (1, 0)), Statement(1, "message", (0, 1))))


@pytest.mark.parametrize(
    "kind", ["raise", "return", "differs", "skip", "withdraw", "withdraw on", "cancel child"]
)
def test_a_plant_at_a_message_ends_the_run_as_it_must(kind: str) -> None:
    late = 1 if kind in {"withdraw", "withdraw on", "cancel child"} else -1
    program = replace(MESSAGE, plants=(Plant(0, 0, kind, late),))

    outcome = play(program)

    assert problem(program, outcome) is None
    assert outcome.error is not None
    assert problem(replace(program, plants=()), outcome) is not None


def test_a_wrong_message_is_seen() -> None:
    outcome = play(MESSAGE)
    assert problem(MESSAGE, outcome) is None

    outcome.results[0][0] = outcome.results[1][1]
    assert "message 0 gave replica 0" in str(problem(MESSAGE, outcome))


def test_a_program_that_goes_wrong_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(program: Program) -> str | None:
        kinds = {statement.kind for statement in program.statements if 0 in statement.members}
        return "broken" if {"start", "barrier"} <= kinds else None

    monkeypatch.setattr("tests.fuzz.judge.try_program", wrong)
    seed = next(seed for seed in range(1000) if wrong(random_program(seed)))

    smallest, text = shrink(random_program(seed))

    assert text == "broken"
    assert len(smallest.statements) == 2
    assert smallest.size == 1
