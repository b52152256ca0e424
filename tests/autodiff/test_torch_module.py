"""torch_module: modules of torch whose parameters are variables."""

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, torch_module, value_and_grad
from aioreplica.errors import ContextError
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def seeded(make: Callable[[], Any]) -> Any:
    """Return a module that is the same in every test."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def mlp() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))


def gradients_of(module: Any, x: Any, fn: Callable[[Any], Any] = torch.sum) -> list[Any]:
    module.zero_grad()
    fn(module(torch.tensor(x))).backward()
    return [p.grad.numpy().copy() for p in module.parameters() if p.requires_grad]


def assert_all_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Any) -> Any:
        return self.decoder(self.encoder(ids))


class Counting(nn.Module):
    """Draws random numbers of many kinds."""

    def forward(self, x: Any) -> Any:
        x = F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(x.shape[-1])
        x = x + torch.randint(0, 9, x.shape) + torch.randperm(x.shape[-1])
        x = x + F.gumbel_softmax(x) + torch.bernoulli(torch.full_like(x, 0.5))
        return x + F.rrelu(x, training=True) + F.alpha_dropout(x, 0.5, training=True)


# ---- variables and values ----------------------------------------------------------------


def test_parameters_become_variables_in_order_and_buffers_are_not_trainable() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module[0].bias.requires_grad_(False)

    model = torch_module(module, name="net")

    assert [v.name for v in model.variables] == ["net/0.weight", "net/1.weight", "net/1.bias"]
    assert [v.name for v in model.frozen] == ["net/0.bias"]
    assert [v.name for v in model.buffers] == [
        "net/1.running_mean", "net/1.running_var", "net/1.num_batches_tracked",
    ]  # fmt: skip
    assert not any(v.trainable for v in (*model.frozen, *model.buffers))
    np.testing.assert_array_equal(model.variables[0].value, module[0].weight.detach())


def test_a_call_gives_what_the_module_gives() -> None:
    module = mlp()
    model = torch_module(module)

    assert torch.equal(model(X), module(torch.tensor(X)))
    assert not model(X).requires_grad


def test_gradients_are_those_of_torch_bit_by_bit() -> None:
    module = mlp()
    model = torch_module(module)

    _, pairs = differentiate_variables(lambda: torch.sum(model(X)), model.variables)

    assert_all_equal([g for g, _ in pairs], gradients_of(module, X))
    assert [v for _, v in pairs] == list(model.variables)


def test_a_loss_may_call_a_module_on_a_device_and_then_on_the_host() -> None:
    model = torch_module(mlp())

    def loss() -> Any:
        first = model(torch.tensor(X)).sum()
        for _ in range(2):
            assert model(torch.ones(8, 4, device="meta")).device.type == "meta"
        return first + model(X).sum()

    _, pairs = differentiate_variables(loss, model.variables)

    expected = gradients_of(mlp(), X, lambda y: y.sum() + y.sum())
    assert_all_equal([gradient for gradient, _ in pairs], expected)


def test_the_module_itself_is_left_alone() -> None:
    module = mlp()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    model = torch_module(module)

    differentiate_variables(lambda: torch.sum(model(X)), model.variables)
    model.load_state_dict({name: t + 1 for name, t in before.items()})

    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_tied_parameters_are_one_variable_with_one_gradient() -> None:
    module = seeded(Tied)
    ids = np.array([0, 3, 3])
    model = torch_module(module)

    _, pairs = differentiate_variables(lambda: torch.sum(model(ids) ** 2), model.variables)

    assert len(model.variables) == 1
    expected = gradients_of(module, ids, lambda out: torch.sum(out**2))
    assert_all_equal([g for g, _ in pairs], expected)
    other = Tied()
    model.copy_to(other)
    assert torch.equal(other.decoder.weight, module.decoder.weight)
    assert set(model.state_dict()) == {"encoder.weight", "decoder.weight"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_see_the_variables(kind: Any) -> None:
    module = seeded(lambda: kind(4, 3, num_layers=2))
    model = torch_module(module)
    x = X[:, None, :]

    _, pairs = differentiate_variables(lambda: torch.sum(model(x)[0]), model.variables)

    assert_all_equal([g for g, _ in pairs], gradients_of(module, x, lambda out: torch.sum(out[0])))


def test_frozen_parameters_have_no_gradient_and_can_be_minimized_around() -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    model = torch_module(module)

    _, pairs = differentiate_variables(lambda: torch.sum(model(X)), model.variables)

    assert [v.name.partition("/")[2] for _, v in pairs] == ["0.bias", "2.weight", "2.bias"]
    assert_all_equal([g for g, _ in pairs], gradients_of(module, X))


def test_other_methods_can_be_called() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def encode(self, x: Any, shift: float) -> Any:
            return x * self.scale + shift

    model = torch_module(Coder())

    assert float(model.call("encode", torch.tensor(3.0), shift=1.0)) == 7.0


def test_torch_checkpoints_run_on_the_same_tensors_again() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    module = Twice()
    model = torch_module(module)

    _, pairs = differentiate_variables(lambda: torch.sum(model(X)), model.variables)

    assert_all_equal([g for g, _ in pairs], gradients_of(module, X))


def test_checkpoints_inside_a_loss_inside_a_loss() -> None:
    from torch.utils.checkpoint import checkpoint

    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Any) -> Any:
            return checkpoint(lambda y: self.scale**3 * y, x, use_reentrant=False)

    model = torch_module(Cubed())

    def slope() -> Any:
        def inner() -> Any:
            return model(torch.tensor(1.0))

        return differentiate_variables(inner, model.variables)[1][0][0]

    value, [(gradient, _)] = differentiate_variables(slope, model.variables)

    assert (float(value), float(gradient)) == (12.0, 12.0)


def test_parametrized_modules() -> None:
    kinds = nn.utils.parametrizations
    module = seeded(lambda: nn.Sequential(kinds.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2)))
    kinds.spectral_norm(module[1]).eval()
    model = torch_module(module)

    _, pairs = differentiate_variables(lambda: torch.sum(model(X)), model.variables)

    assert_all_equal([g for g, _ in pairs], gradients_of(module, X))


def test_the_input_is_not_written_through() -> None:
    x = X.copy()
    x.flags.writeable = False
    model = torch_module(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)))

    model(x)
    model(y := X.copy())

    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, X)


# ---- the way back ------------------------------------------------------------------------


def test_state_dicts_go_there_and_back() -> None:
    first, second = seeded(lambda: nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    with torch.no_grad():
        first.weight.fill_(5.0)
        first.running_mean.fill_(7.0)
        first.num_batches_tracked.fill_(9)
    model = torch_module(second)

    result = model.load_state_dict(first.state_dict())

    assert result.missing_keys == result.unexpected_keys == []
    assert model.buffers[2].value == 9
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    model.copy_to(second)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)


def test_a_state_dict_is_one_write() -> None:
    model = torch_module(mlp())
    before = model.variables[0].store.version

    model.load_state_dict(mlp().state_dict())

    assert model.variables[0].store.version == before + 1


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    model = torch_module(mlp())
    before = [v.value for v in model.variables]
    state = {name: t + 1 for name, t in mlp().state_dict().items()}
    state["2.bias"] = torch.zeros(7)

    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias"):
        model.load_state_dict(state)

    assert_all_equal([v.value for v in model.variables], before)


def test_copying_into_another_kind_of_module_changes_nothing() -> None:
    model, other = torch_module(mlp()), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5))
    before = other[0].weight.clone()

    with pytest.raises(ValueError, match=r"'2.weight' has shape \(5, 3\)"):
        model.copy_to(other)
    with pytest.raises(ValueError, match=r"'2\.weight' is missing"):
        model.copy_to(other[:1])

    assert torch.equal(other[0].weight, before)


# ---- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (3, TypeError, "takes a torch.nn.Module, got 3"),
        (nn.Linear(2, 2).bfloat16(), TypeError, r"'weight' is a torch.bfloat16 tensor"),
        (nn.Linear(2, 2, dtype=torch.complex64), TypeError, r"module.float\(\)"),
        (nn.LazyLinear(2), ValueError, "its module is lazy"),
    ],
)
def test_modules_that_cannot_be_variables_are_refused(module: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        torch_module(module)


@pytest.mark.parametrize("is_inference", [False, True])
def test_parameters_changed_in_place_are_an_error(is_inference: bool) -> None:
    model = torch_module(nn.Embedding(4, 2, max_norm=0.1))

    with (
        torch.inference_mode(is_inference),
        pytest.raises(RuntimeError, match=r"Embedding changed its parameter 'weight' in place"),
    ):
        model(np.array([1]))


def test_a_loss_of_another_library_is_an_error() -> None:
    model = torch_module(mlp())

    with pytest.raises(TypeError, match=r"Pass model.variables as var_list, or backend='torch'"):
        differentiate_variables(lambda: float(model(X).sum()))


@pytest.mark.asyncio
async def test_replicas_make_no_modules_and_change_no_modes(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(mlp())

    for refused in (lambda: torch_module(mlp()), model.eval, lambda: model.load_state_dict({})):

        async def step(fn: Any) -> None:
            fn()

        with pytest.raises(ContextError, match="concerns all replicas"):
            await pair.run(step, args=(refused,))


@pytest.mark.asyncio
async def test_two_modules_of_one_class_get_names_of_their_own(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        models = [torch_module(nn.Linear(2, 2)) for _ in range(2)]
        with pytest.raises(ValueError, match="'Linear/weight'"):
            torch_module(nn.Linear(2, 2), name="Linear")

    assert [model.name for model in models] == ["Linear", "Linear_1"]


# ---- replicas ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_replicas_call_one_model_at_the_same_time(gang: ar.MirroredStrategy) -> None:
    """Each replica has values of its own, and all are inside a call at once."""
    count = gang.num_replicas_in_sync
    together = threading.Barrier(count)

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.0))

        def forward(self, x: Any) -> Any:
            together.wait(10)  # breaks unless all replicas are inside at once
            scale = self.scale
            together.wait(10)
            return x * scale * self.scale

    with gang.scope():
        model = torch_module(Meeting())
    model.variables[0].store.write(
        {model.variables[0]: tuple(np.float32(i + 1) for i in range(count))}
    )

    async def step() -> Any:
        def loss() -> Any:
            return model(torch.tensor(1.0))

        ctx = me()
        return await ctx.run_on_device(differentiate_variables, loss, model.variables)

    results = gang.local_results(await gang.run(step))

    assert [(float(value), float(pairs[0][0])) for value, pairs in results] == [
        ((i + 1) ** 2, 2.0 * (i + 1)) for i in range(count)
    ]


@pytest.mark.asyncio
async def test_running_statistics_are_the_mean_of_the_replicas(pair: ar.MirroredStrategy) -> None:
    module = nn.BatchNorm1d(4, momentum=None)  # the plain average over calls
    with pair.scope():
        model = torch_module(module)

    async def step(x: Any) -> Any:
        await me().run_on_device(model, x)
        return model.buffers[0].value.copy()

    local = await pair.run(step, args=(ar.PerReplica([X[:4], X[4:]]),))

    means = [X[:4].mean(0), X[4:].mean(0)]
    np.testing.assert_allclose(local[0], means[0], rtol=1e-6)
    np.testing.assert_allclose(local[1], means[1], rtol=1e-6)
    np.testing.assert_allclose(model.buffers[0].value, X.mean(0), rtol=1e-5)
    variances = [X[:4].var(0, ddof=1), X[4:].var(0, ddof=1)]
    np.testing.assert_allclose(model.buffers[1].value, np.mean(variances, 0), rtol=1e-5)
    assert model.buffers[2].value == 1
    assert model.buffers[2].dtype == np.int64


@pytest.mark.asyncio
async def test_statistics_are_kept_by_every_strategy(strategy: ar.Strategy) -> None:
    module = nn.BatchNorm1d(4)
    with strategy.scope():
        model = torch_module(module)
    for _ in range(2):
        await strategy.run(lambda: model(X).sum().item())
        module(torch.tensor(X))

    with strategy.scope():
        assert_all_equal([v.value for v in model.buffers], [b.numpy() for b in module.buffers()])


@pytest.mark.asyncio
async def test_evaluation_writes_no_statistics(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(nn.BatchNorm1d(4)).eval()
    before = model.buffers[0].store.version

    await pair.run(lambda: model(X).sum().item())

    assert not model.training
    assert model.buffers[0].store.version == before
    assert model.train().training


@pytest.mark.asyncio
async def test_statistics_of_a_plain_variable_and_in_inference_mode() -> None:
    model, module = torch_module(nn.BatchNorm1d(4)), nn.BatchNorm1d(4)

    with torch.inference_mode():
        model(X)
    module(torch.tensor(X))

    np.testing.assert_array_equal(model.buffers[0].value, module.running_mean)


class Remembering(nn.Module):
    """Keeps what it was called with in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen: list[int] = []
        self.refs: list[Any] = []

    def forward(self, x: int) -> Any:
        self.seen.append(x)
        self.refs.append(weakref.ref(self.scale))
        return self.scale * x, list(self.seen), self.refs


