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
from aioreplica.optimizers import FusedRules
from aioreplica.optimizers._fused import FUSED_RULES, fused_rules
from aioreplica.optimizers._kernels import ADAPT

RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: ar.optimizers.SGD(0.1),
    "momentum": lambda: ar.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: ar.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: ar.optimizers.Adam(0.1),
    "AdamW": lambda: ar.optimizers.AdamW(0.1, weight_decay=0.3),
    "Adagrad": lambda: ar.optimizers.Adagrad(0.1),
    "clipped": lambda: ar.optimizers.Adam(0.1, global_clipnorm=0.5, loss_scale=128.0),
}


@pytest.fixture
def rules() -> Iterator[FusedRules]:
    """Rules that compile, whatever the process did before."""
    pytest.importorskip("numba")
    mine = FusedRules()
    old = REGISTRY.replace(FUSED_RULES, mine)
    yield mine
    REGISTRY.replace(FUSED_RULES, old)


def trained(make: Callable[[], Any]) -> list[Any]:
    """Train arrays of several sizes and dtypes, one of them by rows; return what was written."""
    rng = np.random.default_rng(0)
    shapes = [((300, 401), "f4"), ((7,), "f4"), ((5, 3), "f8"), ((), "f4"), ((3,), "f2")]
    variables = [ar.Variable(rng.normal(size=shape).astype(kind)) for shape, kind in shapes]
    table = ar.Variable(rng.normal(size=(50, 4)).astype("f4"))
    optimizer = make()

    async def train() -> None:
        for _ in range(3):
            pairs: list[Any] = [
                (np.asarray(rng.normal(size=v.shape), v.dtype), v) for v in variables
            ]
            rows = rng.normal(size=(2, 4)).astype("f4")
            pairs.append((ar.IndexedSlices(rows, np.array([3, 40]), (50, 4)), table))
            await optimizer.apply_gradients(pairs)

    asyncio.run(train())
    slots = [
        optimizer.get_slot(variable, name).value
        for variable in (*variables, table)
        for name in optimizer.slot_names
    ]
    return [*(variable.value for variable in (*variables, table)), *slots]


@pytest.mark.parametrize("name", RULES)
def test_the_bits_are_those_of_numpy(name: str, rules: FusedRules) -> None:
    old = REGISTRY.replace(FUSED_RULES, FusedRules(is_on=False))
    expected = trained(RULES[name])
    assert REGISTRY.replace(FUSED_RULES, rules) is not old
    found = trained(RULES[name])
    kernel = RULES[name]().kernel
    assert not rules.missing(kernel, [np.dtype(kind) for kind in ("f4", "f8", "f2")])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


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


def test_what_cannot_be_compiled_is_told_once(
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


def test_programs_under_the_kit_stay_in_numpy(rules: FusedRules) -> None:
    async def program() -> list[Any]:
        w = ar.Variable(np.zeros(3, np.float32))
        await ar.optimizers.SGD(0.5).apply_gradients([(np.ones(3, np.float32), w)])
        return fused_rules().missing(ar.optimizers.SGD(0.5).kernel, [w.dtype])

    assert art.run(program) == []
    assert fused_rules() is rules
