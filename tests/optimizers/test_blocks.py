"""TouchedRows: few rows where that is enough, everything where it is not."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers._blocks import BLOCK_BYTES, TouchedRows

ROOM = np.empty(BLOCK_BYTES, np.uint8)


def test_only_the_rows_between_two_arrays_are_copied() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((3, 1)))
    older, newer = np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [9.0], [2.0]])
    touched.remember(table, older, newer, np.array([1]))
    table.store.write({table: (newer,)})
    older[2] = 7.0  # shows who copies it

    touched.bring_up_to_date(table, newer, older, ROOM)

    assert older[:, 0].tolist() == [0.0, 9.0, 7.0]


def test_other_arrays_are_copied_whole() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer, other = np.zeros((2, 1)), np.ones((2, 1)), np.full((2, 1), 5.0)
    for current, buffer in ((newer, other.copy()), (other, older.copy())):
        touched.remember(table, older, newer, np.array([0]))
        table.store.write({table: (newer,)})
        touched.bring_up_to_date(table, current, buffer, ROOM)
        np.testing.assert_array_equal(buffer, current)


def test_it_holds_no_array() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer = np.zeros((2, 1)), np.ones((2, 1))
    touched.remember(table, older, newer, np.array([0]))
    del older, newer

    buffer, current = np.zeros((2, 1)), np.full((2, 1), 3.0)
    touched.bring_up_to_date(table, current, buffer, ROOM)

    np.testing.assert_array_equal(buffer, current)


def test_only_the_very_next_write_knows_what_changed() -> None:
    touched, table = TouchedRows(), ar.Variable(np.zeros((2, 1)))
    older, newer = np.zeros((2, 1)), np.ones((2, 1))
    touched.remember(table, older, newer, np.array([0]))
    for array in (newer, older, newer):  # the same two, twice round
        table.store.write({table: (array,)})

    touched.bring_up_to_date(table, newer, older, ROOM)

    np.testing.assert_array_equal(older, newer)


@pytest.mark.parametrize("width", [0, 1, BLOCK_BYTES // 8 - 1, BLOCK_BYTES // 8 + 1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_any_width_and_order_are_brought_up_to_date(width: int, order: Any) -> None:
    rng = np.random.default_rng(0)
    touched, table = TouchedRows(), ar.Variable(np.zeros((5, width)))
    newer = np.array(rng.normal(size=(5, width)), order=order)
    older = newer.copy()
    rows = np.array([0, 2, 3])
    older[rows] = 7.0
    touched.remember(table, older, newer, rows)
    table.store.write({table: (newer,)})

    touched.bring_up_to_date(table, newer, older, ROOM)

    np.testing.assert_array_equal(older, newer)
