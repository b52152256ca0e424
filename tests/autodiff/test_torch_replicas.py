"""A plain torch loop on every replica: as one process computes it, and refused where it cannot."""

import asyncio
import copy
import itertools
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError, OutOfSyncError
from tests.conftest import mirrored
from tests.strategies.workers import on_workers

torch = pytest.importorskip("torch")
from aioreplica.autodiff._torch_replicas import Averaging  # noqa: E402 - torch may be missing

nn, functional = torch.nn, torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:Replicas are on cuda")  # over devices with streams

DRAWN = torch.Generator().manual_seed(0)
X, Y = torch.randn(26, 4, generator=DRAWN), torch.randn(26, 2, generator=DRAWN)
EVEN = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]
UNEVEN = [*EVEN[:2], (X[16:], Y[16:])]


def network(*, normalizes: bool = False, rate: float = 0.0) -> Any:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if normalizes else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 2))


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def train(model: Any, optimizer: Any, batches: Any) -> Any:
    for _ in range(2):
        for x, y in batches:
            step(model, optimizer, x, y)
    return [parameter.detach().clone() for parameter in model.parameters()]


def parts(x: Any, num_replicas: int) -> list[slice]:
    bounds = np.cumsum([0, *map(len, np.array_split(np.arange(len(x)), num_replicas))])
    return [slice(*pair) for pair in itertools.pairwise(map(int, bounds))]


def plain(module: Any, data: Any, num_replicas: int, num_epochs: int = 2) -> Any:
    """Train in one process on the mean of what the replicas' parts of a batch give."""
    optimizer = sgd(module)
    for x, y in [*data] * num_epochs:
        for cut in parts(x, num_replicas):
            (functional.mse_loss(module(x[cut]), y[cut]) / num_replicas).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return module


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


async def run(
    strategy: ar.Strategy, module: Any, fn: Callable[..., Any], data: Any = EVEN
) -> tuple[Any, ...]:
    """Return what each replica returned."""
    prepared = ar.prepare(module, sgd(module), data, strategy=strategy)
    return strategy.local_results(await strategy.run(fn, args=prepared))


# ---- gradients -----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [EVEN, UNEVEN])
async def test_replicas_train_as_one_process_does(gang: ar.MirroredStrategy, data: Any) -> None:
    module = network()
    found = await run(gang, module, train, data)

    assert_equal(module.parameters(), plain(network(), data, len(found)).parameters())
    for each in found:
        assert_equal(each, module.parameters(), 0.0)
    again = await run(gang, network(), train, data)
    assert_equal(again[0], found[0], 0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_step_that_trains_the_module_of_another_replica_is_told(
    pair: ar.MirroredStrategy, mode: str
) -> None:
    module = getattr(network(), mode)()
    optimizer = sgd(module)
    ar.prepare(module, optimizer, EVEN, strategy=pair)

    def train_what_is_global() -> None:  # as a script that forgets `args=prepared`
        for x, y in EVEN:
            step(module, optimizer, x, y)

    with pytest.raises(ContextError, match="Replica 1 uses the module of replica 0"):
        await pair.run(train_what_is_global)

    def evaluate() -> Any:
        with torch.no_grad():
            return module(X)

    one, other = pair.local_results(await pair.run(evaluate))
    assert_equal(one, other, 0.0)


@pytest.mark.asyncio
async def test_a_default_device_of_torch_is_not_that_of_what_is_sent(
    pair: ar.MirroredStrategy,
) -> None:
    def trained(model: Any, optimizer: Any, batches: Any) -> Any:
        with torch.device("meta"):
            return train(model, optimizer, batches)

    one, other = await run(pair, network(), trained), await run(pair, network(), train)

    assert_equal(one[0], other[0], 0.0)


@pytest.mark.asyncio
async def test_gradients_are_added_up_without_sync(pair: ar.MirroredStrategy) -> None:
    def accumulate(model: Any, optimizer: Any, batches: Any) -> None:
        for number, (x, y) in enumerate(batches):
            if number % 3 < 2:
                with ar.no_sync(model), ar.no_sync(model):
                    functional.mse_loss(model(x), y).backward()
                continue
            step(model, optimizer, x, y)

    module, expected = network(), network()
    await run(pair, module, accumulate, EVEN)

    for x, y in EVEN:
        for cut in parts(x, 2):
            (functional.mse_loss(expected(x[cut]), y[cut]) / 2).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    sgd(expected).step()
    assert_equal(module.parameters(), expected.parameters())


@pytest.mark.asyncio
async def test_a_replica_with_an_infinite_batch_makes_all_skip(pair: ar.MirroredStrategy) -> None:
    def scaled(model: Any, optimizer: Any, batches: Any) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), []
        for x, y in batches:
            scaler.scale(functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    bad = X[:8].clone()
    bad[7] = torch.inf  # in the part of the last replica
    module, expected = network(), network()
    found = await run(pair, module, scaled, [(bad, Y[:8]), EVEN[1]])

    assert found == ([4.0, 4.0],) * 2
    x, y = EVEN[1]
    for cut in parts(x, 2):
        (functional.mse_loss(expected(x[cut]), y[cut]) / 2).backward()
    sgd(expected).step()
    assert_equal(module.parameters(), expected.parameters())


@pytest.mark.asyncio
async def test_a_parameter_is_averaged_if_any_replica_used_it(pair: ar.MirroredStrategy) -> None:
    def look(model: Any, _optimizer: Any, batches: Any) -> Any:
        ctx = ar.get_replica_context()
        for x, _ in batches:
            chosen = 0 if ctx.replica_id_in_sync_group else 1
            (model[0](x) + (model[1](x) if chosen else 0.0)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    module = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(3)])
    first, second = await run(pair, module, look, [EVEN[0]])

    both, one = X[:8].sum(0) / 2, X[:4].sum(0) / 2
    for found in (first, second):
        assert_equal(found[:2], [both[None], one[None]])
        assert found[2] is None


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "complex64"])
async def test_dtypes_of_parameters(pair: ar.MirroredStrategy, name: str) -> None:
    dtype = getattr(torch, name)

    def gradient(model: Any, _optimizer: Any, batches: Any) -> Any:
        for x, _ in batches:
            (model.weight * x.sum(0).to(dtype)).sum().abs().backward()
        return model.weight.grad

    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(4, dtype=dtype))
    found = await run(pair, module, gradient, [EVEN[0]])

    assert found[0].dtype is dtype
    assert_equal(found[:1], found[1:], 0.0)


