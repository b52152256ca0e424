"""Hooks on the parameters of a torch_module: called with each replica's gradient, or refused."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar

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
