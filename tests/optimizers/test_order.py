"""The order of operations: aggregate, unscale, check, clip, apply; raise or skip together."""

import pickle
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError, NonFiniteError
from aioreplica.optimizers import SGD, Adam, DynamicLossScale, LossScale, ScaledGradient
from tests.conftest import mirrored
from tests.optimizers.rules import LARGE, Descent, made


def sgd_in(strategy: ar.Strategy, value: Any, **options: Any) -> tuple[ar.Variable, SGD]:
    with strategy.scope():
        return ar.Variable(value, name="w"), SGD(1.0, **options)


async def apply(strategy: ar.Strategy, optimizer: Any, parts: Any, *variables: Any) -> None:
    async def step(*grads: Any) -> None:
        await optimizer.apply_gradients(zip(grads, variables, strict=True))

    await strategy.run(step, args=tuple(map(ar.PerReplica, parts)))


# ---- clipping ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, LARGE])
async def test_norms_are_those_of_the_summed_and_unscaled_gradient(
    pair: ar.MirroredStrategy, size: int
) -> None:
    w, sgd = sgd_in(pair, np.zeros(size), clipnorm=1.0, loss_scale=2.0)
    parts = [np.zeros(size), np.zeros(size)]
    parts[0][:2], parts[1][:2] = [6.0, 0.0], [0.0, 8.0]  # their sum over 2 has norm 5

    await apply(pair, sgd, [[ScaledGradient(part, 2.0) for part in parts]], w)

    np.testing.assert_allclose(w.value[:2], [-0.6, -0.8])


@pytest.mark.asyncio
async def test_gradients_below_the_norm_stay_as_they_are(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair, [0.0, 0.0], global_clipnorm=5.0)

    await apply(pair, sgd, [[np.array([3.0, 0.0]), np.array([0.0, 4.0])]], w)

    assert w.value.tolist() == [-3.0, -4.0]


@pytest.mark.asyncio
async def test_a_global_norm_spans_all_variables(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair, [0.0], global_clipnorm=1.0)
    table = made(pair, np.zeros((4, 1)), "table")
    rows = ar.IndexedSlices([[2.0]], [3], (4, 1))

    await apply(pair, sgd, [[np.array([1.5]), np.array([1.5])], [rows, rows]], w, table)

    np.testing.assert_allclose(w.value, [-0.6])
    np.testing.assert_allclose(table.value[:, 0], [0, 0, 0, -0.8])


@pytest.mark.asyncio
async def test_values_are_clipped_after_the_mean(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair, [0.0, 0.0], clipvalue=1.0)
    parts = [ar.Weighted(np.array([9.0, 1.0]), 2), ar.Weighted(np.array([-1.0, 1.0]), 2)]

    await apply(pair, sgd, [parts], w)

    assert w.value.tolist() == [-1.0, -0.5]