@pytest.mark.asyncio
async def test_gradients_are_averaged_as_they_lie(pair: ar.MirroredStrategy) -> None:
    class Mixed(nn.Module):  # type: ignore[misc]  # torch may be missing
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.number = nn.Parameter(torch.tensor(2.0, dtype=torch.float16))
            self.grid = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.none = nn.Parameter(torch.ones(0, 3))
            self.register_buffer("seen", torch.tensor(False))
            self.register_buffer("turned", torch.zeros(3, 2, dtype=torch.bfloat16).T)

    def gradients(model: Any, _optimizer: Any, _batches: Any) -> Any:
        number = 1.0 + ar.get_replica_context().replica_id_in_sync_group
        if number == 1.0:
            model.seen.fill_(True)
            model.turned.copy_(torch.arange(6.0).reshape(2, 3))
        of_half = (number * model.number).float()
        loss = number * (model.scale * model.grid).sum() + of_half + model.none.sum()
        loss.backward()
        found = [each.grad for each in model.parameters()]
        assert found[2].is_contiguous(memory_format=torch.channels_last)
        return [*found, *model.buffers()]

    for found in await run(pair, Mixed(), gradients, [EVEN[0]]):
        expected = [
            torch.tensor(180.0), torch.tensor(1.5, dtype=torch.float16),
            torch.full((2, 3, 4, 5), 4.5), torch.zeros(0, 3), torch.tensor(True),
            torch.arange(6.0).reshape(2, 3).bfloat16(),
        ]  # fmt: skip
        assert_equal(found, expected, 0.0)


@pytest.mark.asyncio
async def test_a_parameter_may_be_frozen_until_later(pair: ar.MirroredStrategy) -> None:
    module = network()
    module[4].requires_grad_(False)
    assert not module[4].weight.requires_grad

    def unfreeze(model: Any, optimizer: Any, batches: Any) -> Any:
        assert not model[4].weight.requires_grad
        model.requires_grad_(False)
        model[4].requires_grad_(True)
        return train(model, optimizer, batches)

    found = await run(pair, module, unfreeze)

    expected = network()
    expected[0].requires_grad_(False)
    assert_equal(found[1], plain(expected, EVEN, 2).parameters())


