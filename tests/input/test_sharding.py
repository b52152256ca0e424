"""Who reads what, where several workers feed one sync group."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.input import (
    InputTarget,
    OpenLoops,
    distribute_dataset,
    distribute_from_function,
    local_replicas,
    shard_items,
    split_sizes,
)
from aioreplica.values import StepGate
from tests.conftest import mirrored


@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(1, 8))
def test_files_are_shared_out_whole(items: list[int], num_workers: int) -> None:
    if len(items) < num_workers:
        with pytest.raises(ValueError, match=f"{len(items)} files cannot be shared"):
            shard_items(items, num_workers, 0)
        return
    shares = [shard_items(items, num_workers, worker) for worker in range(num_workers)]

    assert sorted(item for share in shares for item in share) == sorted(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 50))
def test_data_gives_every_part_to_one_worker(
    num_workers: int, num_local: int, num_examples: int
) -> None:
    num_in_sync = num_workers * num_local
    found: list[int] = []
    for worker in range(num_workers):
        total, local = local_replicas("data", num_workers, worker, num_local, num_in_sync)
        assert total == num_in_sync
        found += local

    assert found == list(range(num_in_sync))
    assert sum(split_sizes(num_examples, num_in_sync)) == num_examples


def target(num_workers: int, worker: int, num_local: int = 2) -> InputTarget:
    """Return what a strategy of one of several workers would pass."""
    names = tuple(f"cpu:{i}" for i in range(num_local))
    context = ar.InputContext(num_workers, worker, num_workers * num_local)
    return InputTarget(names, False, lambda: context, OpenLoops(), lambda: None, StepGate())


async def parts(dataset: Any, options: ar.InputOptions, who: InputTarget) -> list[list[list[int]]]:
    async with distribute_dataset(who, dataset, options) as batches:
        return [[part.tolist() for part in batch.values] async for batch in batches]


@pytest.mark.asyncio
async def test_data_splits_the_global_batch_over_all_workers() -> None:
    dataset = ar.ArrayDataset(np.arange(11), 6)
    options = ar.InputOptions(sharding="data")

    seen = [await parts(dataset, options, target(2, worker)) for worker in range(2)]

    assert seen == [
        [[[0, 1], [2, 3]], [[6, 7], [8]]],
        [[[4], [5]], [[9], [10]]],
    ]


@pytest.mark.asyncio
async def test_off_leaves_every_worker_its_own_batches() -> None:
    off = ar.InputOptions(sharding="off")
    seen = [
        await parts(ar.ArrayDataset(np.arange(4), 4), off, target(2, worker)) for worker in range(2)
    ]

    assert seen == [[[[0, 1], [2, 3]]]] * 2


def read(path: Any) -> Iterator[Any]:
    for line in Path(path).read_text().splitlines():
        yield np.full(2, int(line))


@pytest.mark.asyncio
async def test_file_gives_every_worker_its_own_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}0\n{number}1\n")
    files = ar.input.Files(paths, read)
    options = ar.InputOptions(sharding="file")

    seen = [await parts(files, options, target(2, worker)) for worker in range(2)]

    assert seen == [
        [[[0], [0]], [[1], [1]], [[20], [20]], [[21], [21]]],
        [[[10], [10]], [[11], [11]]],
    ]
    with pytest.raises(ValueError, match="3 files cannot be shared by 4 workers"):
        distribute_dataset(target(4, 0), files, options)


def numbered(path: Any) -> Iterator[Any]:
    """Yield the batches of a file whose name says which examples it has: of 2, and one of 1."""
    first, last = map(int, path.split("-"))
    numbers = np.arange(first, last)
    yield from np.split(numbers, range(2, len(numbers), 2))


FILES = ["0-7", "7-14", "14-21", "21-28", "28-35", "35-42"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sizes", "num_rounds"),
    [
        ((3, 2, 1), 1),
        ((3, 2, 3), 1),
        ((2, 3, 2), 2),
        ((6, 4, 7), 1),
        ((1, 3, 2), 2),
        ((3, 1, 3), 3),
    ],
)
async def test_files_are_dealt_anew_where_workers_become_fewer_or_more(
    sizes: tuple[int, ...], num_rounds: int
) -> None:
    """Each example is read once, by one worker, and all workers have as many batches."""
    files, seen, state = ar.input.Files(FILES, numbered), list[int](), None
    options = ar.InputOptions(sharding="file")
    now = [ar.InputContext(1, 0, 2)]
    for size in sizes:
        is_last = size is sizes[-1]
        states, counts = [], set()
        for worker in range(size):
            who = replace(target(1, 0), context_now=lambda: now[0])
            now[0] = ar.InputContext(1, 0, 2)  # more workers than files have come later
            async with distribute_dataset(who, files, options) as batches:
                now[0] = ar.InputContext(size, worker, 2 * size)
                if state is not None:
                    batches.load_state_dict(json.loads(json.dumps(state)))
                count = 0
                async for batch in batches:
                    seen += [int(each) for part in batch.values for each in part]
                    count += 1
                    if count == num_rounds and not is_last:
                        break
                states.append(batches.state_dict())
                counts.add(count)
        assert len(counts) == 1
        assert states == [states[0]] * size  # a checkpoint keeps that of the first worker
        state = states[0]
        if state["epoch"] == 1:  # all was read
            break

    assert sorted(seen) == list(range(42))


@pytest.mark.asyncio
async def test_a_state_that_does_not_fit_the_files_is_refused() -> None:
    options = ar.InputOptions(sharding="file")
    async with distribute_dataset(
        target(2, 0), ar.input.Files(FILES, numbered), options
    ) as batches:
        state = batches.state_dict() | {"position": 4}
        for source in ({"shares": 7}, {"shares": 0}, 3, {"shares": "many"}):
            with pytest.raises(ValueError, match="cannot be shared out so"):
                batches.load_state_dict(state | {"source": source})
        batches.load_state_dict(state | {"position": 400, "source": {"shares": 3}})
        with pytest.raises(ValueError, match="cannot go on after item 400: it ended after 24"):
            await anext(batches)


PER_REPLICA = ar.InputOptions(fetch_to_device=False, replication_mode="PER_REPLICA")  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "numbers"), [(None, (2, 3)), (PER_REPLICA, (4, 6))])
def test_a_state_of_datasets_of_a_function_fits_as_many_of_them(
    options: ar.InputOptions | None, numbers: tuple[int, int]
) -> None:
    """Others share the examples out in another way, which nobody can tell from the outside."""

    def make(context: ar.InputContext) -> Any:
        return lambda: iter([np.full(2, context.input_pipeline_id)])

    two, three, alone = (
        distribute_from_function(who, make, options)
        for who in (target(2, 0), target(3, 0), target(1, 0, num_local=4))
    )
    for before, after, saved, has in [(two, three, *numbers), (three, two, *numbers[::-1])]:
        with pytest.raises(ValueError, match=f"with {saved} input pipelines, but .* has {has}"):
            after.load_state_dict(before.state_dict())
    if options is PER_REPLICA:
        alone.load_state_dict(two.state_dict())  # as many, on one worker
    else:
        with pytest.raises(ValueError, match=r"with 2 input pipelines, but .* has 1"):
            alone.load_state_dict(two.state_dict())


@pytest.mark.parametrize("kind", ["off", "function", "per replica"])
def test_a_state_of_the_first_worker_fits_what_others_read(kind: str) -> None:
    """A checkpoint keeps no other; but each worker may look at its own more closely."""

    def dataset(worker: int, *, seed: int = 0, columns: int = 2) -> Any:
        def make(context: ar.InputContext) -> ar.ArrayDataset:
            first = context.input_pipeline_id
            rows = np.arange(20 + first * columns).reshape(-1, columns) + first
            return ar.ArrayDataset(rows, 4, shuffle=True, seed=seed)

        if kind == "off":
            data = make(ar.InputContext(2, worker, 4))
            return distribute_dataset(target(2, worker), data, ar.InputOptions(sharding="off"))
        options = PER_REPLICA if kind == "per replica" else None
        return distribute_from_function(target(2, worker), make, options)

    state = json.loads(json.dumps(dataset(0).state_dict()))
    dataset(0).load_state_dict(state)
    other = dataset(1)
    other.load_state_dict(state)
    assert other.state_dict()["position"] == state["position"]
    for changed in (dataset(0, seed=1), dataset(0, columns=1), dataset(1, columns=1)):
        with pytest.raises(ValueError, match="another dataset"):
            changed.load_state_dict(state)


@pytest.mark.asyncio
async def test_sharding_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    options = ar.InputOptions(sharding="data")
    with caplog.at_level(logging.INFO, logger="aioreplica.input"):
        async with mirrored(2) as strategy:
            async with strategy.distribute_dataset([np.ones(2)], options) as batches:
                for _ in range(3):
                    assert len([batch async for batch in batches]) == 1
            async with strategy.distribute_dataset([np.ones(2)]) as batches:
                assert len([batch async for batch in batches]) == 1  # nothing to tell

    (record,) = caplog.records
    assert record.getMessage() == (
        "<list of 1>: sharding 'data', worker 0 of 1 reads all of it, and takes its own replicas' "
        "parts of each global batch."
    )


# ---- auto ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [1, 2, 3])
async def test_by_default_every_example_is_read_by_one_worker(num_workers: int) -> None:
    def batches() -> Iterator[Any]:
        yield from (np.arange(6), np.arange(6, 10))

    files = ar.input.Files(["0", "1", "2"], lambda path: [np.full(2, int(path))])
    every = list(range(10))
    for dataset, examples in [
        (ar.ArrayDataset(np.arange(10), 4, shuffle=True), every),
        ([np.arange(6), np.arange(6, 10)], every),
        (batches, every),
        (ar.Dataset(range(10)).batch(4), every),
        (files, [0, 0, 1, 1, 2, 2]),
    ]:
        seen = [
            await parts(dataset, ar.InputOptions(), target(num_workers, worker))
            for worker in range(num_workers)
        ]
        found = [x for of_worker in seen for step in of_worker for part in step for x in part]
        assert sorted(found) == examples, dataset


@pytest.mark.asyncio
async def test_files_are_dealt_by_default_if_there_are_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = ar.input.Files(["0", "1"], lambda path: [np.full(6, int(path))])
    with caplog.at_level(logging.INFO, logger="aioreplica.input"):
        dealt = await parts(files, ar.InputOptions(), target(2, 1))
        split = await parts(files, ar.InputOptions(), target(3, 1))

    assert dealt == [[[1, 1, 1], [1, 1, 1]]]
    assert split == [[[0], [0]], [[1], [1]]]
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "<Files | 1 from 1>: sharding 'file' (chosen by 'auto'), worker 1 of 2 reads its own "
        "share of the files."
    )
    assert "<Files | 2 from 0>: sharding 'data' (chosen by 'auto'), worker 1 of 3" in second


@pytest.mark.asyncio
async def test_what_can_be_shared_out_in_no_way_needs_a_word() -> None:
    made = [iter([np.ones(2)]), ar.Dataset(iter([1.0, 2.0])).map(np.sqrt).batch(2)]
    for dataset in made:
        with pytest.raises(ValueError, match=r"neither by file nor by example.*sharding='off'"):
            distribute_dataset(target(2, 0), dataset, None)
        off = ar.InputOptions(sharding="off")
        assert len(await parts(dataset, off, target(2, 0))) == 1


def test_a_loader_that_draws_its_own_order_needs_a_word() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        RandomSampler,
        SubsetRandomSampler,
        TensorDataset,
    )
    from torch.utils.data.distributed import DistributedSampler

    examples = TensorDataset(torch.arange(8))
    dealt = DistributedSampler(examples, num_replicas=2, rank=0)
    drawn, subset = RandomSampler(examples), SubsetRandomSampler([0, 2, 4])
    seeded = torch.Generator().manual_seed(0)
    for loader, why in [
        (DataLoader(examples, 4, shuffle=True), "RandomSampler without a generator"),
        (DataLoader(examples, 4, sampler=subset), "SubsetRandomSampler without a generator"),
        # which the sampler does not use
        (DataLoader(examples, 4, sampler=drawn, generator=seeded), "RandomSampler without"),
        (
            DataLoader(examples, batch_sampler=BatchSampler(drawn, 4, drop_last=False)),
            "RandomSampler without a generator",
        ),
        (DataLoader(examples, 4, sampler=dealt), "shares out the examples already"),
        (
            DataLoader(examples, batch_sampler=BatchSampler(dealt, 4, drop_last=False)),
            "shares out the examples already",
        ),
    ]:
        with pytest.raises(ValueError, match=f"{why}.*sharding='off'"):
            distribute_dataset(target(2, 0), loader, None)
        distribute_dataset(target(1, 0), loader, None)
    repeated = RandomSampler(examples, generator=seeded)
    for loader in (
        DataLoader(examples, 4),
        DataLoader(examples, 4, shuffle=True, generator=seeded),
        DataLoader(examples, batch_sampler=BatchSampler(repeated, 4, drop_last=False)),
    ):
        distribute_dataset(target(2, 0), loader, None)


def test_only_files_can_be_shared_out() -> None:
    with pytest.raises(ValueError, match=r"not made of any.*ar\.input\.Files"):
        mirrored(2).distribute_dataset([], ar.InputOptions(sharding="file"))


# ---- Files --------------------------------------------------------------------------------------


def test_files_are_read_one_after_the_other_and_closed() -> None:
    log = []

    def opened(path: Any) -> Iterator[str]:
        log.append(f"open {path}")
        try:
            yield f"{path}1"
            yield f"{path}2"
        finally:
            log.append(f"close {path}")

    files = ar.input.Files(["a", "b"], opened)

    assert list(files) == ["a1", "a2", "b1", "b2"]
    assert log == ["open a", "close a", "open b", "close b"]
    reading = iter(files)
    next(reading)
    reading.close()
    assert log[4:] == ["open a", "close a"]
    assert repr(files) == "<Files | 2 from a>"
    assert files.shard(2, 1).paths == ("b",)


@pytest.mark.parametrize(
    ("paths", "reader", "error", "text"),
    [
        ("a", read, TypeError, r"Write \['a'\]"),
        (Path("a"), read, TypeError, "list of paths"),
        ([], read, ValueError, "at least one path"),
        (["a"], None, TypeError, "function of a path, got None"),
    ],
)
def test_bad_files_are_refused(paths: Any, reader: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ar.input.Files(paths, reader)
