"""Variables of half precision: float32 masters, slots and averages, as in torch's AMP."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import NonFiniteError
from aioreplica.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DynamicLossScale,
    ExponentialMovingAverage,
    RMSprop,
    ScaledGradient,
)
from tests.optimizers.resumed import assert_fresh_one_goes_on
from tests.optimizers.rules import LARGE, Descent

DTYPES = ["float16", "bfloat16"]
by_dtype = pytest.mark.parametrize("half", DTYPES, indirect=True)


@pytest.fixture
def half(request: pytest.FixtureRequest) -> np.dtype[Any]:
    """A dtype of half precision."""
    if request.param == "float16":
        return np.dtype(np.float16)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.dtype(ml_dtypes.bfloat16)


def gradients(half: np.dtype[Any], size: int = 6, count: int = 30) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=size).astype(half) for _ in range(count)]


RULES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sgd": (lambda: SGD(1e-3, momentum=0.9), "SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adam": (lambda: Adam(1e-3), "Adam", {"lr": 1e-3}),
    "adamw": (
        lambda: AdamW(1e-3, weight_decay=0.1),
        "AdamW",
        {"lr": 1e-3, "weight_decay": 0.1},
    ),
}


@by_dtype
@pytest.mark.parametrize("name", RULES)
def test_it_is_the_recipe_of_torch_to_its_rounding(half: np.dtype[Any], name: str) -> None:
    """Master weights in float32, a copy in half precision: torch's recipe, step by step."""
    torch = pytest.importorskip("torch")
    make, kind, numbers = RULES[name]
    w, optimizer = ar.Variable(np.ones(6).astype(half)), make()
    kept = torch.nn.Parameter(torch.ones(6))
    theirs = getattr(torch.optim, kind)([kept], **numbers)
    copies = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    copy = kept.detach().to(copies[half.name])

    async def train() -> None:
        for gradient in gradients(half):
            await optimizer.apply_gradients([(gradient, w)])
            kept.grad = torch.tensor(gradient.astype(np.float32))
            theirs.step()
            copy.copy_(kept.detach())

    asyncio.run(train())
    assert w.dtype == half
    master = optimizer.get_slot(w, "master")
    np.testing.assert_allclose(master.value, kept.detach().numpy(), rtol=1e-6)
    np.testing.assert_array_equal(w.value, master.value.astype(half))
    one_rounding = float(np.finfo(np.float16).eps) if half.kind == "f" else 2.0**-7
    found, expected = w.value.astype(np.float32), copy.float().numpy()
    np.testing.assert_allclose(found, expected, rtol=one_rounding)
    assert {s.dtype.name for s in optimizer.variables[1:]} == {"float32"}


@pytest.mark.asyncio
@by_dtype
@pytest.mark.parametrize("make", [SGD, Adam, AdamW, RMSprop, Adagrad, Descent])
async def test_a_gradient_of_zero_leaves_a_number(half: np.dtype[Any], make: Any) -> None:
    w, optimizer = ar.Variable(np.ones(3).astype(half)), make()

    await optimizer.apply_gradients([(np.zeros(3).astype(half), w)])

    np.testing.assert_allclose(w.value.astype(np.float32), 1.0, rtol=1e-2)
    assert w.dtype == half


@pytest.mark.asyncio
@by_dtype
@pytest.mark.parametrize("size", [5, LARGE], ids=["on the loop", "off the loop"])
async def test_steps_smaller_than_a_rounding_add_up(
    half: np.dtype[Any], size: int, pair: ar.MirroredStrategy
) -> None:
    with pair.scope():
        w, sgd = ar.Variable(np.ones(size).astype(half)), SGD(2.0**-12, loss_reduction="mean")

    async def step() -> None:
        await sgd.apply_gradients([(np.ones(size).astype(half), w)])

    for _ in range(16):
        await pair.run(step)
    assert w.value[0] == 1 - 2.0**-8
    await pair.check_in_sync([w, *sgd.variables])


@pytest.mark.asyncio
@by_dtype
@pytest.mark.parametrize("size", [5, 9000])
async def test_the_master_continues_from_values_written_by_others(
    half: np.dtype[Any], size: int
) -> None:
    w, sgd = ar.Variable(np.ones(size).astype(half)), SGD(2.0**-12)
    one = np.ones(size).astype(half)
    for _ in range(3):
        await sgd.apply_gradients([(one, w)])
    master = sgd.get_slot(w, "master")
    assert master.value[1] == 1 - 3 * 2.0**-12

    written = np.array(w.value)
    written[0] = 4.0
    await w.assign(written)
    await sgd.apply_gradients([(one, w)])

    assert master.value[0] == 4.0 - 2.0**-12
    assert master.value[1] == 1 - 4 * 2.0**-12  # the others keep what they have
    assert w.value[0] == 4.0