@pytest.mark.asyncio
async def test_a_backward_that_failed_leaves_the_next_one_averaging(
    pair: ar.MirroredStrategy,
) -> None:
    def fail_once(model: Any, optimizer: Any, batches: Any) -> None:
        def fail(_gradient: Any) -> None:
            raise ArithmeticError("no")

        for number, (x, y) in enumerate(batches):
            handle = model[0].weight.register_hook(fail) if number == 1 else None
            if handle is None:
                step(model, optimizer, x, y)
                continue
            with pytest.raises(ArithmeticError):
                functional.mse_loss(model(x), y).backward()
            handle.remove()
            optimizer.zero_grad()

    module = network()
    await run(pair, module, fail_once)

    assert_equal(module.parameters(), plain(network(), EVEN[::2], 2, 1).parameters())


# ---- buffers and random numbers ------------------------------------------------------------


@pytest.mark.asyncio
async def test_buffers_are_those_of_replica_0(pair: ar.MirroredStrategy) -> None:
    def buffers(model: Any, optimizer: Any, batches: Any) -> Any:
        train(model, optimizer, batches)
        return [buffer.clone() for buffer in model.buffers()]

    first, second = await run(pair, network(normalizes=True), buffers)

    assert_equal(first, second, 0.0)
    assert first[2] == 6
    norm = nn.BatchNorm1d(8)
    norm(network()[0](X[:4]))
    found, _ = await run(pair, network(normalizes=True), buffers_after_one)
    assert_equal(found, norm.buffers())


def buffers_after_one(model: Any, optimizer: Any, batches: Any) -> Any:
    for number, (x, y) in enumerate(batches):
        if not number:
            step(model, optimizer, x, y)
            found = [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.asyncio
async def test_random_layers_draw_per_replica_and_alike_in_every_run() -> None:
    first, second = await drawing()
    again, _ = await drawing()

    assert_equal(first, again, 0.0)
    assert not all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])


async def drawing() -> tuple[Any, ...]:
    def drawn(model: Any, _optimizer: Any, batches: Any) -> Any:
        return [model(torch.ones(1, 4)).detach() for _ in batches]

    async with mirrored(2) as strategy:
        module = network(rate=0.5)
        before = torch.get_rng_state()
        found = await run(strategy, module, drawn)
        assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.mark.asyncio
async def test_copies_of_a_replicas_module_are_plain_ones(pair: ar.MirroredStrategy) -> None:
    def average_later(model: Any, optimizer: Any, batches: Any) -> Any:
        for number, (x, y) in enumerate(batches):
            step(model, optimizer, x, y)
            if not number:
                slow = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in slow:
            functional.mse_loss(each(X[:1]), Y[:1]).backward()  # of this replica alone
            with pytest.raises(ValueError, match=r"no_sync takes a module that ar\.prepare gave"):
                ar.no_sync(each).__enter__()
        return [parameter.grad for each in slow for parameter in each.parameters()]

    module = network(rate=0.5)
    found = await run(pair, module, average_later)

    assert len(found[0]) == 8
    module(X[:1])  # outside of replicas, its hooks do nothing
    functional.mse_loss(module(X), Y).backward()


# ---- batches -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_one_replica_has_the_loaders_own_batches(pair: ar.MirroredStrategy) -> None:
    batches_given = [{"text": ["a", "b"], "number": 3}]

    def look(model: Any, _optimizer: Any, batches: Any) -> Any:
        assert len(batches) == 1
        with ar.no_sync(model):
            return [batch is batches_given[0] for batch in batches], model

    module = network()
    async with mirrored(1) as one:
        ((found, model),) = await run(one, module, look, batches_given)
    assert found == [True]
    assert model is module

    prepared = ar.prepare(module, sgd(module), EVEN, strategy=ar.get_strategy())
    assert prepared[0] is module
    (trained,) = ar.DefaultStrategy().local_results(
        await ar.DefaultStrategy().run(train, args=prepared)
    )
    assert len(trained) == 4


