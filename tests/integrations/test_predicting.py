"""Predictions of a service: one function for all, in process, several at a time; labels by ids."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import CheckpointError, ContextError, LoopMismatchError
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import ExampleSpec, Journal, Migration, SnapshotReader, publish_snapshot
from tests.online.program import Counting, example
from tests.online.test_labels import Seen, opened

from .asking import ask, post, until

prometheus_client = pytest.importorskip("prometheus_client")

Predict = Callable[[Any, Any], Any]


@pytest_asyncio.fixture
async def program(tmp_path: Path) -> AsyncIterator[Counting]:
    async with Counting(tmp_path, max_batch=1, publish_to=tmp_path / "model") as found:
        yield found


class Recorded:
    """A function that predicts the version; keeps the inputs of each call, and waits if told to."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, snapshot: Any, inputs: Any) -> dict[str, Any]:
        self.calls.append(inputs[:, 0].tolist())
        await self.gate.wait()
        if (inputs < 0).any():
            raise ValueError("negative")
        return {"twice": 2 * inputs[:, 0], "version": np.full(len(inputs), snapshot.version)}


def service_of(program: Counting, predict: Predict, **options: Any) -> OnlineService:
    return OnlineService(program.learner, predict, input_like=np.zeros(1), **options)


async def blocked(service: OnlineService, predict: Recorded, *inputs: float) -> list[Any]:
    """Let inputs wait behind a call, of 0, which begins first; return all their tasks."""
    predict.gate.clear()
    tasks = [asyncio.ensure_future(service.predict([0.0]))]
    await until(lambda: predict.calls)
    tasks += [asyncio.ensure_future(service.predict([each])) for each in inputs]
    await asyncio.sleep(0)  # each has begun: it waits
    return tasks


async def twice(tasks: Sequence[Any]) -> list[float]:
    return [float(found["twice"]) for found, _ in await asyncio.gather(*tasks)]


@pytest.mark.asyncio
async def test_one_function_predicts_from_the_learner_and_from_its_file(
    program: Counting, tmp_path: Path
) -> None:
    await (await program.learner.submit(example(3)))

    def predict(snapshot: Any, inputs: Any) -> Any:
        return inputs[:, 0] + snapshot["counts"][3]

    service = service_of(program, predict)
    reader = SnapshotReader(tmp_path / "model")
    await until(lambda: reader.read().version == 1)
    worker = OnlineService(reader, predict, input_like=np.zeros(1))

    answers = [await post(each, "/predict", {"input": [4]}) for each in (service, worker)]
    found = [await each.predict(np.full(1, 4.0)) for each in (service, worker)]
    reader.close()

    assert [each.json() for each in answers] == [{"version": 1, "prediction": 5.0}] * 2
    assert found == [(5.0, 1)] * 2
    with pytest.raises(KeyError, match="'count' is not in this snapshot, which holds 'counts',"):
        program.learner.snapshot()["count"]


@pytest.mark.asyncio
async def test_a_prediction_in_process_is_checked_and_raises_what_went_wrong(
    tmp_path: Path,
) -> None:
    program = Counting(tmp_path)

    def validate(given: Any) -> Any:
        if given[0] > 9:
            raise ValueError("above 9")
        return given

    service = service_of(program, lambda _, x: x / 0, validate=validate)
    with pytest.raises(ContextError, match="never opened"):
        await service.predict([1.0])
    async with program:
        with pytest.raises(ValueError, match="above 9"):
            await service.predict([10.0])
        with pytest.raises(ValueError, match="shape"):
            await service.predict([1.0, 2.0])
        with np.errstate(all="raise"), pytest.raises(FloatingPointError):
            await service.predict([1.0])


@pytest.mark.asyncio
@pytest.mark.parametrize("returned", [7.0, np.zeros(3), [np.zeros(2), np.zeros((1, 2))]])
async def test_predictions_have_a_row_per_input(program: Counting, returned: Any) -> None:
    service = service_of(program, lambda *_: returned)

    answer = await post(service, "/predict", {"inputs": [[1], [2]]})

    assert answer.status == 500
    with pytest.raises(ValueError, match=r"of shape .* for 1 inputs. Return one row per input"):
        await service.predict([1.0])


