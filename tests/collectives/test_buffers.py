"""The buffer pool: memory is lent again only when nobody can see what is in it."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from aioreplica.collectives import BufferPool
from aioreplica.collectives._plan import KEPT_CALLS, POOLED_BYTES
from aioreplica.values import CAN_COUNT_REFERENCES

pytestmark = pytest.mark.skipif(
    not CAN_COUNT_REFERENCES, reason="buffers are reused only where references can be counted"
)

SIZE = POOLED_BYTES // 8
F8 = np.dtype("f8")


def lend(pool: BufferPool, size: int = SIZE) -> Any:
    return pool.array((size,), F8)


def address(array: Any) -> int:
    return array.__array_interface__["data"][0]


HOLDERS = {
    "the array": lambda a: a,
    "a view": lambda a: a.view(),
    "a slice": lambda a: a[5:7],
    "a slice of a slice": lambda a: a[5:][:1],
    "a reshaped one": lambda a: a.reshape(2, -1).T,
    "another dtype": lambda a: a.view("u1")[3:4],
    "a memoryview": memoryview,
    "a memoryview of a view": lambda a: memoryview(a[:2]),
    "frombuffer": lambda a: np.frombuffer(a, "f4"),
    "an iterator": lambda a: a.flat,
    "a list of views": lambda a: [a[:1], a[1:2]],
    "a closure": lambda a: lambda: a,
    "a read-only one": lambda a: np.broadcast_to(a[:1], (9,)),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (2,), (0,)),
    "a NumPy 0-d view": lambda a: a[3:4].reshape(()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_held_buffer_is_not_lent_again(holder: str) -> None:
    pool = BufferPool()
    array = lend(pool)
    array[:] = 1.0
    where = address(array)
    held = HOLDERS[holder](array)
    del array

    for _ in range(3):
        other = lend(pool)
        assert address(other) != where
        other[:] = 2.0
        del other

    del held
    gc.collect()
    assert where in {address(array) for array in [lend(pool) for _ in range(3)]}


def test_a_free_buffer_is_lent_again() -> None:
    pool = BufferPool()
    array = lend(pool)
    where = address(array)
    del array

    for shape, dtype in (((SIZE,), "f8"), ((2, SIZE // 2), "i8"), ((2 * SIZE,), "f4")):
        pool.next_call()
        again = pool.array(shape, np.dtype(dtype))
        assert address(again) == where
        assert again.shape == shape
        assert again.dtype == dtype
        assert again.flags.c_contiguous
        assert again.flags.writeable
        del again


def test_two_at_once_are_two() -> None:
    pool = BufferPool()
    arrays = [lend(pool) for _ in range(4)]

    assert len({address(array) for array in arrays}) == 4
    assert not any(np.shares_memory(arrays[0], other) for other in arrays[1:])


def test_another_size_is_another_buffer() -> None:
    pool = BufferPool()
    where = address(lend(pool))

    assert address(lend(pool, 2 * SIZE)) != where


def test_small_ones_are_not_kept() -> None:
    pool = BufferPool()
    pool.array((SIZE - 1,), F8)
    pool.array((0,), F8)
    pool.array((), F8)

    assert repr(pool) == "<BufferPool | 0 buffers, 0 bytes>"


def test_an_unused_buffer_is_freed() -> None:
    pool = BufferPool()
    lend(pool)
    for _ in range(KEPT_CALLS):
        pool.next_call()
    assert repr(pool) == f"<BufferPool | 1 buffers, {POOLED_BYTES} bytes>"

    pool.next_call()

    assert repr(pool) == "<BufferPool | 0 buffers, 0 bytes>"


def test_a_buffer_lent_again_is_kept() -> None:
    pool = BufferPool()
    for _ in range(5 * KEPT_CALLS):
        pool.next_call()
        lend(pool)

    assert repr(pool) == f"<BufferPool | 1 buffers, {POOLED_BYTES} bytes>"


def test_a_held_buffer_that_is_let_go_keeps_its_numbers() -> None:
    pool = BufferPool()
    array = lend(pool)
    array[:] = 7.0
    for _ in range(3 * KEPT_CALLS):
        pool.next_call()
        lend(pool)[:] = 1.0

    assert set(array) == {7.0}


def test_clearing_lets_go_of_everything() -> None:
    pool = BufferPool()
    array = lend(pool)
    array[:] = 3.0

    pool.clear()

    assert repr(pool) == "<BufferPool | 0 buffers, 0 bytes>"
    assert set(array) == {3.0}
    buffer = weakref.ref(array.base)
    del array
    assert buffer() is None
