"""Plain data are copied at the cut and encoded on the writer's thread; too many are refused."""

import json
import threading
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import _format, _state
from aioreplica.checkpoint._state import MAX_VALUES, PlainCopies, encoded
from aioreplica.tree import decode, encode

pytestmark = pytest.mark.asyncio


async def test_plain_data_are_encoded_on_the_writers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()

    def noting(copied: Any) -> Any:
        threads.add(threading.get_ident())
        return encoded(copied)

    monkeypatch.setattr(_state, "encoded", noting)
    history: list[Any] = [0.5] * 100_000
    state = {"history": history, "names": {"a": [1, ("b", b"c")]}}
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, state, wait=False)
        history.append(1.0)  # behind the cut
        state["names"]["a"][1] = "changed"  # type: ignore[index]
        await manager.wait()
        restored: dict[str, Any] = {"history": [], "names": {}}
        await manager.restore(restored)
    assert len(restored["history"]) == 100_000
    assert restored["names"] == {"a": [1, ("b", b"c")]}
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "data",
    [
        [0.5] * (MAX_VALUES + 1),
        [[]] * (MAX_VALUES // 8),
        dict.fromkeys(range(MAX_VALUES // 2 + 1)),
        ["x" * MAX_VALUES] * 64,
        b"x" * 64 * MAX_VALUES,
    ],
    ids=["numbers", "lists", "dict", "texts", "bytes"],
)
async def test_more_plain_data_than_can_be_copied_are_refused(data: Any, tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        said = r"plain data .* more than 250,000 values, with those of 'history'.* Put long lists"
        with pytest.raises(ValueError, match=said):
            await manager.save(1, {"epoch": 1, "history": data})
        await manager.save(2, {"history": np.zeros(10**6)})  # as it says
        assert manager.steps() == (2,)


async def test_all_entries_share_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_state, "MAX_VALUES", 100)
    async with ar.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="those of 'b'"):
            await manager.save(1, {"a": [1] * 60, "b": [1] * 60})
        await manager.save(1, {"a": [1] * 60, "b": [1] * 20})


def random_tree(rng: Random, depth: int = 4) -> Any:
    kind = rng.choice(["list", "tuple", "dict", "odd dict", "leaf", "leaf"]) if depth else "leaf"
    count = rng.choice([0, 1, 3, 5]) if depth else 0
    children = [random_tree(rng, depth - 1) for _ in range(count)]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return {f"k{i}": child for i, child in enumerate(children)}
    if kind == "odd dict":
        return {rng.choice([i, f"${i}", f"é{i}"]): child for i, child in enumerate(children)}
    return rng.choice(
        [None, True, 3, -0.0, 2.5, float("nan"), float("inf"), "tëxt", b"\x00raw", ""]
    )


async def test_copies_are_encoded_and_written_as_the_originals_would_be() -> None:
    rng = Random(5)
    for _ in range(300):
        tree = random_tree(rng)
        arrays: list[Any] = []
        copied = PlainCopies().take(tree, "k", arrays)
        assert repr(copied) == repr(tree)
        assert encoded(copied) == encode(tree, repr)
        text = _format._in_pieces(encoded(copied))
        assert json.loads(text) == encoded(copied)
        assert text == json.dumps(encoded(copied), separators=(",", ":"))
        assert repr(decode(json.loads(text), arrays)) == repr(tree)


async def test_long_lists_are_written_in_pieces() -> None:
    for size in (0, 1, 1023, 1024, 1025, 5000):
        for tree in ([*range(size)], [[1.5]] * size, {"a": ["x"] * size}):
            assert json.loads(_format._in_pieces(tree)) == tree


async def test_arrays_and_other_containers_of_a_state_dict() -> None:
    arrays: list[Any] = []
    copied = PlainCopies().take(
        OrderedDict(a=np.arange(2), b=[np.float32(1.5)], c=b"x"), "k", arrays
    )
    assert repr(decode(encoded(copied), arrays)) == repr(
        {"a": np.arange(2), "b": [np.float32(1.5)], "c": b"x"}
    )
    with pytest.raises(TypeError, match=r"'k' in the state holds .* which is not plain"):
        PlainCopies().take([object()], "k", [])
