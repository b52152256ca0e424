"""Rules compiled by numba: the bits of NumPy's, compiled off the event loop, or not at all."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.context import REGISTRY
from aioreplica.errors import NonFiniteError
from aioreplica.optimizers import FusedRules
from aioreplica.optimizers._blocks import FLOATS, FUSED_RULES, fused_rules
from aioreplica.optimizers._kernels import ADAPT

RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: ar.optimizers.SGD(0.1),
    "momentum": lambda: ar.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: ar.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: ar.optimizers.Adam(0.1),
    "AdamW": lambda: ar.optimizers.AdamW(0.1, weight_decay=0.3),
    "Adagrad": lambda: ar.optimizers.Adagrad(0.1),
    "RMSprop": lambda: ar.optimizers.RMSprop(0.1),
    "RMSprop with momentum": lambda: ar.optimizers.RMSprop(0.1, momentum=0.9),
    "norm": lambda: ar.optimizers.Adam(0.1, global_clipnorm=0.5, loss_scale=128.0),
    "value": lambda: ar.optimizers.SGD(0.1, clipvalue=0.25, loss_scale=3.0),
}


@pytest.fixture
def rules() -> Iterator[FusedRules]:
    """Rules that compile, whatever the process did before."""
    pytest.importorskip("numba")
    mine = FusedRules()
    old = REGISTRY.replace(FUSED_RULES, mine)
    yield mine
    REGISTRY.replace(FUSED_RULES, old)


def trained(make: Callable[[], Any], num_replicas: int = 1) -> list[Any]:
    """Train arrays of several sizes and dtypes, one of them by rows; return what was written."""
    rng = np.random.default_rng(0)
    shapes = [((300, 401), "f4"), ((7,), "f4"), ((5, 3), "f8"), ((), "f4"), ((3,), "f2")]
    devices = [f"cpu:{index}" for index in range(num_replicas)]

    async def train() -> list[Any]:
        async with ar.MirroredStrategy(devices) as strategy:
            with strategy.scope():
                variables = [
                    ar.Variable(rng.normal(size=size).astype(kind)) for size, kind in shapes
                ]
                table = ar.Variable(rng.normal(size=(50, 4)).astype("f4"))
                optimizer = make()
            everything = (*variables, table)
            for _ in range(3):
                parts = [
                    [np.asarray(rng.normal(size=v.shape), v.dtype) for v in variables]
                    for _ in devices
                ]
                rows = [rng.normal(size=(2, 4)).astype("f4") for _ in devices]

                async def step(own: list[Any], of_table: Any) -> None:
                    slices = ar.IndexedSlices(of_table, np.array([3, 40]), (50, 4))
                    pairs = zip((*own, slices), everything, strict=True)
                    weighted = [
                        (ar.Weighted(gradient, 1.5), variable) for gradient, variable in pairs
                    ]
                    await optimizer.apply_gradients(weighted)

                await strategy.run(step, args=(ar.PerReplica(parts), ar.PerReplica(rows)))
            return [np.array(variable.value) for variable in (*everything, *optimizer.variables)]

    return asyncio.run(train())


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_the_bits_are_those_of_numpy(name: str, num_replicas: int, rules: FusedRules) -> None:
    old = REGISTRY.replace(FUSED_RULES, FusedRules(is_on=False))
    expected = trained(RULES[name], num_replicas)
    assert REGISTRY.replace(FUSED_RULES, rules) is not old
    found = trained(RULES[name], num_replicas)
    kernel = RULES[name]().kernel
    assert not rules.missing(kernel, [np.dtype(kind) for kind in ("f4", "f8")])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


@pytest.mark.parametrize("place", [0, 1023, 1024, 5000])
def test_non_finite_elements_are_found_at_every_place(place: int, rules: FusedRules) -> None:
    w = ar.Variable(np.ones(5001, np.float32))
    sgd = ar.optimizers.SGD(0.5)
    gradient = np.ones(5001, np.float32)
    asyncio.run(sgd.apply_gradients([(gradient, w)]))
    for number in (np.nan, np.inf, -np.inf):
        gradient[place] = number
        with pytest.raises(NonFiniteError, match=rf"{number} at index \({place},\)"):
            asyncio.run(sgd.apply_gradients([(gradient, w)]))
    assert w.value.tolist() == [0.5] * 5001
    assert rules.find(sgd.kernel, w.dtype, [gradient]) is not None


def test_a_gradient_of_another_layout_stays_in_numpy(rules: FusedRules) -> None:
    for gradient in (np.ones(3, ">f4"), np.ones(3, "f8")):
        w = ar.Variable(np.zeros(3, np.float32))
        asyncio.run(ar.optimizers.SGD(0.5).apply_gradients([(gradient, w)]))
        assert w.value.tolist() == [-0.5] * 3


@pytest.mark.asyncio
async def test_compiling_leaves_the_event_loop(
    rules: FusedRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    compile_ = FusedRules.compile

    def watched(self: FusedRules, *arguments: Any) -> None:
        seen.append(threading.current_thread())
        compile_(self, *arguments)

    monkeypatch.setattr(FusedRules, "compile", watched)
    w = ar.Variable(np.zeros(3, np.float32))
    optimizer = ar.optimizers.SGD(0.5)
    for _ in range(2):
        await optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    assert len(seen) == 1
    assert seen[0] is not threading.main_thread()


def test_rules_that_cannot_be_compiled_are_logged_once(
    rules: FusedRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(numba, "njit", fails)
    with pytest.warns(RuntimeWarning, match="ValueError: no compiler"):
        rules.compile(ADAPT, [np.dtype("f4")])
    assert rules.missing(ADAPT, [np.dtype("f8")]) == []
    w = ar.Variable(3.0)
    asyncio.run(ar.optimizers.Adam(0.5).apply_gradients([(np.array(1.0), w)]))
    assert w.value == pytest.approx(2.5)


def test_what_is_on_disk_is_not_compiled(rules: FusedRules) -> None:
    from numba.core import event

    rules.compile(ADAPT, FLOATS)
    with event.install_recorder("numba:compile") as recorder:
        again = FusedRules()
        again.compile(ADAPT, FLOATS)
    assert recorder.buffer == []
    assert again.missing(ADAPT, FLOATS) == []


def test_programs_under_the_kit_stay_in_numpy(rules: FusedRules) -> None:
    async def program() -> list[Any]:
        w = ar.Variable(np.zeros(3, np.float32))
        await ar.optimizers.SGD(0.5).apply_gradients([(np.ones(3, np.float32), w)])
        return fused_rules().missing(ar.optimizers.SGD(0.5).kernel, [w.dtype])

    assert art.run(program) == []
    assert fused_rules() is rules