@pytest.mark.asyncio
async def test_plain_attributes_stay_with_their_replica(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(Remembering())

    for _ in range(2):
        result = await pair.run(lambda: tuple(model(my_id())[1]))

    assert pair.local_results(result) == ((0, 0), (1, 1))


def test_a_loss_holds_one_copy_and_gives_it_back_without_tensors() -> None:
    model, seen = torch_module(Remembering()), []

    def loss() -> Any:
        for x in (1, 2):
            value, so_far, refs = model(x)
            seen.append((so_far, refs))
        return value

    for _ in range(2):
        differentiate_variables(loss, model.variables)

    assert [so_far for so_far, _ in seen] == [[1], [1, 2], [1, 2, 1], [1, 2, 1, 2]]
    gc.collect()
    assert [ref() for ref in seen[-1][1]] == [None] * 4


def test_a_copy_in_use_is_not_lent_again() -> None:
    """Two calls at once, twice: at first on new copies, then on those that were given back."""
    together = threading.Barrier(2)

    class Meeting(nn.Module):
        def forward(self, x: int) -> int:
            self.mine = x
            together.wait(10)
            return self.mine

    model, found = torch_module(Meeting()), {}

    def work(x: int) -> None:
        for turn in range(2):
            found[x, turn] = model(x)
            together.wait(10)

    threads = [threading.Thread(target=work, args=(x,)) for x in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert found == {(x, turn): x for x in range(2) for turn in range(2)}


def test_buffers_written_without_a_trace_are_noticed() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return F.batch_norm(x, self.mean, self.var, training=True, momentum=1.0)

    model = torch_module(Norm())

    model(X)

    np.testing.assert_allclose(model.buffers[0].value, X.mean(0), rtol=1e-5)


@pytest.mark.asyncio
async def test_a_run_that_was_aborted_writes_no_buffers(pair: ar.MirroredStrategy) -> None:
    started = threading.Event()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self) -> None:
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                while True:  # ends when the other replica has failed
                    me()._own.check_running()
            self.count += 1

    with pair.scope():
        model = torch_module(Waiting())

    async def step() -> None:
        if my_id() == 0:
            await me().run_on_device(model)
        await me().run_on_device(started.wait, 10)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await pair.run(step)

    assert model.buffers[0].value == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_no_replicas_statistics_are_lost_under_contention(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        model = torch_module(nn.BatchNorm1d(4))

    def step() -> int:
        for _ in range(300):
            model(X)
        return int(model.buffers[2].value)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counts = await gang.run(step)
    finally:
        sys.setswitchinterval(before)

    assert set(counts) == {300}


@pytest.mark.asyncio
async def test_minimize_takes_the_models_variables_and_its_library(
    strategy: ar.Strategy,
) -> None:
    module = mlp()
    with strategy.scope():
        model, sgd = torch_module(module), ar.optimizers.SGD(0.5)
    expected = mlp()
    optimizer = torch.optim.SGD(expected.parameters(), 0.5)

    async def step(x: Any) -> Any:
        def loss() -> Any:
            return ar.Weighted(torch.sum(model(x) ** 2), len(x))

        return await sgd.minimize(loss, model.variables)

    count = strategy.num_replicas_in_sync
    parts = np.array_split(X, count)
    for _ in range(3):
        await strategy.run(step, args=(ar.PerReplica(parts) if count > 1 else X,))
        optimizer.zero_grad()
        torch.mean(torch.sum(expected(torch.tensor(X)) ** 2, 1)).backward()
        optimizer.step()

    model.copy_to(module)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), atol=1e-6)


