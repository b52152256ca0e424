"""Blocks of memory that another process reads, and processes as a fork of the program sees them."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from aioreplica.devices._lane import Publication
from aioreplica.devices.processes._link import _Process
from aioreplica.devices.processes._publications import Publications
from aioreplica.devices.processes._segments import Arena, Mappings

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="shared memory files")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def test_a_block_is_released_when_its_last_array_is_gone(arena: Arena) -> None:
    """Else the arena would grow with every op."""
    block = arena.put(np.arange(5, dtype=np.uint8))
    mappings = Mappings(is_readonly=True)
    segment = arena.segments[block.segment_id]
    mappings.add(segment.segment_id, os.dup(segment.descriptor), segment.size)

    array = mappings.view(block).view(np.int8)
    tail = array[3:]
    del array
    gc.collect()
    assert (mappings.num_views, mappings.take_released()) == (1, [])
    assert tail.tolist() == [3, 4]

    del tail
    gc.collect()
    assert (mappings.num_views, mappings.take_released(), mappings.take_released()) == (
        0,
        [block],
        [],
    )


def test_a_block_that_is_viewed_again_is_released_once(arena: Arena) -> None:
    block = arena.put(np.arange(5, dtype=np.uint8))
    mappings = Mappings(is_readonly=True)
    segment = arena.segments[block.segment_id]
    mappings.add(segment.segment_id, os.dup(segment.descriptor), segment.size)

    first = mappings.view(block)
    second = mappings.view(block)
    del first
    gc.collect()
    assert mappings.take_released() == []
    assert second.tolist() == [0, 1, 2, 3, 4]
    del second
    gc.collect()
    assert mappings.take_released() == [block]


def test_a_process_is_joined_by_the_program_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _Process(target=print)
    with pytest.raises(AssertionError, match="started"):
        process.join()

    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork of the program
    process.join()


def test_names_of_small_values_are_forgotten_too() -> None:
    shared, thing = Publications(), np.ones(3)
    reader, idle = shared.new_reader(), shared.new_reader()
    number = shared.number_of(thing)
    reader.was_told(number)
    assert reader.value(number, Publication((1, 0), 1, thing.copy())) is not None

    del thing

    assert (reader.take_forgotten(), idle.take_forgotten()) == ([number], [])
    assert not reader.knows(number)