@pytest.mark.asyncio
async def test_norms_beyond_single_precision_are_known() -> None:
    w = ar.Variable(np.zeros(2, np.float32))

    await SGD(1.0, clipnorm=5.0).apply_gradients([(np.float32([3e30, 4e30]), w)])

    np.testing.assert_allclose(w.value, [-3.0, -4.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"clipnorm": 0}, ValueError, "clipnorm must be > 0, got 0"),
        ({"clipvalue": -1.0}, ValueError, r"clipvalue must be > 0, got -1\.0"),
        ({"global_clipnorm": "big"}, TypeError, "global_clipnorm must be a number, got 'big'"),
        ({"clipnorm": 1, "clipvalue": 2}, ValueError, "clipnorm=1 and clipvalue=2"),
        ({"on_non_finite": "warn"}, ValueError, "raise, skip, ignore, got 'warn'"),
        ({"loss_reduction": "max"}, ValueError, '"sum" or "mean", got \'max\''),
        ({"loss_scale": 0.0}, ValueError, r"loss scale must be > 0, got 0\.0"),
        ({"learning_rate_multipliers": 2}, TypeError, "dict or a function of a variable, got 2"),
        ({"learning_rate_multipliers": {"w": 2}}, TypeError, "variables as keys, got 'w'"),
        ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"nesterov": True}, ValueError, r"nesterov=True needs a momentum above 0, got 0\.0"),
    ],
)
def test_options_are_checked(options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        SGD(0.1, **options)


# ---- what is not finite ------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, LARGE], ids=["on the loop", "off the loop"])
@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 1.0}], ids=["plain", "clipped"])
async def test_the_replica_the_variable_and_the_index_are_named(
    pair: ar.MirroredStrategy, size: int, options: Any
) -> None:
    w, sgd = sgd_in(pair, np.zeros((size, 2)), **options)
    other = made(pair, 0.0, "other")
    parts = [np.zeros((size, 2)), np.zeros((size, 2))]
    parts[1][2, 1] = np.nan

    with pytest.raises(NonFiniteError, match=r"'w'.*replica 1 brought nan at index \(2, 1\)") as e:
        await apply(pair, sgd, [[1.0, 1.0], parts], other, w)

    error = pickle.loads(pickle.dumps(e.value))
    assert (error.variable, error.replica_id, error.index) == ("w", 1, (2, 1))
    assert [v.version for v in (w, other, sgd.iterations)] == [0, 0, 0]
    await apply(pair, sgd, [[1.0, 1.0]], other)
    assert sgd.iterations.value == 1


@pytest.mark.asyncio
async def test_a_sum_that_overflows_is_nobody_s_fault(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair, np.float32([0.0]))
    big = np.float32([3e38])

    with np.errstate(over="ignore"), pytest.raises(NonFiniteError, match=r"sum over 2.*inf") as e:
        await apply(pair, sgd, [[big, big]], w)

    assert (e.value.replica_id, e.value.index) == (None, (0,))


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [np.nan, 3e38])
@pytest.mark.parametrize("options", [{}, {"clipnorm": 1.0}], ids=["plain", "clipped"])
async def test_a_scalar_of_three_replicas_is_named_without_a_warning(
    triple: ar.MirroredStrategy, number: float, options: Any
) -> None:
    w, sgd = sgd_in(triple, np.float32(0.0), **options)

    with pytest.raises(NonFiniteError) as e:
        await apply(triple, sgd, [[np.float32(1.0), np.float32(number), np.float32(number)]], w)

    assert (e.value.replica_id, e.value.index) == (1 if np.isnan(number) else None, ())


@pytest.mark.asyncio
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "options", [{}, {"clipvalue": 1.0}, {"clipnorm": 1.0}], ids=["plain", "value", "norm"]
)
async def test_an_overflow_in_the_division_is_not_finite(
    pair: ar.MirroredStrategy, options: Any, is_sparse: bool
) -> None:
    w, sgd = sgd_in(pair, np.zeros(3, np.float32), **options)
    big: Any = np.array([0.0, 1e38, 0.0], np.float32)
    if is_sparse:
        big = ar.IndexedSlices(big[1:2], [1], (3,))

    with pytest.raises(NonFiniteError, match=r"divided by 0\.002 .*inf at index \(1,\)") as e:
        await apply(pair, sgd, [[ar.Weighted(big, 1e-3)] * 2], w)

    assert (e.value.replica_id, e.value.index, w.version) == (None, (1,), 0)


@pytest.mark.asyncio
async def test_rows_that_are_not_finite_are_named_by_their_index(
    pair: ar.MirroredStrategy,
) -> None:
    w, sgd = sgd_in(pair, np.zeros((9, 2)))
    good = ar.IndexedSlices(np.ones((1, 2)), [0], (9, 2))
    bad = ar.IndexedSlices([[1.0, 1.0], [1.0, np.inf]], [3, 7], (9, 2))

    with pytest.raises(NonFiniteError, match=r"replica 1 brought inf at index \(7, 1\)"):
        await apply(pair, sgd, [[good, bad]], w)
    assert w.version == 0


