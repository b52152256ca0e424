"""Large finite gradients: means that stay finite, and updates that are not finite are refused."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.context import REGISTRY
from aioreplica.errors import NonFiniteError
from aioreplica.optimizers import SGD, Adagrad, Adam, AdamW, FusedRules, RMSprop
from aioreplica.optimizers._blocks import FUSED_RULES
from tests.optimizers.rules import LARGE, Descent, made

HUGE = np.float32([3e19, -1.0, 0.0])
MAKERS: dict[str, Callable[..., Any]] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "RMSprop": RMSprop,
    "RMSprop with momentum": lambda **o: RMSprop(momentum=0.9, **o),
    "centered RMSprop": lambda **o: RMSprop(centered=True, **o),
}
TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {"lr": 0.001}),
    "AdamW": ("AdamW", {"lr": 0.001, "weight_decay": 0.004}),
    "RMSprop": ("RMSprop", {"lr": 0.001, "alpha": 0.9}),
    "RMSprop with momentum": ("RMSprop", {"lr": 0.001, "alpha": 0.9, "momentum": 0.9}),
}


@pytest.fixture(params=["numpy", "numba"])
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rules in NumPy, and compiled."""
    if request.param == "numba":
        pytest.importorskip("numba")
    old = REGISTRY.replace(FUSED_RULES, FusedRules(is_on=request.param == "numba"))
    yield
    REGISTRY.replace(FUSED_RULES, old)


def trained(make: Callable[..., Any], gradients: list[Any], **options: Any) -> list[Any]:
    """Apply gradients to ones; return everything that was written."""
    w, optimizer = ar.Variable(np.ones(3, np.float32)), make(**options)

    async def train() -> None:
        for gradient in gradients:
            await optimizer.apply_gradients([(gradient, w)])

    asyncio.run(train())
    return [np.array(each.value) for each in (w, *optimizer.variables)]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("number", [3e19, -3e19, 1e17])
def test_a_large_gradient_leaves_everything_finite(
    name: str, number: float, compiled: None
) -> None:
    gradients = [np.float32([number, -1.0, 0.0]), np.float32([1.0, 1.0, 0.0])] * 2

    for array in trained(MAKERS[name], gradients):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("name", TORCH)
def test_it_moves_as_torch_does_after_a_large_gradient(name: str, compiled: None) -> None:
    torch = pytest.importorskip("torch")
    kind, numbers = TORCH[name]
    parameter = torch.nn.Parameter(torch.ones(3))
    theirs = getattr(torch.optim, kind)([parameter], **numbers)
    gradients = [HUGE, np.float32([1e19, 1.0, 0.0]), np.float32([1.0, 2.0, 3.0])]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        theirs.step()

    ours = trained(MAKERS[name], gradients)[0]
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=2e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_compiled_rules_have_the_bits_of_numpy_for_large_gradients(name: str) -> None:
    pytest.importorskip("numba")
    found = []
    for is_on in (False, True):
        old = REGISTRY.replace(FUSED_RULES, FusedRules(is_on=is_on))
        found.append(trained(MAKERS[name], [HUGE, HUGE * 20, HUGE], on_non_finite="ignore"))
        REGISTRY.replace(FUSED_RULES, old)

    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


