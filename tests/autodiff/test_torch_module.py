"""torch_module: modules of torch whose parameters are variables."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, torch_module, value_and_grad
from tests.autodiff.torch_modules import X, assert_all_equal, gradients_of, mlp, seeded

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Any) -> Any:
        return self.decoder(self.encoder(ids))


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


def test_gradients_are_computed_on_the_calling_thread_for_gpus_too() -> None:
    seen = []

    def note(gradient: Any) -> None:
        seen.append(torch._C._is_multithreading_enabled())

    def square(xs: Any) -> Any:
        xs[0].register_hook(note)
        return xs[0] * xs[0]

    value_and_grad(square, "torch")([np.array(3.0)])

    assert seen == [False]
    assert torch._C._is_multithreading_enabled()


def test_a_default_device_of_torch_is_not_that_of_variables() -> None:
    model = torch_module(mlp())
    with torch.device("meta"):
        _, pairs = differentiate_variables(lambda: torch.sum(model(X)), model.variables)
        model.copy_to(copied := mlp().to_empty(device="cpu"))
        _, [square] = value_and_grad(lambda xs: xs[0] * xs[0], "torch")([np.array(3.0)])

    assert_all_equal([g for g, _ in pairs], gradients_of(mlp(), X))
    assert torch.equal(copied[0].weight, mlp()[0].weight)
    assert square == 6.0


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
