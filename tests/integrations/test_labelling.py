"""Labels over HTTP: a prediction has an id, and its label comes later, once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import Journal
from tests.online.test_labels import Seen, opened

from .asking import ask, post, until

prometheus_client = pytest.importorskip("prometheus_client")


@asynccontextmanager
async def served(folder: Path, predict: Any = None, **options: Any) -> AsyncIterator[Any]:
    async with opened(folder, **options) as program:
        by_default = lambda _snapshot, inputs: inputs / 2  # noqa: E731 - a prediction each
        service = OnlineService(
            program.learner, predict or by_default, input_like=0, target_like=0.0
        )
        yield service, program


@pytest.mark.asyncio
async def test_a_prediction_is_labelled_once_by_its_id(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, program):
        one = (await post(service, "/predict", {"input": 3})).json()
        many = (await post(service, "/predict", {"inputs": [4, 5]})).json()
        assert one == {"version": 0, "id": one["id"], "prediction": 1.5}
        assert many["predictions"] == [2.0, 2.5]
        assert len({one["id"], *many["ids"]}) == 3
        assert (await program.learner.expected(many["ids"][1]))["prediction"] == 2.5

        label = {"id": many["ids"][1], "target": 1}
        answers = [await post(service, "/label", label) for _ in range(2)]
        assert [each.status for each in answers] == [202, 202]
        assert [each.json() for each in answers] == [
            {"number": 1, "is_duplicate": False}, {"number": 1, "is_duplicate": True}
        ]  # fmt: skip
        await until(lambda: program.learned() == {5: 1.0})
        metrics = (await ask(service, "GET", "/metrics")).body.decode()
        assert "aioreplica_online_expected_total 3.0" in metrics
        assert "aioreplica_online_labelled_total 1.0" in metrics


@pytest.mark.asyncio
async def test_labels_that_nothing_waits_for_are_404_and_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _):
        answer = await post(service, "/label", {"id": "nobody", "target": 1.0})
        assert (answer.status, "waits for a label" in answer.json()["error"]) == (404, True)
        metrics = (await ask(service, "GET", "/metrics")).body.decode()
        assert "aioreplica_online_unknown_labels_total 1.0" in metrics


@pytest.mark.asyncio
async def test_an_error_of_validate_does_not_say_that_nothing_waits(tmp_path: Path) -> None:
    async with served(tmp_path, validate=lambda example: example["x"]) as (service, _):
        made = (await post(service, "/predict", {"input": 3})).json()
        answer = await post(service, "/label", {"id": made["id"], "target": 1.0})
        assert answer.status != 404


@pytest.mark.asyncio
async def test_what_is_no_label_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, queue_size=1) as (service, program):
        name = (await post(service, "/predict", {"input": 3})).json()["id"]
        wrong: tuple[Any, ...] = (
            [], {"id": name}, {"id": name, "target": 1.0, "more": 1}, {"id": 7, "target": 1.0},
            {"id": "", "target": 1.0}, {"id": name, "target": "a"}, {"id": name, "target": [1.0]},
        )  # fmt: skip
        for body in wrong:
            assert (await post(service, "/label", body)).status == 422, body
        await post(service, "/label", {"id": name, "target": 1.0})
        await until(lambda: program.learner.statistics().queue_depth == 0)
        assert (await post(service, "/label", {"id": name, "target": 2.0})).status == 409
        await program.learner.pause()
        names = (await post(service, "/predict", {"inputs": [6, 7]})).json()["ids"]
        statuses = [
            (await post(service, "/label", {"id": each, "target": 1.0})).status for each in names
        ]
        assert statuses == [202, 429]


@pytest.mark.asyncio
async def test_predictions_are_answered_when_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(_snapshot: Any, inputs: Any) -> Any:
        return np.array(["cat"] * len(inputs))

    async with served(tmp_path, words) as (service, program):
        found = (await post(service, "/predict", {"input": 3})).json()
        assert found["prediction"] == "cat"
        assert await program.learner.expected(found["id"]) == {"input": 3}  # text is not kept

        def refuse(*_args: object) -> None:
            raise anyio.WouldBlock

        monkeypatch.setattr(program.learner._engine.intake, "expect", refuse)
        found = (await post(service, "/predict", {"inputs": [3]})).json()
        assert found == {"version": 0, "ids": [None], "predictions": ["cat"]}


@pytest.mark.asyncio
async def test_without_a_time_to_live_there_is_no_such_route(tmp_path: Path) -> None:
    async with served(tmp_path, journal=Journal(tmp_path / "journal")) as (service, _):
        assert (await post(service, "/predict", {"input": 3})).json().keys() == {
            "version", "prediction"
        }  # fmt: skip
        assert (await post(service, "/label", {"id": "a", "target": 1.0})).status == 404


def test_the_schema_of_a_framework_describes_labels(tmp_path: Path) -> None:
    fastapi = pytest.importorskip("fastapi")
    from aioreplica.integrations.fastapi import router

    program = Seen(tmp_path)
    service = OnlineService(program.learner, lambda _, x: x, input_like=0, target_like=[0.0, 1.0])
    app = fastapi.FastAPI()
    app.include_router(router(service))
    text = json.dumps(app.openapi()["paths"]["/label"])
    assert '"required": ["id", "target"]' in text