REFUSED: dict[str, tuple[Callable[..., Any], float, float, str]] = {
    "a value": (lambda: SGD(2.0), 1.0, -3e38, "w"),
    "a sum of gradients": (lambda: SGD(0.0, momentum=0.9), 3e38, 3e38, "w/momentum"),
    "a sum looked ahead of": (lambda: SGD(0.0, momentum=0.9, nesterov=True), 0.0, 3e38, "w"),
    "squares of Adam": (Adam, 1e20, 1e21, "w/v"),
    "squares of Adagrad": (Adagrad, 1e19, 1e20, "w/accumulator"),
    "squares of RMSprop": (RMSprop, 1e19, 1e21, "w/rms"),
    "squares of RMSprop with momentum": (lambda: RMSprop(momentum=0.9), 1e19, 1e21, "w/rms"),
    "squares of centered RMSprop": (lambda: RMSprop(centered=True), 1e19, 1e21, "w/rms"),
    "a rule on whole arrays": (lambda: Descent(2.0), 1.0, 3e38, "w"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("size", [4, LARGE], ids=["on the loop", "off the loop"])
async def test_an_update_that_is_not_finite_is_refused_by_name(
    what: str, size: int, compiled: None
) -> None:
    make, legal, number, name = REFUSED[what]
    w, optimizer = ar.Variable(np.ones(size, np.float32), name="w"), make()
    gradient = np.zeros(size, np.float32)
    gradient[2] = legal
    await optimizer.apply_gradients([(gradient, w)])
    before = [np.array(variable.value) for variable in (w, *optimizer.variables)]
    assert all(np.isfinite(each).all() for each in before)

    gradient[2] = number
    with pytest.raises(NonFiniteError, match=rf"update of 'w'.*'{name}' would be .*\(2,\)") as e:
        await optimizer.apply_gradients([(gradient, w)])

    assert (e.value.variable, e.value.replica_id, e.value.index) == ("w", None, (2,))
    for variable, old in zip((w, *optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable.value, old)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["from_torch", "from_optax"])
async def test_values_of_other_libraries_rules_are_looked_at(what: str) -> None:
    library: Any = pytest.importorskip(what.removeprefix("from_"))
    w = ar.Variable(np.ones(2, np.float32), name="w")
    if what == "from_torch":
        optimizer = ar.optimizers.from_torch(library.optim.SGD, lr=2.0)
    else:
        optimizer = ar.optimizers.from_optax(library.sgd(2.0))

    with pytest.raises(NonFiniteError, match=r"update of 'w'.*-inf at index \(1,\)"):
        await optimizer.apply_gradients([(np.float32([0.0, 3e38]), w)])
    assert w.version == 0


@pytest.mark.asyncio
async def test_rows_of_a_sparse_update_are_looked_at(compiled: None) -> None:
    table, adam = ar.Variable(np.ones((9, 2), np.float32), name="table"), Adam()
    slices = ar.IndexedSlices(np.float32([[1.0, 1.0], [1.0, 1e21]]), [3, 7], (9, 2))

    with pytest.raises(NonFiniteError, match=r"'table/v' would be inf at index \(7, 1\)"):
        await adam.apply_gradients([(slices, table)])
    assert table.version == 0


@pytest.mark.asyncio
async def test_such_a_step_is_skipped_and_the_scale_stays(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        scale = ar.optimizers.DynamicLossScale(8.0)
        w, adam = ar.Variable(np.ones(3, np.float32)), Adam(loss_scale=scale)

    async def step(number: Any) -> None:
        await adam.apply_gradients([(np.float32([number, 1.0, 0.0]), w)])

    await pair.run(step, args=(1e21,))
    assert (adam.skipped_steps.value, w.version, adam.iterations.value) == (1, 0, 0)
    assert scale.scale == 8.0
    await pair.run(step, args=(1.0,))
    assert (adam.skipped_steps.value, adam.iterations.value) == (1, 1)


def test_elements_that_are_infinite_already_may_stay(compiled: None) -> None:
    w, sgd = ar.Variable(np.float32([-np.inf, np.nan, 1.0])), SGD(0.5)
    asyncio.run(sgd.apply_gradients([(np.float32([0.0, 0.0, 1.0]), w)]))
    np.testing.assert_array_equal(w.value, np.float32([-np.inf, np.nan, 0.5]))


def test_ignoring_it_moves_nothing_by_an_infinite_square(compiled: None) -> None:
    value, _, m, v = trained(Adam, [np.float32([1e21, 1.0, 0.0])], on_non_finite="ignore")
    assert (value[0], v[0]) == (1.0, np.inf)
    assert np.isfinite([*value, *m]).all()


@pytest.mark.asyncio
async def test_values_whose_products_overflow_are_legal(compiled: None) -> None:
    w = ar.Variable(np.full(3, 1e30, np.float32))
    await SGD(1.0).apply_gradients([(np.float32([1e29, 0.0, 0.0]), w)])
    assert w.value[0] == pytest.approx(9e29)


@pytest.mark.asyncio
async def test_replicas_agree_on_an_update_that_is_not_finite(gang: ar.MirroredStrategy) -> None:
    w = made(gang, np.ones(2, np.float32))
    with gang.scope():
        adam = Adam()

    async def step() -> None:
        await adam.apply_gradients([(np.float32([1e21, 0.0]), w)])

    with pytest.raises(NonFiniteError, match="'w/v'"):
        await gang.run(step)
    assert w.version == 0
