"""The event log: what it takes and what it keeps."""

from typing import Any

import numpy as np
import pytest

from aioreplica.telemetry import EventLog


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (np.array([[3]]), 3.0),
        ("text", "text"),
    ],
)
def test_numbers_arrays_of_one_and_texts_are_kept(value: Any, kept: Any) -> None:
    log = EventLog()

    log.add_scalar(7, 0, "x", value)

    assert [(e.step, e.name, e.value) for e in log.events("scalar")] == [(7, "x", kept)]


@pytest.mark.parametrize("value", [None, b"x", 1j, np.ones(2), [1.0], 10**400])
def test_anything_else_is_refused(value: Any) -> None:
    log = EventLog()

    with pytest.raises(TypeError, match="'x' takes a number or a text, got"):
        log.add_scalar(0, 0, "x", value)
    assert len(log) == 0


def test_the_newest_are_kept() -> None:
    log = EventLog(capacity=2)

    for step in range(4):
        log.add("loop", "begin", step)

    assert [event.step for event in log.events()] == [2, 3]
    with pytest.raises(ValueError, match="at least 1 event, got capacity=0"):
        EventLog(capacity=0)
