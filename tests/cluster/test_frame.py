"""Frames: hashes of what has to be equal on all workers, and what they could do at once."""

import weakref

import numpy as np
import pytest

from aioreplica.cluster._frame import Frame, FrameKind, digest_of, slots_in_common


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