@pytest.mark.asyncio
async def test_a_skipped_step_changes_the_count_of_skipped_steps_only(
    pair: ar.MirroredStrategy,
) -> None:
    w, sgd = sgd_in(pair, [0.0], on_non_finite="skip")
    global_step = made(pair, 0, "global_step")

    async def step(gradient: Any) -> None:
        await sgd.apply_gradients([(np.array([gradient]), w)], global_step)

    await pair.run(step, args=(ar.PerReplica([1.0, np.nan]),))
    assert (w.version, global_step.value, sgd.iterations.value) == (0, 0, 0)
    assert sgd.skipped_steps.value == 1

    await pair.run(step, args=(1.0,))
    assert (w.value[0], global_step.value, sgd.skipped_steps.value) == (-2.0, 1, 1)
    assert SGD().skipped_steps is None


@pytest.mark.asyncio
async def test_the_check_can_be_left_out() -> None:
    w = ar.Variable([0.0, 0.0])

    await SGD(1.0, on_non_finite="ignore").apply_gradients([(np.array([np.nan, 1.0]), w)])

    np.testing.assert_array_equal(w.value, [np.nan, -1.0])


@pytest.mark.asyncio
async def test_rules_for_whole_arrays_are_checked_too() -> None:
    w = ar.Variable([0.0, 0.0], name="w")

    with pytest.raises(NonFiniteError, match=r"'w'.*\(1,\)"):
        await Descent().apply_gradients([(np.array([0.0, np.inf]), w)])
    assert w.version == 0


@pytest.mark.asyncio
async def test_rules_for_whole_arrays_see_finite_gradients_only() -> None:
    w = ar.Variable([0.0], name="w")
    rule = Descent()

    with pytest.raises(NonFiniteError):
        await rule.apply_gradients([(np.array([np.nan]), w)])

    assert "update" not in rule.hooks


# ---- loss scale --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_loss_scale_cancels_out(gang: ar.MirroredStrategy) -> None:
    results = []
    for scale in (None, 1024.0, LossScale(8.0)):
        with gang.scope():
            w, adam = ar.Variable(3.0), Adam(0.1, loss_scale=scale)

        async def step(adam: Any = adam, w: Any = w) -> Any:
            loss = await adam.minimize(lambda: ar.Weighted(w.value**2, 2))
            [(gradient, _)] = await adam.compute_gradients(lambda: w.value * 1.0)
            await adam.apply_gradients([(gradient, w)])
            return loss.total, np.asarray(gradient)

        losses = await gang.run(step)
        assert {float(part) for part in losses[0]} == {9.0}  # the value is not scaled
        assert float(losses[1][0]) == 1.0
        results.append(float(w.value))

    assert results[0] == results[1] == results[2]


