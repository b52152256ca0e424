"""Damages folders of checkpoints until a restore goes wrong: `python -m tests.checkpoint.fuzz`.

Whatever is done to the files, a restore gives one saved state, whole, or raises CheckpointError and
changes nothing; it warns of each newer step that it passes over; and the next save is as good as
ever. A manifest that was forged, its checksum too, may give other values, but no other error.
Prints the seed of what goes wrong; `--seed S --rounds 1` does the same damage again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.errors import CheckpointError

STEPS = (1, 2, 3)
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**64, 10**30, 0.5, "", "x", "../x", "/dev/zero", "float32",
    "object", "variable", "value", "sum", [], [0], [[0, 0, 0, 0]], {}, {"$tensor": 0},
    {"$tensor": 9}, {"$bytes": 5}, {"$bytes": "?"}, {"$tuple": 1}, {"$items": [[1]]},
    {"$items": [[[], 1]]}, {"$float": "x"},
)  # fmt: skip


def new_state(value: float) -> dict[str, Any]:
    return {
        "model": [ar.Variable(np.full((8, 3), value)), ar.Variable(np.full(5, int(value)))],
        "adam": ar.optimizers.Adam(0.1, loss_scale=ar.optimizers.DynamicLossScale()),
        "mean": ar.metrics.Mean(),
        "array": np.full(4, value, np.float32),
        "plain": {
            "value": value,
            "list": [value, "text", b"bytes", None],
            "pair": (value, [value]),
        },
        "rng": np.random.default_rng(int(value)),
    }


def contents(state: dict[str, Any]) -> Any:
    """Return everything in a state, to compare."""
    variables = [*state["model"], *state["adam"].variables, *state["mean"].variables]
    found = [v.value.tolist() for v in variables]
    return repr((found, state["array"].tolist(), state["plain"], state["rng"].bit_generator.state))


async def step_of(state: dict[str, Any]) -> None:
    """Make the slots."""
    w = state["model"][0]
    await state["adam"].apply_gradients([(np.ones(w.shape), w)])
    state["mean"].update_state(w.value)


# ---- damage ------------------------------------------------------------------------------


def flip(path: Path, rng: Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 20)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_or_extend(path: Path, rng: Random) -> None:
    os.truncate(
        path, rng.choice((0, 1, 50, path.stat().st_size + 1, 2**26 + 1, rng.randrange(2000)))
    )


def remove(path: Path, rng: Random) -> None:
    path.unlink()


def replace_by_another(path: Path, rng: Random) -> None:
    others = sorted(other for other in path.parent.parent.rglob("*") if other.is_file())
    shutil.copyfile(rng.choice([other for other in others if other != path]), path)


def replace_by_no_file(path: Path, rng: Random) -> None:
    path.unlink()
    make: list[Callable[[], Any]] = [
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "missing", path.name))),
    ]
    rng.choice(make)()


def move_folder(path: Path, rng: Random) -> None:
    names = ("step-0000000009", "step-0000000001", "step-9", "step-99999999999999999999", "junk")
    target = path.parent.with_name(rng.choice(names))
    if not target.exists():
        path.parent.rename(target)


def forge(path: Path, rng: Random) -> None:
    """Change a manifest here and there, and make its checksum right."""
    path = path.parent / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = [*places_in(manifest)]
        node, index = rng.choice(places)
        if isinstance(node, dict) and rng.random() < 0.2:
            del node[index]
        else:
            node[index] = deepcopy(rng.choice([*JUNK, *(other[at] for other, at in places)]))
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


def places_in(node: Any) -> Any:
    """Yield every place in JSON data: what holds it, and where."""
    for index in [*node] if isinstance(node, dict) else range(len(node)):
        yield node, index
        if isinstance(node[index], (dict, list)):
            yield from places_in(node[index])


DAMAGES = (flip, flip, cut_or_extend, remove, replace_by_another, replace_by_no_file, move_folder)


# ---- judging -----------------------------------------------------------------------------


async def saved(folder: Path) -> dict[int, str]:
    """Save some steps; return what each one holds a step later."""
    found = {}
    async with ar.CheckpointManager(folder) as manager:
        for step in STEPS:
            state = new_state(float(step))
            await step_of(state)
            await manager.save(step, state)
            await step_of(state)
            found[step] = contents(state)
    return found


def num_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def judge(folder: Path, held: dict[int, str], *, is_forged: bool, has_slots: bool) -> None:
    """Restore from a damaged folder; raise AssertionError if that goes wrong."""
    state = new_state(7.0)
    if has_slots:
        await step_of(state)
    before = contents(state)
    manager = ar.CheckpointManager(folder)
    num_open = num_files()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            step = await manager.restore(state)
        except CheckpointError:
            assert contents(state) == before, "An error has changed the state."
        else:
            await step_of(state)
            assert is_forged or contents(state) in held.values(), "It is none of those saved."
            assert manager.restored is not None
            assert bool(manager.restored.damaged) == bool(said), "What is damaged was not said."
            assert step == manager.restored.step
        for step in manager.steps():
            try:
                await manager.verify(step)
                manager.describe(step)
            except CheckpointError:
                pass
        assert num_files() == num_open, "A file was left open."
    if not is_forged:
        await judge_save(folder)


async def judge_save(folder: Path) -> None:
    """Save into the damaged folder, and restore that."""
    async with ar.CheckpointManager(folder) as manager:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # an old step was not removed
                await manager.save(20, new_state(20.0))
        except CheckpointError:
            return  # such as another version of the format
        state = new_state(0.0)
        assert await manager.restore(state) == 20
        assert contents(state) == contents(new_state(20.0)), "A new save is not what was saved."


def try_seed(seed: int, template: Path, held: dict[int, str]) -> str:
    """Damage a copy of a folder as a seed says; return what went wrong, and how."""
    rng = Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "run"
        shutil.copytree(template, folder)
        is_forged = rng.random() < 0.5
        done = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name[0] != ".")
            damage = forge if is_forged else rng.choice(DAMAGES)
            if damage in (forge, move_folder):  # of a step; claims lie in the root
                files = [p for p in files if p.parent != folder]
            if not files:
                break
            path = rng.choice(files)
            done.append(f"{damage.__name__} {path.relative_to(folder)}")
            damage(path, rng)
        try:
            asyncio.run(judge(folder, held, is_forged=is_forged, has_slots=rng.random() < 0.5))
        except Exception:
            return f"{'; '.join(done)}\n{traceback.format_exc()}"
    return ""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first damage")
    parser.add_argument("--rounds", type=int, help="how many; default: any number")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long")
    options = parser.parse_args()
    limit = 4 * 2**30  # what claims to be huge must not be allocated
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begun, number = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as template:
        held = asyncio.run(saved(Path(template)))
        while options.rounds is None or number < options.rounds:
            if time.monotonic() - begun > options.seconds:
                break
            wrong = try_seed(options.seed + number, Path(template), held)
            number += 1
            if wrong:
                print(f"The damage of seed {options.seed + number - 1} went wrong: {wrong}")
                return 1
    print(f"{number} damaged folders in {time.monotonic() - begun:.1f} s, all found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
