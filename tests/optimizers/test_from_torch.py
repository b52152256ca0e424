"""from_torch: what torch does on one process, in slots."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import from_torch
from tests.replica.gated import my_id

torch = pytest.importorskip("torch")

RULES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("NAdam", {"lr": 0.01}),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "options"), RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
async def test_twenty_steps_are_torchs_bit_by_bit(
    pair: ar.MirroredStrategy, name: str, options: dict[str, Any], dtype: Any
) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=(3, 2)).astype(dtype), rng.normal(size=()).astype(dtype)]
    gradients = [[rng.normal(size=s.shape).astype(dtype) for s in starts] for _ in range(20)]
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    plain = getattr(torch.optim, name)(parameters, **options)
    with pair.scope():
        variables = [ar.Variable(start) for start in starts]
        optimizer = from_torch(getattr(torch.optim, name), **options)

    async def step(own: Any) -> None:
        mine = [gradient if my_id() == 0 else np.zeros_like(gradient) for gradient in own]
        await optimizer.apply_gradients(zip(mine, variables, strict=True))

    for own in gradients:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = torch.tensor(gradient)
        plain.step()
        await pair.run(step, args=(own,))

    for parameter, variable in zip(parameters, variables, strict=True):
        np.testing.assert_array_equal(variable.value, parameter.detach().numpy())
        for slot in optimizer.slot_names[1:]:
            found = optimizer.get_slot(variable, slot)
            assert found is not None
            np.testing.assert_array_equal(found.value, plain.state[parameter][slot].numpy())
    await pair.check_in_sync(variables)


@pytest.mark.parametrize("wrong", [torch.optim.SGD([torch.zeros(1)]), int, None])
def test_it_takes_a_class_of_torch(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a class such as torch\.optim\.Adam"):
        from_torch(wrong)


def test_optimizers_that_call_the_loss_are_refused() -> None:
    with pytest.raises(TypeError, match="closure"):
        from_torch(torch.optim.LBFGS)


def test_options_are_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="learning rate"):
        from_torch(torch.optim.SGD, lr=-1.0)