def test_sums_of_variables_remember_their_library() -> None:
    both = torch_module(mlp()).variables + torch_module(mlp()).variables
    others = [ar.Variable(1.0)]
    mixed = both + others

    assert (both.backend, len(both)) == ("torch", 8)
    assert type(mixed) is tuple


# ---- sparse gradients --------------------------------------------------------------------


def test_the_gradient_of_a_sparse_embedding_is_indexed_slices() -> None:
    module = seeded(lambda: nn.Embedding(5, 2, sparse=True))
    model = torch_module(module)

    _, [(gradient, _)] = differentiate_variables(
        lambda: torch.sum(model(np.array([3, 1, 3])) ** 2), model.variables
    )

    assert type(gradient) is ar.IndexedSlices
    assert sorted(gradient.indices) == [1, 3, 3]
    module(torch.tensor([3, 1, 3])).pow(2).sum().backward()
    np.testing.assert_array_equal(gradient.to_dense(), module.weight.grad.to_dense())


def test_value_and_grad_of_numpy_arrays_gives_indexed_slices_too() -> None:
    table = np.ones((4, 2), np.float32)
    fn = value_and_grad(
        lambda xs: F.embedding(torch.tensor([2]), xs[0], sparse=True).sum(), "torch"
    )

    _, (slices,) = fn([table])
    _, (tensor,) = fn([torch.tensor(table)])

    assert slices.indices == [2]
    assert slices.dtype == np.float32
    assert tensor.is_sparse


# ---- random layers -----------------------------------------------------------------------


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
