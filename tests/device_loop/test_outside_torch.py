"""outside_compilation in functions that torch differentiates."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("no_task_left", "made_on_device"), pytest.mark.asyncio]


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


async def cube_later(x: Any) -> Any:
    await asyncio.sleep(0)
    return x**3


@pytest.mark.parametrize("fn", [cube_later, lambda x: cube_later(x)], ids=["async", "lambda"])
async def test_whatever_has_to_be_awaited_is_differentiated(
    solo: ar.OneDeviceStrategy, fn: Any
) -> None:
    def step() -> Any:
        x = torch.tensor(2.0, requires_grad=True)
        [first] = torch.autograd.grad(ar.outside_compilation(fn, x), x, create_graph=True)
        [second] = torch.autograd.grad(first, x)
        return float(first.detach()), float(second)

    first, second = await solo.run(step)

    assert (first.values, second.values) == ((12.0,), (12.0,))


async def test_every_part_of_a_result_has_its_gradient(solo: ar.OneDeviceStrategy) -> None:
    def parts(x: Any) -> Any:
        return {"a": 2.0 * x, "rest": (x**3, None, "text", torch.tensor(5))}

    def step() -> Any:
        x = torch.tensor(2.0, requires_grad=True)
        made = ar.outside_compilation(parts, x)
        assert made["rest"][1:] == (None, "text", torch.tensor(5))
        loss = made["a"] * made["rest"][0]  # 2 x^4
        [first] = torch.autograd.grad(loss, x, create_graph=True)
        [second] = torch.autograd.grad(first, x)
        return float(first.detach()), float(second)

    first, second = await solo.run(step)

    assert (first.values, second.values) == ((64.0,), (96.0,))