@pytest.mark.asyncio
async def test_a_dynamic_scale_halves_and_grows_with_the_step(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w = ar.Variable([0.0])
        scaling = DynamicLossScale(8.0, growth_interval=2, minimum=2.0)
        sgd = SGD(1.0, loss_scale=scaling)
    scales, values = [], []

    for gradient in (np.nan, np.inf, np.nan, 4.0, 4.0, 8.0):
        await apply(pair, sgd, [[np.array([gradient]), np.array([0.0])]], w)
        scales.append(scaling.scale)
        values.append(float(w.value[0]))

    assert scales == [4.0, 2.0, 2.0, 2.0, 4.0, 4.0]
    assert values == [0.0, 0.0, 0.0, -4.0, -8.0, -16.0]  # plain arrays are not scaled
    assert (sgd.skipped_steps.value, sgd.iterations.value) == (3, 3)
    assert {*scaling.variables} < {*sgd.variables}


@pytest.mark.asyncio
async def test_a_dynamic_scale_lives_where_its_optimizer_does(pair: ar.MirroredStrategy) -> None:
    scaling = DynamicLossScale()
    with pair.scope(), pytest.raises(ValueError, match=r"belongs to None.*same strategy\.scope"):
        SGD(loss_scale=scaling)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"initial_scale": -1.0}, ValueError, r"initial_scale must be > 0, got -1\.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1, got 0"),
        ({"growth_interval": 1.5}, TypeError, r"growth_interval must be an int, got 1\.5"),
        ({"factor": 1.0}, ValueError, r"factor must be > 1, got 1\.0"),
        ({"initial_scale": 2.0, "minimum": 4.0}, ValueError, r"initial_scale=2, got 4\.0"),
    ],
)
def test_dynamic_scales_are_checked(options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        DynamicLossScale(**options)


# ---- rates and reductions ----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_variables_may_have_rates_of_their_own(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, 0.0, "a"), made(pair, 0.0, "b")
    with pair.scope():
        by_dict = SGD(1.0, learning_rate_multipliers={a: 0.5})
        by_function = SGD(1.0, learning_rate_multipliers=lambda v: 2.0 if v is b else 0.0)

    await apply(pair, by_dict, [[1.0, 1.0], [1.0, 1.0]], a, b)
    assert (a.value, b.value) == (-1.0, -2.0)
    await apply(pair, by_function, [[1.0, 1.0], [1.0, 1.0]], a, b)
    assert (a.value, b.value) == (-1.0, -6.0)
    with pytest.raises(ValueError, match=r"multiplier of 'a' must be >= 0, got -1"):
        SGD(1.0, learning_rate_multipliers={a: -1})


@pytest.mark.asyncio
async def test_a_mean_reduction_divides_by_the_number_of_replicas(
    gang: ar.MirroredStrategy,
) -> None:
    w, sgd = sgd_in(gang, 0.0, loss_reduction="mean")

    async def step() -> None:
        await sgd.minimize(lambda: 3.0 * w.value)

    await gang.run(step)

    assert w.value == -3.0


@pytest.mark.asyncio
async def test_decay_is_for_variables_in_the_mask(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, 1.0, "a"), made(pair, 1.0, "b")
    for mask in ([a], lambda variable: variable is a):
        with pair.scope():
            adamw = ar.optimizers.AdamW(0.5, weight_decay=0.1, weight_decay_mask=mask)
        await apply(pair, adamw, [[0.0, 0.0], [0.0, 0.0]], a, b)

    assert (float(a.value), b.value) == (pytest.approx(0.95**2), 1.0)
    for wrong in (a, 3, ["a"]):
        with pytest.raises(TypeError, match="weight_decay_mask"):
            ar.optimizers.AdamW(weight_decay_mask=wrong)


@pytest.mark.asyncio
async def test_replicas_must_bring_gradients_for_the_same_variables_in_order() -> None:
    async with mirrored(2) as strategy:
        w, sgd = sgd_in(strategy, 0.0)
        b = made(strategy, 0.0, "b")

        async def step(names: Any) -> None:
            found = {"w": w, "b": b}
            await sgd.apply_gradients([(1.0, found[name]) for name in names])

        with pytest.raises(MergeMismatchError, match=r"gradients for w, b.*gradients for b, w"):
            await strategy.run(step, args=(ar.PerReplica(["wb", "bw"]),))


@pytest.mark.asyncio
async def test_the_first_variable_that_comes_on_one_side_only_is_named(
    pair: ar.MirroredStrategy,
) -> None:
    with pair.scope():
        variables, sgd = [ar.Variable(0.0, name=f"v{i}") for i in range(10)], SGD(1.0)

    async def step(count: int) -> None:
        await sgd.apply_gradients([(1.0, variable) for variable in variables[:count]])

    with pytest.raises(MergeMismatchError, match="number 9 is 'v9' and comes only there"):
        await pair.run(step, args=(ar.PerReplica([9, 10]),))