@pytest.mark.asyncio
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "error", [FileNotFoundError("/srv/words.txt"), ContextError("closed"), CheckpointError("old")]
)
async def test_an_error_of_predict_is_no_missing_version(
    program: Counting, caplog: pytest.LogCaptureFixture, error: Exception, batch: int
) -> None:
    def predict(*_: Any) -> Any:
        raise error

    service = service_of(program, predict, predict_batch=batch)

    answer = await post(service, "/predict", {"input": [1]})

    assert (answer.status, "retry-after" in answer.headers) == (500, False)
    assert str(error) not in answer.body.decode()
    [record] = caplog.records
    assert str(error) in (record.exc_text or "")
    with pytest.raises(type(error), match=str(error)):
        await service.predict([1.0])


@pytest.mark.asyncio
@pytest.mark.parametrize("batch", [1, 4])
async def test_a_prediction_that_awaits_what_was_cancelled_fails_alone(
    program: Counting, caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    async def predict(_: Any, inputs: Any) -> Any:
        if (inputs < 0).any():
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost
        return inputs[:, 0]

    service = service_of(program, predict, predict_batch=batch)
    tasks = [post(service, "/predict", {"input": [each]}) for each in (1, -1, 2)]

    assert [each.status for each in await asyncio.gather(*tasks)] == [200, 500, 200]
    assert "nobody has cancelled it" in (caplog.records[0].exc_text or "")


# ---- several at a time ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_requests_that_come_during_a_call_share_the_next(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=4)
    tasks = await blocked(service, predict, 1, 2, 3, 4, 5)
    predict.gate.set()

    assert await twice(tasks) == [0, 2, 4, 6, 8, 10]
    assert predict.calls == [[0], [1, 2, 3, 4], [5]]
    metrics = (await ask(service, "GET", "/metrics")).body.decode()
    assert "aioreplica_online_predicted_total 6.0" in metrics
    assert "aioreplica_online_predict_calls_total 3.0" in metrics


@pytest.mark.asyncio
async def test_a_request_is_never_cut(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=4)
    tasks = await blocked(service, predict, 1, 2)
    many = [
        asyncio.ensure_future(
            post(service, "/predict", {"inputs": [[10 * i + k] for k in range(i)]})
        )
        for i in (3, 6)
    ]
    await until(lambda: len(service._predicting._waiting) == 4)
    await (await program.learner.submit(example(1)))
    predict.gate.set()

    await twice(tasks)
    answers = [(await each).json() for each in many]
    assert predict.calls == [[0], [1, 2], [30, 31, 32], [60, 61, 62, 63, 64, 65]]
    for answer in answers:
        assert {*answer["predictions"]["version"]} == {answer["version"]} == {1}


@pytest.mark.asyncio
async def test_a_bad_input_fails_alone(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=4)
    tasks = await blocked(service, predict, 1, -2, 3)
    predict.gate.set()

    first, good, bad, other = await asyncio.gather(*tasks, return_exceptions=True)

    assert [found["twice"] for found, _ in (first, good, other)] == [0, 2, 6]
    assert isinstance(bad, ValueError)
    assert predict.calls == [[0], [1, -2, 3], [1], [-2], [3]]


@pytest.mark.asyncio
async def test_who_is_cancelled_takes_no_place_and_disturbs_nobody(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=4)
    tasks = await blocked(service, predict, 1, 2)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0)
    predict.gate.set()

    assert await twice(tasks[2:]) == [4]
    assert predict.calls == [[0], [2]]
    assert [task.cancelled() for task in tasks] == [True, True, False]


@pytest.mark.asyncio
async def test_a_full_batch_waits_no_longer_and_a_delay_ends(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=2, predict_delay_s=3600.0)
    assert await twice([service.predict([each]) for each in (1.0, 2.0)]) == [2, 4]
    assert predict.calls == [[1, 2]]

    service = service_of(program, predict, predict_batch=2, predict_delay_s=0.001)
    assert await twice([service.predict([3.0])]) == [6]


@pytest.mark.asyncio
async def test_closing_ends_the_call_and_tells_who_waits(tmp_path: Path) -> None:
    program, predict = Counting(tmp_path), Recorded()
    service = service_of(program, predict, predict_batch=2)
    async with program.strategy:
        async with service.lifespan():
            tasks = await blocked(service, predict, 1, 2, 3)
            waiting = asyncio.ensure_future(post(service, "/predict", {"input": [4]}))
            await until(lambda: len(service._predicting._waiting) == 4)
        found = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(each) for each in found] == [ContextError] * 4
        assert (await waiting).status == 503
        predict.gate.set()
        async with service.lifespan():
            assert await twice([service.predict([5.0])]) == [10]
    await program.manager.aclose()


