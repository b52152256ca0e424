"""TouchedRows: few rows where that is enough, everything where it is not."""

import numpy as np

import aioreplica as ar
from aioreplica.optimizers._blocks import TouchedRows


def test_only_the_rows_between_two_arrays_are_copied() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((3, 1)))
    older, newer = np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [9.0], [2.0]])
    touched.remember(table, older, newer, np.array([1]))
    table.commit((newer,))
    older[2] = 7.0  # shows who copies it

    touched.bring_up_to_date(table, newer, older)

    assert older[:, 0].tolist() == [0.0, 9.0, 7.0]


def test_other_arrays_are_copied_whole() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer, other = np.zeros((2, 1)), np.ones((2, 1)), np.full((2, 1), 5.0)
    for current, buffer in ((newer, other.copy()), (other, older.copy())):
        touched.remember(table, older, newer, np.array([0]))
        table.commit((newer,))
        touched.bring_up_to_date(table, current, buffer)
        np.testing.assert_array_equal(buffer, current)


def test_it_holds_no_array() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer = np.zeros((2, 1)), np.ones((2, 1))
    touched.remember(table, older, newer, np.array([0]))
    del older, newer

    buffer, current = np.zeros((2, 1)), np.full((2, 1), 3.0)
    touched.bring_up_to_date(table, current, buffer)

    np.testing.assert_array_equal(buffer, current)


def test_only_the_very_next_write_knows_what_changed() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer = np.zeros((2, 1)), np.ones((2, 1))
    touched.remember(table, older, newer, np.array([0]))
    for array in (newer, older, newer):  # the same two, twice round
        table.commit((array,))

    touched.bring_up_to_date(table, newer, older)

    np.testing.assert_array_equal(older, newer)