@pytest.mark.asyncio
@by_dtype
async def test_two_optimizers_of_one_variable_build_on_each_other(half: np.dtype[Any]) -> None:
    w, one, other = ar.Variable(np.ones(2).astype(half)), SGD(0.25), SGD(0.125)
    gradient = np.ones(2).astype(half)
    for optimizer in (one, other, one, other):
        await optimizer.apply_gradients([(gradient, w)])
    assert w.value.astype(float).tolist() == [0.25, 0.25]


@pytest.mark.asyncio
@by_dtype
async def test_sums_and_scales_are_those_of_float32(
    half: np.dtype[Any], pair: ar.MirroredStrategy
) -> None:
    with pair.scope():
        w, sgd = ar.Variable(np.zeros(2).astype(half)), SGD(1.0)

    async def step() -> None:
        large = ScaledGradient(np.array([6e4, -3e4]).astype(half), 2.0**40)
        await sgd.apply_gradients([(large, w)])

    await pair.run(step)
    large = np.array([6e4, -3e4]).astype(half).astype(np.float64)
    np.testing.assert_allclose(sgd.get_slot(w, "master").value, -2 * large / 2.0**40, rtol=1e-7)


@pytest.mark.asyncio
async def test_a_value_beyond_half_precision_is_refused() -> None:
    w, sgd = ar.Variable(np.float16([6e4, 1.0]), name="w"), SGD(1.0)

    with pytest.raises(NonFiniteError, match=r"update of 'w'.*'w' would be inf at index \(0,\)"):
        await sgd.apply_gradients([(np.float32([-6e4, 0.0]), w)])
    assert w.version == 0


@pytest.mark.asyncio
@by_dtype
async def test_rows_of_a_table_are_moved(half: np.dtype[Any]) -> None:
    table, adagrad = ar.Variable(np.ones((9, 2)).astype(half)), Adagrad(0.5)
    slices = ar.IndexedSlices(np.ones((2, 2)).astype(half), [3, 7], (9, 2))
    await adagrad.apply_gradients([(slices, table)])

    moved = table.value.astype(np.float32) != 1
    assert np.flatnonzero(moved.any(axis=1)).tolist() == [3, 7]
    assert adagrad.get_slot(table, "accumulator").dtype == np.float32


@pytest.mark.asyncio
@by_dtype
async def test_a_window_is_added_up_in_float32(half: np.dtype[Any]) -> None:
    w, sgd = ar.Variable(np.zeros(1).astype(half)), SGD(1.0)
    window = ar.GradientAccumulator(sgd)
    for number in (2048.0, 1.0, 1.0, 1.0):
        await window.add([(np.array([number]).astype(half), w)])
    await window.apply()
    assert sgd.get_slot(w, "master").value[0] == -2051.0


@pytest.mark.asyncio
@by_dtype
async def test_a_constraint_holds_for_master_and_value(half: np.dtype[Any]) -> None:
    w = ar.Variable(np.ones(2).astype(half), constraint=lambda value: np.maximum(value, 0.5))
    sgd = SGD(1.0)
    await sgd.apply_gradients([(np.ones(2).astype(half), w)])
    assert (w.value.tolist(), sgd.get_slot(w, "master").value.tolist()) == ([0.5, 0.5],) * 2


@pytest.mark.asyncio
async def test_the_master_is_a_slot_of_variables_of_half_precision_only() -> None:
    w, single, sgd = ar.Variable(np.zeros(1, "f2")), ar.Variable(np.zeros(1, "f4")), SGD()
    await sgd.apply_gradients([(np.ones(1), w), (np.ones(1), single)])

    assert sgd.get_slot(w, "master").name.endswith("/master")
    assert sgd.slot_names == ()
    assert sgd.get_slot(single, "master") is None
    with pytest.raises(ValueError, match="No slot can be called 'master'"):
        ar.optimizers._slots.SlotTable(("master",))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["from_torch", "from_optax"])
