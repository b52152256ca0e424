"""Frames: hashes of what has to be equal on all workers, and what they could do at once."""

import weakref

import numpy as np
import pytest

from aioreplica.cluster._frame import Alarm, Frame, FrameKind, digest_of, slots_in_common


class Text(str):
    """One that can be watched."""


def test_a_hash_tells_texts_and_their_borders_apart() -> None:
    long = "x" * 100_000
    texts = [("ab", ""), ("a", "b"), ("", "ab"), (long, ""), (long[1:], "x"), (long + "y", "")]
    assert len({digest_of(*each) for each in texts}) == len(texts)
    assert all(digest_of(*each) == digest_of(*each) for each in texts)


@pytest.mark.parametrize("parts", [1, 1000])
def test_long_texts_are_not_kept(parts: int) -> None:
    texts = [Text("x" * (1_000_000 // parts)) for _ in range(parts)]
    held = [weakref.ref(each) for each in texts]
    digest_of(*texts)
    del texts
    assert not any(each() for each in held)


def frame(sequence: int, *, stage: int = 0, text: str = "") -> Frame:
    return Frame(FrameKind.COLLECTIVE, 0, "step", sequence, stage, digest_of(text), b"s")


@pytest.mark.parametrize(
    ("theirs", "count"),
    [
        ([frame(2), frame(3), frame(4)], 3),
        ([frame(2), frame(3), frame(4), frame(5)], 3),
        ([frame(2)], 1),
        ([], 0),
        ([frame(2), frame(3, text="other"), frame(4)], 1),
        ([frame(2, stage=1), frame(3), frame(4)], 0),
        ([frame(2), frame(4), frame(5)], 1),
    ],
)
def test_workers_do_at_once_what_all_have_queued_up_to_the_first_difference(
    theirs: list[Frame], count: int
) -> None:
    own, ours = frame(1), [frame(2), frame(3), frame(4)]
    for order in (slice(None), slice(None, None, -1)):
        rows = np.stack([own.encode(0, (), ours), own.encode(0, (), theirs)][order])
        assert slots_in_common(rows, own, ours) == [[b"s", b"s"]] * count
        assert len(slots_in_common(rows, own, theirs)) == count


@pytest.mark.parametrize("num_groups", [1, 17])
@pytest.mark.parametrize("function", ["", "step"])
def test_an_alarm_tells_who_comes_no_more_to_a_group(num_groups: int, function: str) -> None:
    sent = {f"group {number}": 2 for number in range(num_groups)}
    alarm = Alarm.decode(3, 0, Alarm(0, 3, function, "", sent).encode())

    assert not alarm.comes_to("another", 1, has_met=False)
    is_told = num_groups == 1 or not function  # else it ends more runs than it had to
    assert alarm.comes_to("group 0", 2, has_met=True) == is_told
