"""Schedules: the formulas, their edges, and what they refuse."""

import pickle
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD
from aioreplica.optimizers.schedules import (
    Constant,
    CosineDecay,
    ExponentialDecay,
    LinearWarmup,
    PiecewiseConstantDecay,
)

ALL = [
    Constant(0.1),
    CosineDecay(0.1, 10, alpha=0.1),
    ExponentialDecay(0.1, 10, 0.5),
    LinearWarmup(CosineDecay(0.1, 10), 5),
    PiecewiseConstantDecay([2, 5], [0.3, 0.2, 0.1]),
]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_schedules_are_pure_values(schedule: Any) -> None:
    again = pickle.loads(pickle.dumps(schedule))

    assert again == schedule
    assert hash(again) == hash(schedule)
    rates = [schedule(iteration) for iteration in range(30)]
    assert rates == [again(iteration) for iteration in range(30)]
    assert all(type(rate) is float and 0 <= rate <= 0.3 for rate in rates)


def test_exponential_decay_may_go_in_steps() -> None:
    stairs = ExponentialDecay(1.0, decay_steps=2, decay_rate=0.5, staircase=True)

    assert [stairs(i) for i in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_cosine_decay_ends_at_alpha() -> None:
    schedule = CosineDecay(2.0, decay_steps=4, alpha=0.25)

    assert schedule(2) == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert schedule(4) == schedule(400) == 0.5


def test_a_warm_up_hands_over_to_any_schedule() -> None:
    schedule = LinearWarmup(PiecewiseConstantDecay([1], [0.8, 0.4]), 4, 0.4)

    assert [schedule(i) for i in range(7)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.4])


@pytest.mark.asyncio
async def test_an_optimizer_counts_its_updates() -> None:
    w, values = ar.Variable(0.0), []
    sgd = SGD(PiecewiseConstantDecay([0, 1], [1.0, 10.0, 100.0]))

    for _ in range(3):
        await sgd.apply_gradients([(1.0, w)])
        values.append(float(w.value))

    assert values == [-1.0, -11.0, -111.0]
    assert sgd.learning_rate(0) == 1.0


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: Constant(-1.0), ValueError, r"learning_rate must be >= 0, got -1\.0"),
        (lambda: ExponentialDecay(0.1, 0, 0.5), ValueError, "decay_steps must be > 0, got 0"),
        (lambda: ExponentialDecay(0.1, 1, 0), ValueError, "decay_rate must be > 0, got 0"),
        (lambda: CosineDecay(0.1, 10, 2), ValueError, r"alpha must be in \[0, 1\], got 2"),
        (lambda: CosineDecay("x", 10), TypeError, "learning_rate must be a number, got 'x'"),
        (lambda: LinearWarmup(0.1, 0), ValueError, "warmup_steps must be > 0, got 0"),
        (lambda: LinearWarmup(-0.1, 1), ValueError, r"got -0\.1"),
        (lambda: PiecewiseConstantDecay([1], [1.0]), ValueError, "1 boundaries divide 2 values"),
        (lambda: PiecewiseConstantDecay([2, 2], [1, 1, 1]), ValueError, r"ascend, got \[2, 2\]"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make()
