"""torch: loaders with worker processes, resumed loaders, and tensors that share memory."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica.device_loop import _feeder
from aioreplica.input import close_iterator

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.usefixtures("no_task_left"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own: fork and threads
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:os.fork"),  # of JAX, where another test has loaded it
]


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """160 examples; one of them may be broken."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> Any:
        if i == self.bad:
            raise OSError("bad record")
        return torch.tensor(i)


def loader(bad: int | None = None, **options: Any) -> Any:
    return torch.utils.data.DataLoader(Numbers(bad), batch_size=4, **options)


@pytest.fixture
def workers() -> Iterator[Any]:
    """Return a function that counts worker processes; there are none at the end."""

    def count() -> int:
        return len(psutil.Process().children(recursive=True))

    before = count()
    yield lambda: count() - before
    gc.collect()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_workers_end_with_a_loop_that_failed(pair: ar.MirroredStrategy, workers: Any) -> None:
    """The traceback of the error keeps the loader's iterator, but its processes must not stay."""
    async with pair.distribute_dataset(loader(bad=20, num_workers=2)) as batches:
        with pytest.raises(OSError, match="bad record") as caught:
            async for _ in batches:
                pass
        assert workers() == 0

    assert caught.value.__traceback__ is not None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_workers_end_with_a_body_that_failed(
    pair: ar.MirroredStrategy, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_feeder, "GIVE_UP_S", 60.0)  # a busy machine may need longer than usual
    data = loader(num_workers=2)

    async def fail() -> None:
        async with pair.distribute_dataset(data) as batches:
            async for _ in batches:
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await fail()
    assert workers() == 0

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, data, 9)
    assert workers() == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_persistent_workers_stay_with_their_loader(
    pair: ar.MirroredStrategy, workers: Any
) -> None:
    data = loader(num_workers=1, persistent_workers=True)
    async with pair.distribute_dataset(data) as batches:
        for _ in range(2):
            seen = [y.values async for y in batches]
            assert sum(len(part) for parts in seen for part in parts) == 160
            assert workers() == 1
    data._iterator._shutdown_workers()


LOADERS_IN_RANDOM_ORDER: dict[str, Any] = {
    "shuffle": lambda: loader(shuffle=True),
    "sampler": lambda: loader(sampler=torch.utils.data.RandomSampler(Numbers())),
    "batch sampler": lambda: torch.utils.data.DataLoader(
        Numbers(),
        batch_sampler=torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(Numbers()), 4, drop_last=False
        ),
    ),
}


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_of_an_iterator_that_is_not_torchs_own_are_ended_too(persistent: bool) -> None:
    """torchdata's derives from the base of torch's iterators only."""

    class Fork(torch.utils.data.dataloader._BaseDataLoaderIter):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._persistent_workers = persistent
            self.num_shut_down = 0

        def _shutdown_workers(self) -> None:
            self.num_shut_down += 1

    iterator = Fork()
    close_iterator(iterator)

    assert iterator.num_shut_down == (0 if persistent else 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", LOADERS_IN_RANDOM_ORDER)
async def test_a_loader_that_shuffles_cannot_be_resumed_mid_epoch(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    async with pair.distribute_dataset(LOADERS_IN_RANDOM_ORDER[kind]()) as batches:
        start = batches.state_dict()
        async for _ in batches:
            if batches.statistics().num_delivered == 10:
                break
        state = batches.state_dict()

        with pytest.warns(UserWarning, match=r"RandomSampler.*repeats some.*StatefulDataLoader"):
            batches.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches.load_state_dict(start)


@pytest.mark.asyncio
async def test_a_loader_in_order_is_resumed(pair: ar.MirroredStrategy) -> None:
    class ByEpoch(torch.utils.data.Sampler):  # type: ignore[misc, name-defined]
        """An order of its own that is the same in every pass."""

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(160, generator=torch.Generator().manual_seed(3)).tolist())

        def __len__(self) -> int:
            return 160

    for options in ({}, {"sampler": ByEpoch()}):
        seen: list[int] = []
        async with pair.distribute_dataset(loader(**options)) as batches:
            async for batch in batches:
                seen += [n for part in batch.values for n in part.tolist()]
                if len(seen) == 40:
                    break
            state = batches.state_dict()
        async with pair.distribute_dataset(loader(**options)) as batches:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                batches.load_state_dict(state)
            async for batch in batches:
                seen += [n for part in batch.values for n in part.tolist()]
        assert sorted(seen) == list(range(160))


@pytest.mark.asyncio
@pytest.mark.parametrize("rows", [16, 60_000], ids=["small", "large"])
async def test_tensors_of_a_batch_do_not_write_into_the_dataset(
    pair: ar.MirroredStrategy, rows: int
) -> None:
    """torch has no read-only memory, and its view of a read-only array writes through."""
    mine = np.ones((rows, 4))

    async def step(x: Any) -> None:
        torch.as_tensor(x).mul_(0.0)

    async with pair.distribute_dataset(ar.ArrayDataset(mine, rows // 2)) as batches:
        async for batch in batches:
            await pair.run(step, args=(batch,))

    assert mine.sum() == rows * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["arrays", "tensors"])
async def test_tensors_of_a_batch_do_not_write_into_a_list(
    pair: ar.MirroredStrategy, make: Any
) -> None:
    mine = [make((4, 2)), make((4, 2))]

    async def step(x: Any) -> None:
        torch.as_tensor(x).div_(255)

    async with pair.distribute_dataset(mine) as batches:
        async for batch in batches:
            await pair.run(step, args=(batch,))

    assert all(item.sum() == 8 for item in mine)


@pytest.mark.asyncio
async def test_a_function_may_write_into_tensors_of_a_list(pair: ar.MirroredStrategy) -> None:
    mine = [torch.full((4, 2), 255.0), torch.full((4, 2), 255.0)]

    async with pair.distribute_dataset(ar.Dataset(mine).map(lambda x: x.div_(255))) as batches:
        for _ in range(2):
            assert {float(part.max()) for b in [b async for b in batches] for part in b.values} == {
                1.0
            }

    assert all(item.sum() == 255 * 8 for item in mine)


class ViewsOfItself:
    """A table whose columns are views of its own memory, as those of Arrow files are."""

    column_names = ("x",)

    def __init__(self) -> None:
        self.memory = np.ones(6)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        return {"x": self.memory[rows]}


def test_tensors_of_a_batch_do_not_write_into_a_table() -> None:
    table = ViewsOfItself()

    for batch in ar.ArrayDataset(table, 4):
        torch.from_numpy(batch["x"]).zero_()

    assert table.memory.sum() == 6


def test_tensors_of_batches_by_hand_do_not_either() -> None:
    mine = torch.ones(6)

    for batch in ar.ArrayDataset(mine, 4).batches(epoch=0):
        torch.from_numpy(batch).zero_()

    assert mine.sum() == 6
