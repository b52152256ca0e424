"""Programs of torch in one process and on replicas: the same results, and how little differs."""

import asyncio
import difflib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import mirrored
from tests.replica.gated import me

PORTS = Path(__file__).parent / "ports"
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "torch_models.md"
NAMES = ["toy", "transformer", "gan", "recommender"]
STEPS = 8

Batches = Sequence[tuple[np.ndarray, ...]]


def batches_of(name: str) -> Batches:
    """Return what a program is trained with; 10 examples a batch, so parts are uneven."""
    rng = np.random.default_rng(7)
    found: list[tuple[np.ndarray, ...]] = []
    for _ in range(STEPS):
        if name == "toy":
            batch = (rng.normal(size=(10, 10)), rng.normal(size=(10, 5)))
        elif name == "transformer":
            tokens = rng.integers(0, 17, (10, 9))
            batch = (tokens[:, :-1], tokens[:, 1:])
        elif name == "gan":
            angles = rng.uniform(0, 2 * np.pi, 10)
            batch = (np.stack([np.cos(angles), np.sin(angles)], 1), rng.normal(size=(10, 4)))
        else:
            batch = (rng.integers(0, 50, 10), rng.integers(0, 30, 10), rng.normal(size=10))
        found.append(tuple(a.astype(np.float32) if a.dtype.kind == "f" else a for a in batch))
    return found


def program(name: str) -> Any:
    pytest.importorskip("torch")
    return importlib.import_module(f"tests.autodiff.ports.{name}")


def on_replicas(name: str, count: int) -> Any:
    async def main() -> Any:
        async with mirrored(count) as strategy:
            return await program(f"{name}_replicas").train(strategy, batches_of(name))

    return asyncio.run(main())


def in_one_process(name: str, count: int) -> Any:
    original = program(f"{name}_torch")
    if name != "transformer":
        return original.train(batches_of(name))
    seeds = asyncio.run(seeds_of_steps(count))
    return original.train(batches_of(name), count, lambda step, part: seeds[step][part])


async def seeds_of_steps(count: int) -> list[list[int]]:
    """Return what each replica seeds its model with in each step, as the documentation says."""

    def seed() -> int:
        ctx = me()
        return int(ctx.rng("Transformer/random").integers(2**63))

    async with mirrored(count) as strategy:
        runs = [await strategy.run(seed) for _ in range(STEPS)]
        return [list(strategy.local_results(found)) for found in runs]


def arrays(result: Any) -> dict[str, np.ndarray]:
    states = result if isinstance(result, list) else [result]
    return {f"{i}.{key}": t.numpy() for i, state in enumerate(states) for key, t in state.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # by torch.optim
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_replicas_give_what_one_process_gives(name: str, count: int) -> None:
    expected = arrays(in_one_process(name, count))

    found, again = arrays(on_replicas(name, count)), arrays(on_replicas(name, count))

    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-6, err_msg=key)
        np.testing.assert_array_equal(found[key], again[key], err_msg=key)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a program without blank ones and its first docstring."""
    text = re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_counts_the_lines_that_differ(name: str) -> None:
    original, ported = (lines_of(PORTS / f"{name}_{kind}.py") for kind in ("torch", "replicas"))
    matcher = difflib.SequenceMatcher(None, original, ported, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())

    row = f"| {len(original)} | {len(ported)} | {len(ported) - same} |"

    assert row in GUIDE.read_text()
