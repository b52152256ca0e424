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
from aioreplica.checkpoint._format import encoded
from aioreplica.checkpoint._state import MAX_VALUES, PlainCopies
from aioreplica.errors import CheckpointError
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


def scalars() -> list[Any]:
    kinds = [np.bool_, np.int8, np.uint64, np.int64, np.float16, np.float32, np.float64]
    return [kind(1) for kind in kinds] + [np.float32(0.1), np.float64("inf"), np.longlong(-3)]


async def test_numpy_scalars_in_plain_data_are_numbers(tmp_path: Path) -> None:
    """As a history of losses: what `run` returns is one, and it grows from an empty list."""
    saved = {"history": [0.5, *scalars()], "last": {"loss": np.float32(2.5), "at": (np.int64(3),)}}
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {**saved, "array": np.zeros(2)})
        fresh: dict[str, Any] = {"history": [], "last": {}, "array": np.ones(2)}
        assert await manager.restore(fresh) == 1
        assert fresh["history"] == [0.5, *[each.item() for each in scalars()]]
        assert {*map(type, fresh["history"])} == {bool, int, float}
        assert fresh["last"] == {"loss": 2.5, "at": (3,)}
        fresh["history"].append(np.float32(7))  # floats and scalars
        await manager.save(2, fresh)
        await manager.restore(fresh)
        assert fresh["history"][-1] == 7.0
        assert await manager.read(2, "history") == fresh["history"]


async def test_scalars_and_plain_numbers_take_each_others_place(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        for scalar in scalars():
            await manager.save(1, {"best": scalar})
            for start in (0.0, 3, False, None):
                fresh: dict[str, Any] = {"best": start}
                await manager.restore(fresh)
                assert fresh["best"] == scalar
                assert type(fresh["best"]) is type(scalar.item())
            await manager.save(1, {"best": scalar.item()})
            fresh = {"best": type(scalar)(0)}
            await manager.restore(fresh)
            assert fresh["best"] == scalar
            assert type(fresh["best"]) is type(scalar)


@pytest.mark.parametrize(
    ("saved", "start"),
    [
        (300, np.int8(0)), (-1, np.uint8(0)), (1.5, np.int64(0)), (float("nan"), np.int64(0)),
        (2, np.bool_(False)), ("1.5", np.float32(0)), (None, np.float64(0)),
        (1, np.complex64(0)), (np.complex64(1), 1.0), (np.ones(1), 1.0),
    ],
)  # fmt: skip
async def test_a_scalar_takes_no_other_number(saved: Any, start: Any, tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"best": saved})
        fresh = {"best": start}
        with pytest.raises(CheckpointError, match="'best' is a"):
            await manager.restore(fresh)
        assert fresh["best"] is start


async def test_names_may_be_bools(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"p": {True: 1, 0: 2}})
        fresh: dict[str, Any] = {"p": {}}
        await manager.restore(fresh)
        assert repr(fresh["p"]) == "{True: 1, 0: 2}"


async def test_scalars_that_were_saved_one_by_one_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.1.0 each was an entry of its own, and a longer list could not be restored."""
    own = [np.float32(0.1), 0.5, np.int64(2), "x"]
    state = {
        "history": own,
        "last": {"loss": np.float32(2.5), "a/b": 1, 3: np.int8(4)},
        "run": {"epoch": 3, "config": {"lr": np.float32(0.5)}, "pairs": [[np.int64(1), 2], []]},
    }
    async with ar.CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(_state, "_IN_CONTAINERS", _state.PLAIN)
            await manager.save(1, state)
        assert "history/0" in {each.key for each in manager.describe(1).entries}
        fresh: dict[str, Any] = {
            "history": [],
            "last": {"loss": 0.0, "a/b": 0, 3: 0},
            "run": {"epoch": 0, "config": {"lr": 0.0}, "pairs": [[0], None]},
        }
        await manager.restore(fresh)
        assert fresh == state
        with pytest.raises(CheckpointError, match="Only in the checkpoint: last/loss"):
            await manager.restore({"history": [], "last": {}, "run": fresh["run"]})
