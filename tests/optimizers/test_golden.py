"""Every optimizer against torch.optim and optax, and against itself on one replica."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.conftest import mirrored
from tests.optimizers.golden import other_libraries
from tests.optimizers.golden.cases import CASES, FILE, NUM_STEPS, Case, gradients, key, start

DTYPES = ("float64", "float32")
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}
GOLDEN = np.load(FILE)

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def made(case: Case) -> Any:
    name, numbers = case.ours
    return getattr(ar.optimizers, name)(**numbers)


async def our_path(case: Case, dtype: str) -> Any:
    w, optimizer, path = ar.Variable(start().astype(dtype)), made(case), []
    for gradient in gradients().astype(dtype):
        await optimizer.apply_gradients([(gradient, w)])
        path.append(w.value)
    return np.array(path)[other_libraries.KEPT]


@pytest.mark.asyncio
@by_name
@by_dtype
@pytest.mark.parametrize("library", ["torch", "optax"])
async def test_fifty_steps_are_those_of_other_libraries(
    case: Case, dtype: str, library: str
) -> None:
    ours, theirs = await our_path(case, dtype), GOLDEN[key(library, case, dtype)]

    assert theirs.shape[0] == NUM_STEPS // 5
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.slow
@by_name
@by_dtype
@pytest.mark.parametrize("library", ["torch", "optax"])
def test_the_golden_numbers_agree_with_the_libraries(case: Case, dtype: str, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed; the numbers in {FILE.name} stand for it")
    path = getattr(other_libraries, f"path_in_{library}")(case, dtype)

    np.testing.assert_allclose(path, GOLDEN[key(library, case, dtype)], rtol=TOLERANCES[dtype])


# ---- replicas ----------------------------------------------------------------------------------

SPLITS = {  # global batch sizes: divided evenly, with a rest, and with replicas left without
    "even": (28, 28),
    "uneven": (11, 9),
    "empty last parts": (3, 1),
}


def data(size: int, dtype: str) -> Any:
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 4)).astype(dtype), rng.normal(size=size).astype(dtype)


def squares(w: Any, b: Any, x: Any, y: Any) -> list[Any]:
    """Gradients of half the sum of squared errors of a linear model."""
    error = x @ w + b - y
    return [x.T @ error, error.sum(dtype=x.dtype)]


async def trained(case: Case, dtype: str, num_replicas: int, sizes: tuple[int, ...]) -> Any:
    async with mirrored(num_replicas) as strategy:
        with strategy.scope():
            w = ar.Variable(np.linspace(-1, 1, 4).astype(dtype), name="w")
            b = ar.Variable(np.array(0.5, dtype), name="b")
            optimizer = made(case)

        async def step(x: Any, y: Any) -> None:
            grads = squares(w.value, b.value, x, y)
            pairs = [(ar.Weighted(g, len(x)), v) for g, v in zip(grads, (w, b), strict=True)]
            await optimizer.apply_gradients(pairs)

        for size in sizes * 3:
            x, y = data(size, dtype)
            parts = [np.array_split(array, num_replicas) for array in (x, y)]
            await strategy.run(step, args=tuple(map(ar.PerReplica, parts)))
        await strategy.check_in_sync([w, b, *optimizer.variables])
        return np.append(w.value, b.value)


@pytest.mark.asyncio
@by_name
@by_dtype
@pytest.mark.parametrize("split", SPLITS)
async def test_replicas_train_as_one_does_on_the_global_batch(
    case: Case, dtype: str, split: str
) -> None:
    alone = await trained(case, dtype, 1, SPLITS[split])

    for num_replicas in (2, 4, 7):
        together = await trained(case, dtype, num_replicas, SPLITS[split])
        np.testing.assert_allclose(together, alone, rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.asyncio
@by_name
async def test_training_is_repeatable_to_the_last_bit(case: Case) -> None:
    paths = [await trained(case, "float32", 4, (11, 9)) for _ in range(2)]

    assert paths[0].tobytes() == paths[1].tobytes()
