"""The work that the benchmark of free threading compares, and its bare threads."""

import threading

import pytest

from benchmarks.free_threading import WORK, BareThreads, play, tokenize


def test_a_tokenizer_merges_the_most_frequent_pairs() -> None:
    assert tokenize("ab ab ab") == 3  # "ab" is one token
    assert tokenize("a b c") == 3  # no pairs


def test_a_game_is_the_same_for_the_same_seed() -> None:
    assert play(3, 200) == play(3, 200) > 10


@pytest.mark.parametrize("name", WORK)
def test_work_gives_the_same_on_every_thread(name: str) -> None:
    threads = BareThreads(WORK[name], 2)
    before = threading.active_count()
    try:
        first, second = threads.step(), threads.step()
    finally:
        threads.close()

    assert first == second == 2 * WORK[name]()
    assert threading.active_count() == before - 2