@pytest.mark.asyncio
async def test_another_loop_is_refused_while_a_call_runs(program: Counting) -> None:
    predict = Recorded()
    service = service_of(program, predict, predict_batch=2)
    tasks = await blocked(service, predict)

    def ask_elsewhere() -> None:
        asyncio.run(service.predict([1.0]))  # type: ignore[arg-type]

    with pytest.raises(LoopMismatchError, match="A service that predicts in batches"):
        await asyncio.to_thread(ask_elsewhere)
    predict.gate.set()
    assert await twice(tasks) == [0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"predict_batch": 0}, "predict_batch must be an int of at least 1, got 0"),
        ({"predict_batch": True}, "got True"),
        ({"predict_batch": 2, "predict_delay_s": -1.0}, "must be seconds, not negative, got -1.0"),
        ({"predict_batch": 2, "predict_delay_s": np.inf}, "got inf"),
        ({"predict_delay_s": 0.1}, "Give predict_batch as well"),
    ],
)
def test_sizes_and_delays_are_checked(tmp_path: Path, options: Any, told: str) -> None:
    publish_snapshot(tmp_path / "model", 1, {})
    with SnapshotReader(tmp_path / "model") as reader, pytest.raises(ValueError, match=told):
        OnlineService(reader, lambda _, x: x, input_like=0.0, **options)


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
async def test_a_label_of_an_older_form_joins_an_input_that_waits_from_before(
    tmp_path: Path,
) -> None:
    def joined(row: Any) -> Any:
        return {**row, "target": {"clicked": float(row["target"][0])}}

    class Newer(Seen):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> None:
            await super().step(ctx, {**batch, "target": batch["target"]["clicked"]})

    async with opened(tmp_path) as older:
        names = [older.learner.expect(x) for x in (3, 4, 5)]
    spec = ExampleSpec({"input": 0, "target": {"clicked": 0.0}})
    newer = {"spec_version": 2, "migrate": {1: Migration(joined)}, "validate": spec}
    program = Newer(tmp_path, **newer)
    async with program.strategy, program.learner:
        service = OnlineService(
            program.learner, lambda _, x: x, input_like=0, target_like={"clicked": 0.0}
        )
        names.append((await post(service, "/predict", {"input": 6})).json()["id"])

        async def label(i: int, target: Any, version: int | None = None) -> tuple[int, str]:
            more = {} if version is None else {"spec_version": version}
            answer = await post(service, "/label", {"id": names[i], "target": target, **more})
            return answer.status, answer.body.decode()

        for target, version, said in (
            ({"clicked": 7.0}, 2, "waits in the form of spec version 1, and its label has that"),
            ({"clicked": 7.0}, None, "waits in the form of spec version 1, so its label has to"),
            ([["a"]], 1, "An example is made of"),
            ([7.0], 3, "a number from 1 to 2, got 3"),
            ([7.0], "1", "a number from 1 to 2, got '1'"),
            ([7.0], 2, "not what is needed"),
        ):
            status, text = await label(0, target, version)
            assert (status, said in text) == (422, True), text
        for i, version in ((0, 1), (1, None)):
            for is_duplicate in (False, True):
                status, text = await label(i, [7.0 + i], version)
                assert status == 202, text
                assert json.loads(text)["is_duplicate"] == is_duplicate
        status, text = await label(3, [9.0])  # waits in the newer form
        assert (status, "not what is needed" in text) == (422, True)
        assert (await label(3, {"clicked": 9.0}))[0] == 202
        names.append("nobody")
        assert (await label(4, [9.0]))[0] == 404
        await until(lambda: program.learned() == {3: 7.0, 4: 8.0, 6: 9.0})


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


@pytest.mark.asyncio
async def test_the_learner_is_saved_although_a_prediction_hangs(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    is_open, leaving = asyncio.Event(), asyncio.Event()

    def hang() -> None:
        has_begun.set()
        may_end.wait()

    async def predict(_snapshot: Any, inputs: Any) -> Any:
        await ar.run_on_host(hang)
        return inputs

    program = Counting(tmp_path)
    service = service_of(program, predict, predict_batch=8)

    async def serve() -> None:
        async with program.strategy, program.manager, service.lifespan():
            is_open.set()
            await leaving.wait()

    serving = asyncio.ensure_future(serve())
    try:
        await is_open.wait()
        await (await program.learner.submit(example(3)))
        asked = asyncio.ensure_future(service.predict([1.0]))
        await asyncio.to_thread(has_begun.wait)
        assert not program.manager.steps()
        leaving.set()

        await until(program.manager.steps)

        assert not serving.done()
    finally:
        may_end.set()
        leaving.set()
        await serving
    with pytest.raises(ContextError, match="closed before it had predicted"):
        await asked
