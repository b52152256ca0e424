"""A checkpoint that an older version has written is read as it was saved.

The folder `stored` was written by the release before trees had one codec.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import CheckpointManager
from aioreplica.checkpoint._format import parse_manifest
from aioreplica.optimizers import Adam

STORED = Path(__file__).parent / "stored"
SETTINGS: Any = {
    "rate": 0.5, "limits": [float("inf"), -0.0], "big": 2**70, "name": "ä/%", "raw": b"\x00\xff",
    "none": None, "shape": (2, (3,)), 7: "seven", "$x": True,
}  # fmt: skip
KEPT: Any = {"a": np.arange(2.0), "s": np.float32(1.5), "t": (1, [b"x"])}


class Keeper:
    """An object with a state of arrays, scalars and plain data."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


async def new_state(pair: ar.MirroredStrategy) -> dict[str, Any]:
    with pair.scope():
        w, optimizer = ar.Variable(np.zeros(3, np.float32)), Adam(0.5)
        hits = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
    return {
        "model": [w, hits], "optimizer": optimizer, "kept": Keeper(),
        "rng": np.random.default_rng(8), "array": np.zeros((2, 2), np.int16), "settings": {"": 0},
    }  # fmt: skip


def require_stored(state: dict[str, Any]) -> None:
    w, hits = state["model"]
    assert w.value.tolist() == pytest.approx([-0.5, 0.5, 1.5], abs=1e-6)
    assert hits.value == 0.0
    assert state["optimizer"].iterations.value == 1
    assert state["rng"].random() == np.random.default_rng(3).random()
    assert state["array"].tolist() == [[1, 0], [3, 2]]
    assert state["settings"] == SETTINGS
    assert repr(state["settings"]) == repr(SETTINGS)
    assert repr(state["kept"].state) == repr(KEPT)


@pytest.mark.asyncio
async def test_a_checkpoint_of_an_older_version(pair: ar.MirroredStrategy, tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    state, again = await new_state(pair), await new_state(pair)
    async with CheckpointManager(tmp_path) as manager:
        assert await manager.restore(state) == 4
        await manager.save(5, state)
        require_stored(state)
        assert await manager.restore(again) == 5
        require_stored(again)


@pytest.mark.asyncio
async def test_older_versions_can_read_what_is_written(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    """A state that was restored is described as it was when it was saved."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    state = await new_state(pair)
    w, optimizer = state["model"][0], state["optimizer"]
    await pair.run(lambda: optimizer.blocking.apply_gradients([(w.value, w)]))  # makes the slots
    async with CheckpointManager(tmp_path) as manager:
        await manager.restore(state)
        await manager.save(5, state)

    old, new = (
        json.loads((tmp_path / f"step-000000000{step}" / "manifest.json").read_bytes())["manifest"]
        for step in (4, 5)
    )
    assert old["entries"].keys() == new["entries"].keys()
    for key, entry in old["entries"].items():
        assert {**entry, "tensors": ...} == {**new["entries"][key], "tensors": ...}
    assert parse_manifest((STORED / "step-0000000004" / "manifest.json").read_bytes(), 4).step == 4
