"""from_torch: what torch does on one process, in slots."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import _from_torch, from_torch
from tests.optimizers.resumed import assert_fresh_one_goes_on
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
    ("AdamW", {"lr": 0.01, "fused": False}),
    ("NAdam", {"lr": 0.01}),
]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # these have a fused step, which rounds otherwise


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
    usual = {"fused": True} if name in FUSED else {}
    plain = getattr(torch.optim, name)(parameters, **{**usual, **options})
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


@pytest.mark.asyncio
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("name", "shapes"), [
    ("Muon", [(3, 2), (4, 4)]), ("Adafactor", [(3, 2), (5,), ()])
])  # fmt: skip
async def test_classes_that_tell_matrices_from_vectors_are_torchs(
    name: str, shapes: Any, is_grouped: bool
) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=shape).astype("f4") for shape in shapes]
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    variables = [ar.Variable(start) for start in starts]
    kind = getattr(torch.optim, name)

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    plain = kind(parameters, lr=0.1)
    rate = scheduler(plain)
    groups = [{"params": variables}] if is_grouped else None
    optimizer = from_torch(kind, groups, scheduler=scheduler, lr=0.1)
    for _ in range(5):
        gradients = [rng.normal(size=shape).astype("f4") for shape in shapes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        plain.step()
        rate.step()
        await optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for parameter, variable in zip(parameters, variables, strict=True):
        np.testing.assert_array_equal(variable.value, parameter.detach().numpy())


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "NAdam"])
async def test_a_default_device_of_torch_is_not_that_of_variables(name: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        variable = ar.Variable(np.ones(3, "f4"))
        with torch.device(device):
            optimizer = from_torch(getattr(torch.optim, name), lr=0.1)
            for _ in range(2):
                await optimizer.apply_gradients([(np.full(3, 0.5, "f4"), variable)])
        found.append(variable.value.tolist())
    assert found[0] == found[1] != [1.0, 1.0, 1.0]


@pytest.mark.asyncio
async def test_a_shape_that_torch_refuses_changes_nothing() -> None:
    w = ar.Variable(np.ones(3, "f4"))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        await from_torch(torch.optim.Muon, lr=0.1).apply_gradients([(np.ones(3, "f4"), w)])
    assert w.version == 0
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        from_torch(torch.optim.Muon, [{"params": [w]}], lr=0.1)


@pytest.mark.asyncio
async def test_groups_and_a_scheduler_are_torchs(pair: ar.MirroredStrategy) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=3) for _ in range(3)]
    gradients = rng.normal(size=(8, 3, 3))
    own: list[dict[str, Any]] = [{"lr": 0.1, "momentum": 0.9}, {"weight_decay": 0.5}]
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    plain = torch.optim.SGD(
        [{"params": parameters[:2], **own[0]}, {"params": parameters[2:], **own[1]}],
        lr=0.01,
        fused=True,
    )

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)

    schedule = scheduler(plain)
    with pair.scope():
        variables = [ar.Variable(start) for start in starts]
        groups = [{"params": variables[:2], **own[0]}, {"params": variables[2:], **own[1]}]
        optimizer = from_torch(torch.optim.SGD, groups, scheduler=scheduler, lr=0.01)

    async def step(found: Any) -> None:
        await optimizer.apply_gradients(list(zip(found, variables, strict=True)), aggregate=False)

    for found in gradients:
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = torch.tensor(gradient)
        plain.step()
        schedule.step()
        await pair.run(step, args=(list(found),))

    for parameter, variable in zip(parameters, variables, strict=True):
        np.testing.assert_array_equal(variable.value, parameter.detach().numpy())


@pytest.mark.asyncio
async def test_a_schedule_follows_the_count_of_updates_back() -> None:
    w, seen = ar.Variable([0.0]), []
    sgd = from_torch(
        torch.optim.SGD,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lr=1.0,
    )
    for _ in range(3):
        await sgd.apply_gradients([(np.array([1.0]), w)])
        seen.append(float(w.value[0]))
    await sgd.iterations.assign(0)  # as if a checkpoint was loaded
    await sgd.apply_gradients([(np.array([1.0]), w)])

    assert [*seen, float(w.value[0])] == [-1.0, -1.5, -1.75, -2.75]


@pytest.mark.asyncio
async def test_its_options_come_before_torch(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        a, b = ar.Variable([0.0]), ar.Variable([0.0])
        sgd = from_torch(
            torch.optim.SGD,
            lr=1.0,
            clipnorm=5.0,
            loss_scale=4.0,
            on_non_finite="skip",
            learning_rate_multipliers={b: 0.5},
        )

    async def step(x: Any) -> None:
        await sgd.minimize(lambda: 3.0 * x * a.value[0] + 1.0 * x * b.value[0], [a, b])

    await pair.run(step, args=(2.0,))
    assert (a.value, b.value) == (-5.0, -2.0)
    await pair.run(step, args=(np.nan,))
    assert (a.version, sgd.skipped_steps.value, sgd.iterations.value) == (1, 1, 1)
    sgd.learning_rate = 0.5
    await pair.run(step, args=(1.0,))
    assert (a.value, b.value) == (-7.5, -2.5)


@pytest.mark.asyncio
async def test_a_variable_may_join_later() -> None:
    a, b = ar.Variable([8.0]), ar.Variable([8.0])
    sgd = from_torch(torch.optim.SGD, lr=0.5, momentum=0.5, dampening=0.5)
    await sgd.apply_gradients([(np.array([4.0]), a)])

    await sgd.apply_gradients([(np.array([4.0]), a), (np.array([4.0]), b)])
    await sgd.apply_gradients([(np.array([4.0]), a), (np.array([4.0]), b)])

    assert (float(a.value[0]), float(b.value[0])) == (2.0, 4.0)  # torch starts with the gradient


@pytest.mark.asyncio
async def test_a_step_that_torch_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = ar.Variable(np.ones(50_000))
    adam = from_torch(torch.optim.Adam, lr=0.1)
    for _ in range(3):  # from now on older buffers are used again
        await adam.apply_gradients([(np.ones(50_000), w)])
    before = [(each, each.value, each.value.copy()) for each in (w, *adam.variables)]

    def step(self: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(7.0)
                for part in self.state[parameter].values():
                    part.fill_(7.0)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", step)
        with pytest.raises(MemoryError):
            await adam.apply_gradients([(np.ones(50_000), w)])

    for each, array, copied in before:
        assert each.value is array
        np.testing.assert_array_equal(array, copied)
    await adam.apply_gradients([(np.ones(50_000), w)])
    np.testing.assert_allclose(w.value, 0.6)


@pytest.mark.parametrize(
    ("kept", "expected"), [(256, [*range(6)]), (2, [0, 1, 2, 3, 4, *range(6)])]
)
def test_updates_that_come_out_of_order_ask_a_scheduler_once(
    kept: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_from_torch, "KEPT_OPTIONS", kept)
    asked: list[int] = []

    def factor(number: int) -> float:
        asked.append(number)
        return 0.5**number

    sgd: Any = from_torch(
        torch.optim.SGD,
        lr=1.0,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    )
    for number in (2, 1, 4, 3, 3, 1, 5):
        assert sgd._schedule.at(number)[0]["lr"] == 0.5**number

    assert asked == expected


@pytest.mark.asyncio
async def test_gradients_are_not_written_to() -> None:
    w, gradient = ar.Variable([1.0]), np.array([1.0])
    sgd = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)

    for _ in range(2):
        await sgd.apply_gradients([(gradient, w)])

    assert gradient == 1.0


@pytest.mark.asyncio
async def test_runs_at_the_same_time_lose_no_update(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w = ar.Variable(np.zeros(300_000))
        sgd = from_torch(torch.optim.SGD, lr=1.0)

    async def step() -> None:
        await sgd.apply_gradients([(np.ones(300_000), w)])

    await asyncio.gather(*(pair.run(step) for _ in range(4)))

    assert (w.value == -8.0).all()


@pytest.mark.asyncio
async def test_a_variable_in_no_group_or_in_two_is_an_error() -> None:
    a, b = ar.Variable([0.0], name="a"), ar.Variable([0.0], name="b")

    with pytest.raises(ValueError, match="'b' has a gradient but is in no group"):
        await from_torch(torch.optim.SGD, [{"params": [a]}]).apply_gradients([(np.ones(1), b)])
    with pytest.raises(ValueError, match="'a' is in two groups"):
        from_torch(torch.optim.SGD, [{"params": [a]}, {"params": [a]}])
    with pytest.raises(TypeError, match='"params" are variables, got 3'):
        from_torch(torch.optim.SGD, [{"params": [3]}])
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs a metric"):
        from_torch(torch.optim.SGD, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert (a.version, b.version) == (0, 0)


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


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.01, "amsgrad": True}), ("NAdam", {})],
)
async def test_a_fresh_one_goes_on_where_a_checkpoint_was(
    name: str, options: dict[str, Any], pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    """Its slots are not made yet when it is restored."""
    await assert_fresh_one_goes_on(
        pair, tmp_path, lambda: from_torch(getattr(torch.optim, name), **options)
    )