@pytest.mark.asyncio
async def test_parts_of_trees_of_arrays(pair: ar.MirroredStrategy) -> None:
    batch = {"a": np.arange(5), "b": (torch.arange(10).view(5, 2),)}

    def look(_model: Any, _optimizer: Any, batches: Any) -> Any:
        return [(part["a"].tolist(), part["b"][0].tolist()) for part in batches]

    first, second = await run(pair, network(), look, [batch])

    assert first == [([0, 1, 2], [[0, 1], [2, 3], [4, 5]])]
    assert second == [([3, 4], [[6, 7], [8, 9]])]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ((X[:1], Y[:1]), ValueError, r"1 examples for 2 replicas.*drop_last=True"),
        ((X[:4], Y[:3]), ValueError, r"lengths \[3, 4\]"),
        ((X[:4], ["a", "b"]), TypeError, r"holds a str .* at \[1\]\[0\], 'a'.*collate_fn"),
        ((X[:4], torch.tensor(1.0)), TypeError, "holds a Tensor without a leading axis"),
        ([], ValueError, r"lengths \[\]"),
    ],
)
async def test_batches_that_cannot_be_split(
    pair: ar.MirroredStrategy, batch: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await run(pair, network(), train, [batch])


@pytest.mark.asyncio
async def test_what_a_loader_raises_comes_out_as_it_is(pair: ar.MirroredStrategy) -> None:
    class Torn:
        def __iter__(self) -> Iterator[Any]:
            yield EVEN[0]
            raise LookupError("torn")

    with pytest.raises(LookupError, match="torn"):
        await run(pair, network(), train, Torn())


@pytest.mark.asyncio
async def test_a_replica_that_leaves_the_loop_alone_is_told(pair: ar.MirroredStrategy) -> None:
    def leave(model: Any, optimizer: Any, batches: Any) -> None:
        for number, (x, y) in enumerate(batches):
            step(model, optimizer, x, y)
            if number and ar.get_replica_context().replica_id_in_sync_group:
                break

    with pytest.raises(MergeMismatchError, match="next batch"):
        await run(pair, network(), leave)


@pytest.mark.asyncio
async def test_a_backward_that_one_replica_leaves_out_is_told_with_the_line_of_the_user(
    pair: ar.MirroredStrategy,
) -> None:
    def skip(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            if not ar.get_replica_context().replica_id_in_sync_group:
                step(model, optimizer, x, y)

    with pytest.raises(MergeMismatchError) as caught:
        await run(pair, network(), skip)

    text = str(caught.value)
    assert re.search(r"waiting +backward #\d+ \(SUM\) .*test_torch_replicas\.py:", text)
    assert re.search(r"waiting +next batch #\d+ .*test_torch_replicas\.py:", text)


@pytest.mark.asyncio
async def test_what_a_cancelled_run_has_read_is_forgotten(pair: ar.MirroredStrategy) -> None:
    module = network()
    prepared = ar.prepare(module, sgd(module), EVEN, strategy=pair)
    own = Averaging.of(module)
    assert own is not None
    own.saw(7)  # as the one of two replicas does that has its batch when the run is cancelled

    await pair.run(train, args=prepared)

    assert_equal(module.parameters(), plain(network(), EVEN, 2).parameters())


@pytest.mark.asyncio
async def test_all_may_leave_the_loop_and_begin_another(pair: ar.MirroredStrategy) -> None:
    def leave(model: Any, optimizer: Any, batches: Any) -> Any:
        for x, y in batches:
            step(model, optimizer, x, y)
            break
        return train(model, optimizer, batches)

    module = network()
    await run(pair, module, leave)
    data = [EVEN[0], *EVEN, *EVEN]
    assert_equal(module.parameters(), plain(network(), data, 2, 1).parameters())


@pytest.mark.asyncio
async def test_a_run_without_an_end_can_be_cancelled(pair: ar.MirroredStrategy) -> None:
    loop, module = asyncio.get_running_loop(), network()

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            for number in itertools.count():
                if number == 3:
                    loop.call_soon_threadsafe(task.cancel)
                yield EVEN[0]

    task = asyncio.ensure_future(run(pair, module, train, Endless()))
    with pytest.raises(asyncio.CancelledError):
        await task
    await run(pair, module, train)  # the first replica's, as far as it came


@pytest.mark.asyncio
async def test_batches_belong_to_plain_step_functions(pair: ar.MirroredStrategy) -> None:
    async def step_function(_model: Any, _optimizer: Any, batches: Any) -> None:
        next(iter(batches))

    module = network()
    prepared = ar.prepare(module, sgd(module), EVEN, strategy=pair)
    with pytest.raises(ContextError, match="were read in no strategy's scope"):
        next(iter(prepared[2].values[0]))
    with pytest.raises(ContextError, match="in an `async def` step, whose event loop"):
        await pair.run(step_function, args=prepared)


# ---- in sync -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_replicas_that_went_apart_are_found_at_the_end(pair: ar.MirroredStrategy) -> None:
    def drift(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            step(model, optimizer, x, y)
            if ar.get_replica_context().replica_id_in_sync_group:
                with torch.no_grad():
                    model[4].bias[1] += 1.0

    with pytest.raises(OutOfSyncError, match=r"'4\.bias' of replica 1 .* at the end") as caught:
        await run(pair, network(), drift)
    assert (caught.value.variable, caught.value.replica_id) == ("4.bias", 1)


@pytest.mark.asyncio
async def test_a_state_that_one_replica_loaded_is_found_at_the_beginning(
    pair: ar.MirroredStrategy,
) -> None:
    module = network()
    prepared = ar.prepare(module, sgd(module), EVEN, strategy=pair)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})

    with pytest.raises(OutOfSyncError, match=r"'0\.weight' .* at the beginning .*before ar\.prep"):
        await pair.run(train, args=prepared)
    await run(pair, module, train)  # prepared again: from where the module is


# ---- refused by name -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_gradients_that_turn_out_sparse(pair: ar.MirroredStrategy) -> None:
    def look_up(model: Any, _optimizer: Any, batches: Any) -> None:
        for _ in batches:
            functional.embedding(torch.tensor([0]), model[0].weight, sparse=True).sum().backward()

    with pytest.raises(TypeError, match=r"'0\.weight' is sparse.*torch_module"):
        await run(pair, network(), look_up)


@pytest.mark.asyncio
async def test_a_step_with_a_closure(pair: ar.MirroredStrategy) -> None:
    def closing(model: Any, optimizer: Any, batches: Any) -> None:
        x, y = next(iter(batches))
        optimizer.step(lambda: functional.mse_loss(model(x), y))

    with pytest.raises(TypeError, match=r"SGD\.step\(closure\)"):
        await run(pair, network(), closing)


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters())


