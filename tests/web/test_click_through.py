"""The service of click-through rates: late labels, a restart, workers, figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

import examples.click_through as program
from tests.integrations.asking import until

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 70


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DATA", tmp_path / "data")
    # They are set once per process, and other tests have lanes already.
    monkeypatch.setattr(program.ar, "set_lane_options", lambda *, background: None)


@asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


def clicked(inputs: Sequence[int]) -> bool:
    return inputs[1] == 2  # an ad that everybody likes


async def predicted(client: httpx.AsyncClient, inputs: Any, model: str = "clicks") -> Any:
    answer = await client.post(f"/{model}/predict", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def label(client: httpx.AsyncClient, inputs: Any, ids: Any) -> None:
    bodies = [
        {"id": name, "target": float(clicked(each))} for each, name in zip(inputs, ids, strict=True)
    ]
    asked = [client.post("/clicks/label", json=body) for body in bodies]
    for answer in await asyncio.gather(*asked):
        assert answer.status_code == 202, answer.text


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/clicks/metrics")).text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.removeprefix("aioreplica_online_"): float(value) for name, _, value in pairs}


def views(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, [9, 4, 3, 24], (count, 4)).tolist()  # type: ignore[no-any-return]


def test_it_is_short() -> None:
    text = (ROOT / "examples" / "click_through.py").read_text()
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.asyncio
@pytest.mark.usefixtures("data")
async def test_clicks_are_learned_from_labels_that_come_late() -> None:
    first, second = views(300, 0), views(300, 1)
    async with running(program.make_app()) as client:
        before = await predicted(client, first[:1])
        made = []
        for start in range(0, 300, 100):
            made += (await predicted(client, first[start : start + 100]))["ids"]
    async with running(program.make_app()) as client:  # the labels come after a restart
        await label(client, first, made)
        waiting = await predicted(client, second[:200])
        await label(client, second[:200], waiting["ids"])

        async def is_learned() -> bool:
            return (await metrics_of(client))['learned_number{model="clicks"}'] == 500

        await until(is_learned)
        after = await predicted(client, second[200:])
        others = await predicted(client, second[200:], "buys")
        found = await metrics_of(client)
        unknown = await client.post("/clicks/label", json={"id": "never", "target": 1})
    async with running(program.make_worker()) as client:
        seen = await predicted(client, second[200:])

    right = np.array([clicked(each) for each in second[200:]])
    assert before["predictions"] == [0.5]
    likely = np.array(after["predictions"])
    assert likely[right].mean() > likely[~right].mean()
    assert {*others["predictions"]} == {0.5}
    assert found['judged_total{model="clicks"}'] == 500
    assert 0 <= found['figure_auc{model="clicks"}'] <= 1  # how good depends on the batches
    assert found['learned_number{model="buys"}'] == 0
    assert unknown.status_code == 404
    assert seen["predictions"] == after["predictions"]
