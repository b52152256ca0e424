"""outside_compilation in functions that torch differentiates."""

from typing import Any

import pytest

import aioreplica as ar

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def clusters_of(strategy: ar.Strategy) -> list[str]:
    return [e.name for e in strategy.events.events("outside") if e.replica_id == 0]


async def test_the_gradient_runs_outside_too(solo: ar.OneDeviceStrategy) -> None:
    def step() -> Any:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        (2.0 * ar.outside_compilation(lambda y: (y * y).sum(), x)).backward()
        return x.grad.tolist()

    assert (await solo.run(lambda: tuple(step())))[0].values == (4.0,)
    assert clusters_of(solo) == ["0", "0.uid"]


async def test_a_gradient_of_a_gradient(solo: ar.OneDeviceStrategy) -> None:
    def step() -> Any:
        x = torch.tensor(2.0, requires_grad=True)
        [first] = torch.autograd.grad(
            ar.outside_compilation(lambda y: y**3, x), x, create_graph=True
        )
        [second] = torch.autograd.grad(first, x)
        return float(second)

    assert (await solo.run(step)).values == (12.0,)
    assert clusters_of(solo)[:3] == ["0", "0.uid", "0.uid.uid_1"]