def scheduled(module: Any) -> Any:
    optimizer = sgd(module)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def hooked(module: Any) -> Any:
    optimizer = sgd(module)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def of_another(_module: Any) -> Any:
    return sgd(network())


def loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), **options)


def sampled() -> Any:
    data = torch.utils.data.TensorDataset(X, Y)
    sampler = torch.utils.data.distributed.DistributedSampler(data, 2, 0)
    return torch.utils.data.DataLoader(data, 4, sampler=sampler)


@pytest.mark.parametrize(
    ("module", "optimizer", "data", "error", "text"),
    [
        (X, of_another, EVEN, TypeError, "takes a torch.nn.Module, got tensor"),
        (nn.DataParallel(nn.Linear(4, 2)), sgd, EVEN, TypeError, r"DataParallel.*model\.module"),
        (nn.Embedding(2, 2, sparse=True), sgd, EVEN, TypeError, "'weight' is sparse.*torch_module"),
        (nn.LazyLinear(2), sgd, EVEN, ValueError, "'weight' has no shape yet"),
        (nn.Linear(2, 2, device="meta"), sgd, EVEN, TypeError, r"on meta.*module\.cpu\(\)"),
        (network(), lambda m: m, EVEN, TypeError, "takes an optimizer of torch.optim"),
        (network(), lbfgs, EVEN, TypeError, r"LBFGS\.step\(closure\)"),
        (network(), scheduled, EVEN, ValueError, r"scheduler was made of this SGD before"),
        (network(), hooked, EVEN, ValueError, "SGD has step hooks"),
        (network(), of_another, EVEN, ValueError, "4 of the parameters of this SGD"),
        (network(), sgd, iter(EVEN), TypeError, "read once per epoch, got list_iterator"),
        (network(), sgd, 3, TypeError, "takes batches.*got int"),
        (network(), sgd, sampled(), ValueError, "has a DistributedSampler"),
        (network(), sgd, loader(batch_size=5), ValueError, "1 examples for 2 replicas"),
        (network(), sgd, loader(batch_size=1), ValueError, "1 examples for 2 replicas"),
    ],
)  # fmt: skip
def test_what_is_refused(
    module: Any, optimizer: Any, data: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ar.prepare(module, optimizer(module), data, strategy=mirrored(2))

    if type(module) is nn.Sequential:
        assert not module._forward_pre_hooks  # nothing was begun


def test_loaders_whose_last_batch_is_left_out_or_unknown() -> None:
    module = network()
    strategy = mirrored(2)
    for data in (
        loader(batch_size=5, drop_last=True),
        loader(batch_size=None),
        loader(batch_size=8),
    ):
        _, _, batches = ar.prepare(module, sgd(module), data, strategy=strategy)
        assert all(len(each) == len(data) for each in batches.values)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_checkpoint_waits_for_the_end_of_a_prepared_run(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    released, order = threading.Event(), []

    def train_slowly(model: Any, optimizer: Any, batches: Any) -> None:
        train(model, optimizer, batches)
        assert released.wait(10)
        order.append("trained")

    with pair.scope():
        seen = ar.Variable(0)
    prepared = ar.prepare((module := network()), sgd(module), EVEN, strategy=pair)
    running = asyncio.create_task(pair.run(train_slowly, args=prepared))
    async with ar.CheckpointManager(tmp_path) as manager:
        saving = asyncio.create_task(manager.save(1, {"seen": seen}))
        saving.add_done_callback(lambda _: order.append("saved"))
        while not pair._runtime.store.gate.is_closed:
            await asyncio.sleep(0.001)
        released.set()
        await running
        await saving
    assert order == ["trained", "trained", "saved"]


# ---- workers -------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_workers_train_as_one_process_does(num_replicas: int) -> None:
    modules = [network(), network()]

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        module = modules[strategy._runtime.workers.rank]  # type: ignore[union-attr]
        return await run(strategy, module, train, UNEVEN)

    await on_workers(2, num_replicas, program)

    expected = plain(network(), UNEVEN, 2 * num_replicas).parameters()
    assert_equal(modules[0].parameters(), expected)
    assert_equal(modules[1].parameters(), modules[0].parameters(), 0.0)


@pytest.mark.asyncio
async def test_workers_begin_with_the_values_of_worker_0() -> None:
    modules = [network(), network()]
    with torch.no_grad():
        for tensor in modules[1].parameters():
            tensor.add_(1)  # as another seed does

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        module = modules[strategy._runtime.workers.rank]  # type: ignore[union-attr]
        prepared = ar.prepare(module, sgd(module), EVEN, strategy=strategy)
        [trained] = strategy.local_results(await strategy.run(train, args=prepared))
        with torch.no_grad():  # behind the first epoch it is an error, as it is within a process
            module[0].bias[1] += modules.index(module)
        with pytest.raises(OutOfSyncError, match=r"'0\.bias' of replica 1 differs"):
            await strategy.run(train, args=prepared)
        return trained

    first, second = await on_workers(2, 1, program)

    assert_equal(first, second, 0.0)
    assert_equal(first, plain(network(), EVEN, 2).parameters())


@pytest.mark.asyncio
@pytest.mark.parametrize("is_alike", [False, True])
async def test_workers_whose_batches_are_not_read_compare_before_the_first_step(
    is_alike: bool,
) -> None:
    modules = [network(), network()]
    if not is_alike:
        with torch.no_grad():
            modules[1][0].bias.add_(1)

    def train_without_batches(model: Any, optimizer: Any, _batches: Any) -> Any:
        for x, y in EVEN:
            step(model, optimizer, x, y)
        return list(model.parameters())

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        module = modules[strategy._runtime.workers.rank]  # type: ignore[union-attr]
        if is_alike:
            return (await run(strategy, module, train_without_batches))[0]
        with pytest.raises(OutOfSyncError, match=r"'0\.bias' .* at the first backward\. Read the"):
            await run(strategy, module, train_without_batches)
        return [parameter.detach().clone() for parameter in module.parameters()]

    first, second = await on_workers(2, 1, program)

    if is_alike:
        assert_equal(first, second, 0.0)
    else:  # no step was made
        assert_equal(first, network().parameters(), 0.0)


@pytest.mark.asyncio
async def test_loaders_of_workers_shuffle_alike() -> None:
    def look(_model: Any, _optimizer: Any, batches: Any) -> Any:
        return [x[:, 0].tolist() for _ in range(2) for x, _ in batches]

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        own = torch.Generator().manual_seed(strategy._runtime.workers.rank)  # type: ignore[union-attr]
        data = loader(batch_size=13, shuffle=True, generator=own)
        return (await run(strategy, network(), look, data))[0]

    first, second = await on_workers(2, 1, program)

    halves = [a + b for a, b in zip(first, second, strict=True)]
    for epoch in (halves[0] + halves[1], halves[2] + halves[3]):
        assert sorted(epoch) == sorted(X[:, 0].tolist())
    assert halves[:2] != halves[2:]


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [EVEN[::-1], EVEN[:2]])
async def test_workers_that_read_different_batches_are_told(data: Any) -> None:
    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        rank = strategy._runtime.workers.rank  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="Workers read different batches"):
            await run(strategy, network(), train, data if rank else EVEN)

    await on_workers(2, 1, program)
