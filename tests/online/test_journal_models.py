"""Several models on one journal: whose letters are whose, and which rows are kept for whom."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from aioreplica.errors import JournalError
from aioreplica.online import Journal
from aioreplica.online._journal_file import JournalFile
from aioreplica.online._journal_format import MAIN, Dead, Entry
from aioreplica.online._journal_keys import without_rows
from aioreplica.online._journal_models import Consumer


@pytest.fixture
def file(folder: Path) -> Iterator[JournalFile]:
    opened = Journal(folder / "journal.db").file()
    opened.open()
    yield opened
    opened.close()


def append(file: JournalFile, count: int = 1, revived: tuple[str, int] | None = None) -> int:
    [result] = file.append([Entry([{"x": 0}] * count, revived=revived)], 0.0).results
    assert isinstance(result, tuple), result
    return result[0]


def letter(number: int) -> Dead:
    return Dead(number, "ValueError: no", 0.0)


def numbers(file: JournalFile, model: str, after: int = 0) -> list[int]:
    return [row.number for row in file.rows(after, 1000, model)]


def test_a_journal_begins_with_one_model_which_is_the_champion(file: JournalFile) -> None:
    assert file.consumers() == {MAIN: Consumer(0, 0, 0, "")}
    assert file.champion() == MAIN


def test_dead_letters_are_those_of_a_model(file: JournalFile) -> None:
    append(file, 4)
    file.attach("b", 0, 0.0)
    file.set_aside([letter(2)], MAIN)
    file.set_aside([letter(3)], "b")
    assert (numbers(file, MAIN), numbers(file, "b")) == ([1, 3, 4], [1, 2, 4])
    for model, number in ((MAIN, 2), ("b", 3)):
        assert [each.number for each in file.dead_letters(0, 9, model=model)] == [number]
    assert not file.discard(2, "b")
    assert file.take_back([2, 3], "b") == [3]
    assert numbers(file, "b") == [1, 2, 3, 4]
    assert file.fates([2, 3]) == {2: "ValueError: no"}


def test_a_letter_that_is_discarded_stays_an_example_of_the_others(file: JournalFile) -> None:
    append(file, 3)
    file.attach("b", 0, 0.0)
    file.set_aside([letter(2)])
    assert file.discard(2)
    assert (numbers(file, MAIN), numbers(file, "b")) == ([1, 3], [1, 2, 3])
    assert (file.fates([2]), file.fates([2], "b")) == ({2: 0}, {})
    file.detach("b", "too slow")
    file.set_aside([letter(3)])
    assert file.discard(3)
    assert file.read(without_rows, [1, 2, 3]) == [3]  # nobody else needs it


def test_a_letter_that_is_taken_again_is_a_new_example_for_its_model_alone(
    file: JournalFile,
) -> None:
    append(file, 2)
    file.attach("b", 0, 0.0)
    file.set_aside([letter(2)], "b")
    assert append(file, revived=("b", 2)) == 3
    assert append(file) == 4
    assert (numbers(file, MAIN), numbers(file, "b")) == ([1, 2, 4], [1, 3, 4])
    assert (file.fates([2, 3]), file.fates([2, 3], "b")) == ({3: 2}, {2: 3})
    file.attach("late", 0, 0.0)  # with the champion's past
    assert numbers(file, "late") == [1, 2, 4]


def test_rows_are_kept_as_long_as_an_attached_model_needs_them(file: JournalFile) -> None:
    append(file, 6)
    file.attach("b", 2, 0.0)
    assert file.compact([5], 0.0) == 3
    assert file.consumers() == {MAIN: Consumer(5, 5, 0, ""), "b": Consumer(2, 2, 0, "")}
    with pytest.raises(JournalError, match="begins at example 3 by now"):
        file.attach("c", 1, 0.0)
    assert file.compact([3, 4], 0.0, "b") == 4
    assert numbers(file, "b") == [4, 5, 6]
    file.detach("b", "120 examples behind")
    assert file.compact([5], 0.0) == 6
    assert file.consumers()["b"] == Consumer(3, 4, 0, "120 examples behind")
    with pytest.raises(JournalError, match="'b' cannot be promoted, as it is detached: 120"):
        file.promote("b", 4, 9)
    file.attach("b", 5, 0.0)
    assert numbers(file, "b", 5) == [6]


def test_who_begins_again_has_a_new_generation_and_the_champions_letters(
    file: JournalFile,
) -> None:
    append(file, 5)
    file.attach("b", 0, 0.0)
    file.set_aside([letter(1), letter(2), letter(4)], "b")
    assert file.discard(1, "b")
    file.set_aside([letter(3), letter(5)])
    assert file.rollbacks("b") == ()
    file.detach("b", "stuck")
    file.attach("b", 3, 0.0)
    assert [tuple(each) for each in file.rollbacks("b")] == [(1, 0)]
    assert [each.number for each in file.dead_letters(0, 9, model="b")] == [3]
    assert file.fates([1, 2, 3, 4], "b") == {3: "ValueError: no"}
    assert numbers(file, "b", 3) == [4, 5]
    assert file.rollbacks() == ()


def test_a_late_model_has_what_becomes_of_the_champions_letters(file: JournalFile) -> None:
    append(file, 5)
    file.set_aside([letter(2), letter(3), letter(4)])
    assert file.discard(2)
    assert append(file, revived=(MAIN, 3)) == 6
    file.attach("b", 5, 0.0)
    assert append(file, revived=(MAIN, 4)) == 7
    assert numbers(file, "b", 5) == [6]  # the champion has not learned 3, and 4 is a letter of "b"
    assert file.fates([2, 3, 4, 7], "b") == {2: 0, 3: 6, 4: "ValueError: no", 7: "ValueError: no"}
    assert append(file, revived=("b", 4)) == 8
    assert (numbers(file, MAIN, 5), numbers(file, "b", 5)) == ([6, 7], [6, 8])


def test_a_rollback_is_that_of_a_model_and_keeps_what_it_needs(file: JournalFile) -> None:
    append(file, 6)
    file.attach("b", 1, 0.0)
    file.compact([4], 0.0)
    assert [tuple(each) for each in file.roll_back(2, 3, [5], 0.0)] == [(1, 3)]
    assert file.consumers()[MAIN].kept_behind == 2
    assert (numbers(file, MAIN, 2), numbers(file, "b", 2)) == ([3, 4, 6], [3, 4, 5, 6])
    assert file.compact([5], 0.0, "b") == 3
    with pytest.raises(JournalError, match="nothing can go on from a checkpoint that has"):
        file.roll_back(1, 3, [], 0.0)
    assert file.rollbacks("b") == ()


def test_one_is_promoted_and_its_versions_go_on_from_there(file: JournalFile) -> None:
    append(file, 9)
    file.attach("b", 0, 0.0)
    with pytest.raises(JournalError, match="'c' cannot be promoted, as there are only 'b', 'main'"):
        file.promote("c", 4, 9)
    assert file.skip_versions(2, 2, "b") == 9
    file.promote("b", 4, 30)
    assert file.champion() == "b"
    assert file.skip_versions(1, 1, "b") == 35  # 30 at example 4, so at most 35 at example 9
    assert file.skip_versions(9, 9) == 9  # of the first model
    file.promote(MAIN)  # as a closed journal is asked to: behind all that "b" may have served
    assert file.consumers()[MAIN].least_version == 44
    file.promote("b", 9, 50)
    with pytest.raises(JournalError, match="'b' is the champion, which stays"):
        file.detach("b", "stuck")
    file.close()
    opened = file.open()
    assert (opened.champion, file.champion()) == ("b", "b")


@pytest.mark.parametrize("seed", range(5))
def test_no_model_misses_a_row_whatever_the_others_do(file: JournalFile, seed: int) -> None:
    """Checked against sets in memory: what each model has to learn is always in the file."""
    rng, names = Random(seed), [MAIN, "b", "c"]
    todo: dict[str, set[int]] = {MAIN: set()}
    saved = dict.fromkeys(names, 0)
    dead: dict[str, set[int]] = {name: set() for name in names}
    for _ in range(150):
        model, what = rng.choice(names), rng.randrange(7)
        last = max((max(each, default=0) for each in todo.values()), default=0)
        if what == 0:
            first = append(file, 2)
            for each in todo.values():
                each |= {first, first + 1}
        elif what == 1 and model not in todo:
            file.attach(model, saved[MAIN], 0.0)
            dead[model] = {each for each in dead[MAIN] if each <= saved[MAIN]}
            todo[model] = {each for each in file_numbers(file) if each > saved[MAIN]}
            todo[model] -= set(gone(file, model))
            saved[model] = saved[MAIN]
        elif model not in todo:
            continue
        elif what == 2 and last:
            saved[model] = max(saved[model], rng.randint(0, last))
            todo[model] = {each for each in todo[model] if each > saved[model]}
            file.compact([saved[model]], 0.0, model)
        elif what == 3 and todo[model]:
            number = rng.choice(sorted(todo[model]))
            file.set_aside([letter(number)], model)
            dead[model].add(number)
            todo[model].discard(number)
        elif what == 4 and dead[model]:
            number = rng.choice(sorted(dead[model]))
            assert file.discard(number, model)
            dead[model].discard(number)
        elif what == 5 and dead[model]:
            number = rng.choice(sorted(dead[model]))
            todo[model].add(append(file, revived=(model, number)))
            dead[model].discard(number)
        elif what == 6 and model != MAIN:
            file.detach(model, "stuck")
            del todo[model]
        for each, expected in todo.items():
            assert set(numbers(file, each, saved[each])) == expected, (each, what)


def file_numbers(file: JournalFile) -> list[int]:
    path = file._path
    with sqlite3.connect(path) as connection:
        found = [number for (number,) in connection.execute("SELECT number FROM examples")]
    connection.close()
    return found


def gone(file: JournalFile, model: str) -> list[int]:
    connection = sqlite3.connect(file._path)
    found = connection.execute("SELECT number FROM gone WHERE model = ?", [model]).fetchall()
    connection.close()
    return [number for (number,) in found]
