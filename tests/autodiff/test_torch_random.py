"""Random layers of torch modules: numbers by replica, step and call."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import torch_module
from aioreplica.errors import ContextError
from tests.autodiff.torch_modules import X, assert_all_equal, mlp
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:Replicas are on cuda")  # over devices with streams


class Counting(nn.Module):
    """Draws random numbers of many kinds."""

    def forward(self, x: Any) -> Any:
        x = F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(x.shape[-1])
        x = x + torch.randint(0, 9, x.shape) + torch.randperm(x.shape[-1])
        x = x + F.gumbel_softmax(x) + torch.bernoulli(torch.full_like(x, 0.5))
        return x + F.rrelu(x, training=True) + F.alpha_dropout(x, 0.5, training=True)


async def masks(count: int, calls: int = 2, seed: int = 0, make: Any = None) -> list[Any]:
    """Return what calls of a random module give, for each replica in each of two steps."""
    async with mirrored(count) as strategy:
        with strategy.scope():
            model = torch_module((make or (lambda: nn.Dropout(0.5)))(), name="m")

        async def step() -> Any:
            ones = np.ones(64, np.float32)
            found = [await me().run_on_device(model, ones) for _ in range(calls)]
            return torch.stack(found).numpy()

        options = ar.RunOptions(seed=seed)
        return [(await strategy.run(step, options=options)).values for _ in range(2)]


@pytest.mark.asyncio
async def test_random_layers_differ_by_replica_step_and_call_and_return() -> None:
    torch.manual_seed(1)
    first = await masks(3)
    torch.manual_seed(2)
    again = await masks(3)
    other = await masks(3, seed=1)

    assert_all_equal(np.ravel(first), np.ravel(again))
    rows = {row.tobytes() for runs in (first, other) for row in np.reshape(runs, (-1, 64))}
    assert len(rows) == 2 * 2 * 3 * 2


@pytest.mark.asyncio
async def test_seeds_are_the_documented_ones() -> None:
    found = await masks(2)

    async with mirrored(2) as strategy:
        seeds = await strategy.run(lambda: me().rng("m/random").integers(2**63, size=2))
    for replica in range(2):
        for call in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(int(seeds[replica][call]))
                expected = F.dropout(torch.ones(64), 0.5)
            np.testing.assert_array_equal(found[0][replica][call], expected)


@pytest.mark.asyncio
async def test_all_kinds_of_draws_are_seeded_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = await masks(2, make=Counting)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = await masks(2, make=Counting)

    assert_all_equal(np.ravel(first), np.ravel(again))


def test_outside_replicas_torchs_own_generator_is_used() -> None:
    model = torch_module(nn.Dropout(0.5))

    with torch.random.fork_rng():
        torch.manual_seed(5)
        found = model(np.ones(64))
        torch.manual_seed(5)
        assert torch.equal(found, F.dropout(torch.ones(64).double(), 0.5))


@pytest.mark.asyncio
async def test_a_generator_of_the_users_own_is_kept(pair: ar.MirroredStrategy) -> None:
    class Noise(nn.Module):
        def forward(self, generator: Any) -> Any:
            return torch.rand(4, generator=generator)

    with pair.scope():
        model = torch_module(Noise())

    found = await pair.run(lambda: model(torch.Generator().manual_seed(7)))

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], torch.rand(4, generator=torch.Generator().manual_seed(7)))


@pytest.mark.asyncio
async def test_random_layers_in_checkpoints_are_refused(pair: ar.MirroredStrategy) -> None:
    from torch.utils.checkpoint import checkpoint

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    with pair.scope():
        model = torch_module(Dropped())

    with pytest.raises(RuntimeError, match=r"inside torch.utils.checkpoint"):
        await pair.run(lambda: model(X))


@pytest.mark.asyncio
async def test_a_device_loop_trains_a_model_with_new_numbers_in_each_step(
    pair: ar.MirroredStrategy,
) -> None:
    drawn: dict[tuple[int, int], bytes] = {}
    with pair.scope():
        model, dropout = torch_module(mlp()), torch_module(nn.Dropout(0.5))
        sgd = ar.optimizers.SGD(0.1)

    def fn(ctx: Any, x: Any) -> None:
        def loss() -> Any:
            drawn[my_id(), ctx.steps_run] = dropout(np.ones(64)).numpy().tobytes()
            return ar.Weighted(torch.sum(model(x)), len(x))

        sgd.blocking.minimize(loss, model.variables)

    await pair.run_steps(fn, iter([ar.PerReplica([X[:4], X[4:]])] * 3), 3)

    assert len(drawn) == len(set(drawn.values())) == 6
    assert sgd.iterations.value == 3


def of_variables(strategy: ar.Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    with strategy.scope():
        model = torch_module(nn.Dropout(0.5))
    return lambda: torch.stack([model(np.ones(64)) for _ in range(2)]).numpy(), ()


def prepared(strategy: ar.Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    given = ar.prepare(module, torch.optim.SGD(module.parameters()), [X], strategy=strategy)
    return lambda model, _optimizer, _batches: model(torch.ones(2, 64)).detach().numpy(), given


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [of_variables, prepared])
async def test_a_step_that_is_done_again_draws_the_same_numbers(
    pair: ar.MirroredStrategy, folder: Path, make: Any
) -> None:
    with pair.scope():
        state = {"seen": ar.Variable(0)}
    step, args = make(pair)

    async with ar.CheckpointManager(folder) as manager:
        await manager.save(1, state)
        first = (await pair.run(step, args=args)).values
        await manager.restore(state)
        again, other = [(await pair.run(step, args=args)).values for _ in range(2)]

    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.asyncio
async def test_a_forward_pass_that_is_cancelled_leaves_its_thread_as_it_was(
    pair: ar.MirroredStrategy,
) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            assert _get_current_dispatch_mode() is not None
            if my_id():
                raise KeyError("lost")
            return ar.autodiff.all_reduce("sum", self.inner(x))

    module = Meeting()
    given = ar.prepare(module, torch.optim.SGD(module.parameters()), [X], strategy=pair)

    with pytest.raises(KeyError, match="lost"):
        await pair.run(lambda model, *_: model(torch.tensor(X)).sum().item(), args=given)

    assert set(await pair.run(lambda: _get_current_dispatch_mode() is None)) == {True}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_module_that_is_compiled_in_the_step_draws_from_its_replica(
    pair: ar.MirroredStrategy,
) -> None:
    def step(model: Any, *_: Any) -> Any:
        model.compile(backend="eager")
        return model(torch.ones(2, 64)).detach().numpy()

    _, args = prepared(pair)
    before = torch.get_rng_state()
    first, second = (await pair.run(step, args=args)).values

    assert torch.equal(torch.get_rng_state(), before)
    assert not np.array_equal(first, second)


def test_deterministic_layers_that_are_prepared_again_are_called_as_they_are() -> None:
    from aioreplica.autodiff._torch_replicas import Averaging

    module = nn.Sequential(nn.Linear(4, 2))

    for _ in range(2):
        ar.prepare(module, torch.optim.SGD(module.parameters()), [X], strategy=mirrored(2))
        averaging = Averaging.of(module)
        assert averaging is not None
        assert not averaging._seeds_draws


def test_a_compiled_module_stays_that_and_gets_its_function_back() -> None:
    module, called = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), []

    def compiled(x: Any) -> Any:
        called.append(x)
        return x

    module._compiled_call_impl = compiled  # as module.compile() does
    optimizer = torch.optim.SGD(module.parameters())
    ar.prepare(module, optimizer, [X], strategy=mirrored(2))
    module(1)
    ar.prepare(module, optimizer, [X], strategy=mirrored(1))

    assert called == [1]
    assert module._compiled_call_impl is compiled


class KeepingAll(nn.Module):
    """Pickles all of its attributes, which torch's own modules do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def test_a_prepared_module_that_pickles_all_of_its_attributes_can_be_loaded() -> None:
    module = KeepingAll().eval()
    ar.prepare(module, torch.optim.SGD(module.parameters()), [X], strategy=mirrored(2))

    for made in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert made._compiled_call_impl is None
        assert torch.equal(made(torch.tensor(X)), module(torch.tensor(X)))


@pytest.mark.asyncio
async def test_generators_for_a_purpose(pair: ar.MirroredStrategy) -> None:
    def step() -> Any:
        draw = ar.autodiff.torch_generator
        return [torch.rand(2, generator=draw(name)).tolist() for name in ("a", "a", "b")]

    first, second = pair.local_results(await pair.run(step))

    assert first[0] == first[1] != first[2]
    assert first[0] != second[0]
    with pytest.raises(ContextError, match="Call it in a step"):
        ar.autodiff.torch_generator("a")


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_layer_draws_if_it_drops_something(rate: float) -> None:
    """Each operation of a module that may draw is looked at, which takes longer than the module."""
    from aioreplica.autodiff._torch_random import may_draw

    assert may_draw(nn.TransformerEncoderLayer(8, 2, dropout=rate)) == (rate > 0)