@by_dtype
async def test_rules_of_other_libraries_move_the_master(half: np.dtype[Any], name: str) -> None:
    library: Any = pytest.importorskip(name.removeprefix("from_"))
    found = []
    for dtype in (half, np.dtype(np.float32)):
        w, b = (ar.Variable(np.ones(3).astype(dtype), name=name) for name in "wb")
        if name == "from_torch":
            optimizer = ar.optimizers.from_torch(library.optim.AdamW, lr=1e-3)
        else:
            optimizer = ar.optimizers.from_optax(library.adamw(1e-3))
        for gradient in gradients(half, 3, 5):
            wide = gradient.astype(dtype)
            await optimizer.apply_gradients([(wide, w), (wide, b)])
        found.append(
            [optimizer.get_slot(v, "master").value if dtype is half else v.value for v in (w, b)]
        )
    np.testing.assert_array_equal(*found)


# ---- checkpoints and averages ------------------------------------------------------------------


@pytest.mark.asyncio
@by_dtype
async def test_a_checkpoint_holds_the_masters(
    half: np.dtype[Any], pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    await assert_fresh_one_goes_on(pair, tmp_path, lambda: Adam(2.0**-10), half)


@pytest.mark.asyncio
@by_dtype
@pytest.mark.parametrize("is_warm", [False, True])
async def test_without_masters_they_start_from_the_values(
    half: np.dtype[Any], is_warm: bool, tmp_path: Path
) -> None:
    def build() -> tuple[ar.Variable, Any]:
        return ar.Variable(np.ones(2).astype(half)), SGD(2.0**-12)

    (w, sgd), gradient = build(), np.ones(2).astype(half)
    await w.assign(np.full(2, 4.0).astype(half))
    manager = ar.CheckpointManager(tmp_path)
    await manager.save(1, {"w": w, "sgd": sgd})
    w, sgd = build()
    if is_warm:
        await sgd.apply_gradients([(gradient, w)])
    await manager.restore({"w": w, "sgd": sgd})
    assert w.value.tolist() == [4.0, 4.0]

    await sgd.apply_gradients([(gradient, w)])
    assert sgd.get_slot(w, "master").value.tolist() == [4 - 2.0**-12] * 2


@pytest.mark.asyncio
@by_dtype
async def test_averages_follow_in_float32(half: np.dtype[Any], pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w = ar.Variable(np.zeros(3).astype(half))
        ema = ExponentialMovingAverage([w], 0.999)
    await w.assign(np.ones(3).astype(half))

    async def step() -> None:
        await ema.update()

    for _ in range(20):
        await pair.run(step)
    average = ema.average(w)
    np.testing.assert_allclose(average.value, 1 - 0.999**20, rtol=1e-5)
    exact = np.array(average.value)
    async with ema.swapped():
        np.testing.assert_array_equal(w.value, exact.astype(half))
        assert average.value.tolist() == [1.0] * 3
    assert w.value.astype(float).tolist() == [1.0] * 3
    np.testing.assert_array_equal(average.value, exact)


@pytest.mark.asyncio
@by_dtype
async def test_evaluating_averages_leaves_the_masters(half: np.dtype[Any]) -> None:
    w, sgd = ar.Variable(np.ones(2).astype(half)), SGD(2.0**-12)
    ema = ExponentialMovingAverage([w], 0.5)
    gradient = np.ones(2).astype(half)
    for _ in range(3):
        await sgd.apply_gradients([(gradient, w)])
    async with ema.swapped():
        pass
    await sgd.apply_gradients([(gradient, w)])
    assert sgd.get_slot(w, "master").value.tolist() == [1 - 4 * 2.0**-12] * 2


@pytest.mark.asyncio
async def test_a_dynamic_scale_trains_float16() -> None:
    scale = DynamicLossScale(2.0**15)
    w, sgd = ar.Variable(np.float16([1.0, 2.0])), SGD(2.0**-10, loss_scale=scale)
    for _ in range(8):
        gradient = np.float16([2.0**-24, 1.0]) * np.float16(scale.scale)
        await sgd.apply_gradients([(ScaledGradient(gradient, scale.scale), w)])
    assert sgd.skipped_steps.value == 0
    assert sgd.get_slot(w, "master").value.tolist() == [1.0, 2 - 8 * 2.0**-10]


@pytest.mark.slow  # jax compiles each op
@pytest.mark.asyncio
@pytest.mark.parametrize("chooses", [False, True])
async def test_a_loss_of_jax_trains_bfloat16(pair: ar.MirroredStrategy, chooses: bool) -> None:
    jnp = pytest.importorskip("jax.numpy")
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    with pair.scope():
        w, sgd = ar.Variable(np.ones(3, dtype)), SGD(0.25, loss_reduction="mean")

    async def step() -> None:
        await sgd.minimize(lambda: jnp.sum(w.value**2), [w] if chooses else None, backend="jax")

    await pair.run(step)
    assert w.dtype == dtype
    assert w.value.astype(float).tolist() == [0.5] * 3
