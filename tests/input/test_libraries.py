"""Loaders of other libraries: a stand-in for what they offer, and the real one if it is there."""

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar

pytestmark = pytest.mark.usefixtures("no_task_left")

HAS_TORCH = importlib.util.find_spec("torch") is not None


class Tensor:
    """What NumPy needs of a tensor."""

    def __init__(self, array: Any, *, is_on_gpu: bool = False) -> None:
        self._array = array
        self._is_on_gpu = is_on_gpu

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self._is_on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self._array


class Loader:
    """What a DataLoader offers: a new iterator for each epoch, lists of tensors, a length."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 10, 4):
            numbers = np.arange(start, min(10, start + 4))
            yield [Tensor(numbers.astype(np.float32), **self._options), Tensor(numbers)]

    def __len__(self) -> int:
        return 3


@pytest.mark.asyncio
async def test_tensors_become_arrays_without_a_copy(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(Loader()) as batches:
        assert len(batches) == 3
        for _ in range(2):
            sizes = [[len(part) for part in x.values] async for x, _ in batches]
            assert sizes == [[2, 2], [2, 2], [1, 1]]


@pytest.mark.asyncio
async def test_arrays_that_numpy_cannot_read_are_refused(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(Loader(is_on_gpu=True)) as batches:
        with pytest.raises(TypeError, match=r"Leaf \[0\] is a Tensor.*cuda:0.*in the source"):
            await anext(aiter(batches))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_torch_data_loader(pair: ar.MirroredStrategy, num_workers: int) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.arange(40, dtype=torch.float32).reshape(20, 2)
    data = TensorDataset(x, torch.arange(20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own, such as forking with threads
        loader = DataLoader(data, batch_size=8, num_workers=num_workers)
        async with pair.distribute_dataset(loader) as batches:
            assert len(batches) == 3
            for _ in range(2):
                seen = [y.values async for _, y in batches]
                assert np.concatenate([part for parts in seen for part in parts]).tolist() == list(
                    range(20)
                )
            async for batch in batches:
                assert all(type(part) is np.ndarray for part in batch[0].values)
                break
        del loader
