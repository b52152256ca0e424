"""What a distributed dataset does once it, or its strategy, is closed: a row for each method."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import mirrored

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

Use = Callable[[ar.input.DistributedDataset, Any], Awaitable[Any]]


async def enter(batches: Any, iterator: Any) -> None:
    async with batches:
        pass


async def read(batches: Any, iterator: Any) -> Any:
    return await anext(batches)


async def loop(batches: Any, iterator: Any) -> Any:
    return await anext(aiter(batches))


async def read_on(batches: Any, iterator: Any) -> Any:
    return await anext(iterator)


async def load(batches: Any, iterator: Any) -> None:
    batches.load_state_dict(batches.state_dict())


async def save(batches: Any, iterator: Any) -> Any:
    return batches.state_dict()["position"]


async def describe(batches: Any, iterator: Any) -> Any:
    return batches.epoch, len(batches), batches.element_spec.dtype.name, iterator.element_spec.shape


async def show(batches: Any, iterator: Any) -> Any:
    return repr(batches)


async def count(batches: Any, iterator: Any) -> Any:
    return batches.statistics().num_delivered


async def close(batches: Any, iterator: Any) -> None:
    await batches.aclose()
    await iterator.aclose()


IS_CLOSED = r"<DistributedDataset .*closed.* is closed\. Distribute the dataset again"
BY_STRATEGY = r"<MirroredStrategy.*is closed"
DESCRIBED = (1, 2, "float64", (None,))

# method: what it does where the dataset is closed, and where only its strategy is
TABLE: dict[str, tuple[Use, Any, Any]] = {
    "async with": (enter, IS_CLOSED, None),
    "anext(batches)": (read, IS_CLOSED, BY_STRATEGY),
    "async for": (loop, IS_CLOSED, BY_STRATEGY),
    "anext(iterator)": (
        read_on,
        r"ended because its dataset was closed",
        r"ended because <Mirrored",
    ),
    "load_state_dict": (load, IS_CLOSED, None),
    "state_dict": (save, 2, 2),
    "epoch, len, element_spec": (describe, DESCRIBED, DESCRIBED),
    "repr": (
        show,
        "<DistributedDataset of <list of 2> for 2 | closed>",
        "<DistributedDataset of <list of 2> for 2 | epoch 1>",
    ),
    "statistics": (count, 2, 2),
    "aclose": (close, None, None),
}


@pytest.mark.parametrize("what", ["dataset", "strategy"])
@pytest.mark.parametrize("method", TABLE)
@pytest.mark.filterwarnings("ignore:1 loops over distributed datasets:ResourceWarning")
async def test_a_closed_dataset(method: str, what: str) -> None:
    use, of_dataset, of_strategy = TABLE[method]
    expected = of_dataset if what == "dataset" else of_strategy
    strategy = mirrored(2)
    batches = strategy.distribute_dataset([np.ones(2), np.ones(2)])
    iterator = aiter(batches)
    for _ in range(2):
        await anext(iterator)
    await (batches if what == "dataset" else strategy).aclose()
    try:
        if isinstance(expected, str) and method != "repr":
            with pytest.raises(ContextError, match=expected):
                await use(batches, iterator)
        else:
            assert await use(batches, iterator) == expected
    finally:
        await batches.aclose()
        await strategy.aclose()


@pytest.mark.parametrize("make", ["distribute_dataset", "distribute_datasets_from_function"])
async def test_datasets_of_a_closed_strategy_raise_at_the_first_batch(make: str) -> None:
    """As their source is not touched before the first batch, nothing is left open either."""
    strategy = mirrored(2)
    await strategy.aclose()
    given: Any = [np.ones(2)] if make == "distribute_dataset" else lambda context: [np.ones(2)]

    async with getattr(strategy, make)(given) as batches:
        assert len(batches) == 1
        with pytest.raises(ContextError, match=BY_STRATEGY):
            await anext(batches)


async def test_a_closed_strategy_runs_no_steps() -> None:
    strategy = mirrored(2)
    source = iter([1, 2])
    await strategy.run_steps(lambda ctx, x: None, source, 1)
    await strategy.aclose()

    with pytest.raises(ContextError, match=BY_STRATEGY):
        await strategy.run_steps(lambda ctx, x: None, source, 1)
    assert next(source) == 2
