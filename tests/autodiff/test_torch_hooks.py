"""Hooks on the parameters of modules: called with each replica's gradient, or refused."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.conftest import mirrored

torch = pytest.importorskip("torch")

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def hooked() -> Any:
    module = torch.nn.Linear(4, 2)
    module.weight.register_hook(lambda gradient: gradient * 2)
    module.weight.register_hook(lambda gradient: gradient.clamp(-9.0, 9.0))
    module.bias.register_hook(lambda gradient: None)
    return module


@pytest.mark.asyncio
@pytest.mark.parametrize("num_calls", [1, 2])
async def test_hooks_change_gradients_as_in_torch(
    gang: ar.MirroredStrategy, num_calls: int
) -> None:
    module = hooked()
    with gang.scope():
        model = ar.autodiff.torch_module(module)
        sgd = ar.optimizers.SGD(1.0, loss_reduction="mean")
    start = [np.array(v.value) for v in model.variables]
    assert not model(X).requires_grad

    async def step() -> None:
        await sgd.minimize(lambda: sum(model(X).sum() for _ in range(num_calls)), model.variables)

    for _ in range(2):
        await gang.run(step)
    sum(module(torch.tensor(X)).sum() for _ in range(num_calls)).backward()

    for variable, parameter, before in zip(
        model.variables, module.parameters(), start, strict=True
    ):
        expected = before - 2 * parameter.grad.numpy()
        np.testing.assert_allclose(variable.value, expected, rtol=1e-5, atol=1e-5)


def test_hooks_that_would_never_be_called_are_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 2))
    module[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)

    with pytest.raises(TypeError, match=r"'0\.bias' has a hook of register_post_accumulate"):
        ar.autodiff.torch_module(module)


# ---- prepare -------------------------------------------------------------------------------


def prepared(module: Any, strategy: ar.Strategy) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return ar.prepare(module, optimizer, [torch.tensor(X)], strategy=strategy)


def gradient_of_an_epoch(model: Any, optimizer: Any, batches: Any) -> Any:
    model.bias.requires_grad_(True)
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
    return [parameter.grad.numpy() for parameter in (model.weight, model.bias)]


@pytest.mark.asyncio
async def test_every_replica_of_a_prepared_module_calls_them(gang: ar.MirroredStrategy) -> None:
    module = torch.nn.Linear(4, 2)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    module.weight.register_hook(lambda gradient: gradient * mask)
    module.weight.register_hook(lambda gradient: gradient * 2)
    module.bias.register_hook(lambda gradient: gradient * 0)
    module.bias.requires_grad_(False)
    found = await gang.run(gradient_of_an_epoch, args=prepared(module, gang))

    expected = np.tile(X.sum(0) * mask.numpy() * 2 / gang.num_replicas_in_sync, (2, 1))
    for weight, bias in gang.local_results(found):
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
        np.testing.assert_array_equal(bias, 0.0)


def test_hooks_that_would_be_called_before_the_mean_is_there_are_refused_by_name() -> None:
    module = torch.nn.Linear(4, 2)
    for _ in range(2):
        prepared(module, mirrored(2))  # its own are none of these
    module.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    with pytest.raises(ValueError, match=r"'bias' has a hook of register_post_accumulate"):
        prepared(module, mirrored(2))
    prepared(module, mirrored(1))


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Replicas are on cuda")  # over devices with streams
async def test_a_prepared_module_may_have_parameters_of_integers(pair: ar.MirroredStrategy) -> None:
    module = torch.nn.Linear(4, 2)
    module.table = torch.nn.Parameter(torch.arange(8), requires_grad=False)
    module.mask = torch.nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    first, second = pair.local_results(
        await pair.run(gradient_of_an_epoch, args=prepared(module, pair))
    )

    np.testing.assert_array_equal(first[0], second[0])
    assert module.table.tolist() == list(range(8))
