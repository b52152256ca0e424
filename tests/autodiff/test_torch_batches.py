"""Batches of `prepare`: arrays of all kinds, split and told apart."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.autodiff.torch_modules import seeded
from tests.strategies.workers import on_workers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:Replicas are on cuda")  # over devices with streams

ARRAYS = {
    "text": np.array(["a", "b", "c", "dd"]),
    "dates": np.array(["2026-01-01", "2026-01-02", "2026-01-03", "NaT"], "datetime64[D]"),
    "reversed": np.arange(8.0).reshape(4, 2)[::-1],
    "objects": np.array([{"a": 1}, None, "c", 4], object),
    "records": np.array([(1, 2.0), (3, 4.0), (5, 6.0), (7, 8.0)], "i4,f8"),
}
by_kind = pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)


def prepared(batches: list[Any], strategy: ar.Strategy) -> Any:
    module = seeded(lambda: torch.nn.Linear(2, 1))
    return ar.prepare(module, torch.optim.SGD(module.parameters()), batches, strategy=strategy)


def read(_model: Any, _optimizer: Any, batches: Any) -> Any:
    return [array.tolist() for array, _ in batches]


@pytest.mark.asyncio
@by_kind
async def test_arrays_that_torch_has_no_dtype_for_are_split(
    pair: ar.MirroredStrategy, array: Any
) -> None:
    found = await pair.run(read, args=prepared([(array, torch.ones(4, 2))], pair))

    assert pair.local_results(found) == ([array[:2].tolist()], [array[2:].tolist()])


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [name for name in ARRAYS if name != "objects"])
async def test_workers_compare_them(kind: str) -> None:
    array = ARRAYS[kind]

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        rank = strategy._runtime.workers.rank  # type: ignore[union-attr]
        alike = [(array.copy(), torch.ones(4, 2))]
        await strategy.run(read, args=prepared(alike, strategy))
        differs = [(array[::-1] if rank else array, torch.ones(4, 2))]
        with pytest.raises(ValueError, match="Workers read different batches"):
            await strategy.run(read, args=prepared(differs, strategy))

    await on_workers(2, 1, program)


@pytest.mark.asyncio
async def test_objects_are_other_ones_on_each_worker() -> None:
    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        rank = strategy._runtime.workers.rank  # type: ignore[union-attr]
        objects = np.array([object() for _ in range(4)])
        await strategy.run(read, args=prepared([(objects, torch.ones(4, 2))], strategy))
        differs = [(objects, torch.full((4, 2), float(rank)))]
        with pytest.raises(ValueError, match="Workers read different batches"):
            await strategy.run(read, args=prepared(differs, strategy))

    await on_workers(2, 1, program)
