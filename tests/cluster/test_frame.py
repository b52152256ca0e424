"""Hashes of what has to be equal on all workers."""

import weakref

import pytest

from aioreplica.cluster._frame import digest_of


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
