"""A service of online learning as an application: what it answers, refuses, and tells."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.integrations import _events, prometheus
from aioreplica.integrations.asgi import Limits, OnlineService
from aioreplica.online import Migration, OnlineLearner, SnapshotReader, publish_snapshot

from .asking import Answer, ask, events_of, post, scope_of, until

prometheus_client = pytest.importorskip("prometheus_client")


@asynccontextmanager
async def serving(
    strategy: ar.Strategy, *, queue_size: int = 64, journal: Path | None = None, **options: Any
) -> AsyncIterator[tuple[OnlineService, OnlineLearner]]:
    """Serve a model that adds up what it learns, twice over: both sums are equal in any version."""
    with strategy.scope():
        sums = [ar.Variable(0.0, name=name, aggregation="sum") for name in ("one", "two")]
        optimizer = ar.optimizers.SGD(1.0)

    gate = options.pop("gate", None)

    async def step(_ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
        if gate is not None:
            await gate.wait()
        if np.any(batch["input"][:, 0] < 0):
            raise ValueError("<b>negative</b>")
        part = -float(batch["input"].sum())
        await optimizer.apply_gradients([(ar.Weighted(part, 1), each) for each in sums])
        return {"loss": math.nan if part < -1e6 else part}

    def predict(snapshot: Any, inputs: Any) -> dict[str, Any]:
        return {each.name: np.full(len(inputs), snapshot[each]) for each in sums}

    predict = options.pop("predict", predict)
    learner = OnlineLearner(
        strategy,
        step,
        {"sums": sums, "optimizer": optimizer},
        max_batch=8,
        max_delay_s=0.0,
        queue_size=queue_size,
        journal=journal,
        publish_to=options.pop("publish_to", None),
        max_failures_in_a_row=options.pop("max_failures_in_a_row", 5),
    )
    service = OnlineService(
        learner, predict, input_like=np.zeros(2), target_like=0, event_interval_s=0.01, **options
    )
    with prometheus.export(strategy, registry=service.registry, name="online"):
        async with service.lifespan():
            yield service, learner


@pytest_asyncio.fixture
async def served(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> AsyncIterator[tuple[OnlineService, OnlineLearner]]:
    async with serving(pair, journal=tmp_path / "journal") as found:
        yield found


def example(number: float = 1.0) -> dict[str, Any]:
    return {"input": [number, 0.0], "target": 0}


async def until_learned(learner: OnlineLearner) -> None:
    def is_done() -> bool:
        now = learner.statistics()
        return now.learned_number == now.last_number

    await until(is_done)


# ---- learning and predicting ---------------------------------------------------------------


@pytest.mark.asyncio
async def test_predictions_use_the_learned_version_and_name_it(served: Any) -> None:
    service, learner = served
    before = (await post(service, "/predict", {"input": [0, 0]})).json()

    one = await post(service, "/learn", example(2.0))
    many = await post(service, "/learn", {"examples": [example(3.0), example(4.0)]})
    await until_learned(learner)
    after = (await post(service, "/predict", {"inputs": [[0, 0]] * 2})).json()

    assert before["prediction"] == {"one": 0.0, "two": 0.0}
    assert (one.status, one.json()) == (202, {"number": 1, "is_duplicate": False})
    assert (many.status, many.json()) == (202, {"numbers": [2, 3], "is_duplicate": False})
    assert after["predictions"]["one"] == pytest.approx([4.5, 4.5])
    assert after["version"] == learner.version > before["version"]


@pytest.mark.asyncio
async def test_every_prediction_is_from_one_version(served: Any) -> None:
    service, learner = served
    seen: list[tuple[int, float]] = []

    async def predict() -> None:
        while learner.statistics().num_learned < 200:
            found = (await post(service, "/predict", {"inputs": [[0, 0]] * 3})).json()
            sums = {*found["predictions"]["one"], *found["predictions"]["two"]}
            assert len(sums) == 1
            seen.append((found["version"], sums.pop()))

    async def learn() -> None:
        async def is_taken() -> bool:
            return (await post(service, "/learn", {"examples": [example()] * 4})).status == 202

        for _ in range(50):
            await until(is_taken)

    await asyncio.gather(predict(), predict(), learn())

    assert seen[::2] == sorted(seen[::2]) or len(set(seen)) > 1
    of_version = dict(seen)
    assert all(of_version[version] == total for version, total in seen)
    assert len(of_version) > 3


@pytest.mark.asyncio
async def test_a_key_is_taken_once_and_with_another_body_refused(served: Any) -> None:
    service, learner = served
    first = await post(service, "/learn", example(5.0), idempotency_key="k1")
    again = await post(service, "/learn", example(5.0), idempotency_key="k1")
    other = await post(service, "/learn", example(6.0), idempotency_key="k1")
    long = await post(service, "/learn", example(6.0), idempotency_key="k" * 201)
    await until_learned(learner)

    assert first.json() == {"number": 1, "is_duplicate": False}
    assert (again.status, again.json()) == (202, {"number": 1, "is_duplicate": True})
    assert other.status == 409
    assert "k1" in other.json()["error"]
    assert long.status == 422
    assert learner.statistics().num_learned == 1


@pytest.mark.asyncio
async def test_a_client_of_the_release_before_is_told_what_that_took(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    many = {"examples": [example(2.0), example(3.0)]}
    async with serving(pair, journal=tmp_path / "journal") as (service, _):
        await post(service, "/learn", example(1.0), idempotency_key="one")
        await post(service, "/learn", many, idempotency_key="many")

    async def step(_ctx: ar.ReplicaContext, batch: Any) -> None:
        assert batch["input"].shape[1] == 3

    learner = OnlineLearner(
        pair, step, {"sum": ar.Variable(0.0)}, max_batch=8, max_delay_s=0.0, queue_size=64,
        journal=tmp_path / "journal", spec_version=2,
        migrate={1: Migration(lambda row: {**row, "input": np.append(row["input"], 0.0)})},
    )  # fmt: skip
    newer = OnlineService(learner, lambda _, x: x, input_like=np.zeros(3), target_like=0)
    async with newer.lifespan():
        one = await post(newer, "/learn", example(1.0), idempotency_key="one")
        assert (one.status, one.json()) == (202, {"number": 1, "is_duplicate": True})
        found = await post(newer, "/learn", many, idempotency_key="many")
        assert (found.status, found.json()) == (202, {"numbers": [2, 3], "is_duplicate": True})
        for key in ({"idempotency_key": "new"}, {}):
            assert (await post(newer, "/learn", example(1.0), **key)).status == 422
        empty = await post(newer, "/learn", {"examples": []}, idempotency_key="one")
        assert empty.status == 422
        assert learner.statistics().last_number == 3


@pytest.mark.asyncio
async def test_a_full_queue_says_when_to_come_back(pair: ar.MirroredStrategy) -> None:
    async with serving(pair, queue_size=4) as (service, learner):
        await learner.pause()
        taken = await post(service, "/learn", {"examples": [example()] * 4})
        full = await post(service, "/learn", example())
        never = await post(service, "/learn", {"examples": [example()] * 5})
        predicted = await post(service, "/predict", {"input": [0, 0]})
        learner.resume()
        await until_learned(learner)
        later = await post(service, "/learn", example())

    assert [taken.status, full.status, never.status, predicted.status] == [202, 429, 413, 200]
    assert int(full.headers["retry-after"]) >= 1
    assert "4 of 4" in full.json()["error"]
    assert later.status == 202


@pytest.mark.asyncio
async def test_dead_letters_are_listed_as_json_and_not_as_markup(served: Any) -> None:
    service, learner = served
    await post(service, "/learn", {"examples": [example(), example(-1.0), example()]})
    await until_learned(learner)
    answer = await ask(service, "GET", "/dead-letters")

    [letter] = answer.json()["dead_letters"]
    assert (letter["number"], letter["example"]) == (2, {"input": [-1.0, 0.0], "target": 0})
    assert "<b>negative</b>" in letter["error"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert learner.statistics().num_learned == 2


@pytest.mark.asyncio
async def test_an_input_that_predict_fails_for_is_answered_as_json(
    pair: ar.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def predict(_snapshot: Any, inputs: Any) -> Any:
        if (inputs > 1e6).any():
            raise ZeroDivisionError("secret <b>text</b>")
        return inputs[:, 0]

    async with serving(pair, predict=predict) as (service, _):
        good = await post(service, "/predict", {"input": [1.0, 0.0]})
        bad = await post(service, "/predict", {"input": [1e9, 0.0]})
        metrics = (await ask(service, "GET", "/metrics")).body.decode()

    assert good.json()["prediction"] == 1.0
    assert (bad.status, bad.headers["content-type"]) == (500, "application/json")
    assert "ZeroDivisionError" in bad.json()["error"]
    assert b"secret" not in bad.body
    assert 'requests_total{route="/predict",status="500"} 1.0' in metrics
    [record] = caplog.records
    assert record.name == "aioreplica.integrations.asgi"
    assert "secret" in (record.exc_text or "")


@pytest.mark.asyncio
async def test_validate_stands_before_predictions_and_examples(pair: ar.MirroredStrategy) -> None:
    def validate(found: Any) -> Any:
        if found[0] > 100:
            raise ValueError(f"the first number is at most 100, got {found[0]:g}")
        return found.clip(0, None)

    def predict(_snapshot: Any, inputs: Any) -> Any:
        return inputs[:, 0]

    async with serving(pair, predict=predict, validate=validate) as (service, learner):
        clipped = await post(service, "/predict", {"inputs": [[3.0, 0.0], [-5.0, 0.0]]})
        refused = await post(service, "/predict", {"inputs": [[3.0, 0.0], [500.0, 0.0]]})
        not_learned = await post(service, "/learn", example(500.0))
        learned = await post(service, "/learn", example(-1.0))  # is 0 when it is learned
        await until_learned(learner)
        assert learner.statistics().num_dead == 0

    assert clipped.json()["predictions"] == [3.0, 0.0]
    assert (refused.status, not_learned.status, learned.status) == (422, 422, 202)
    [reason] = refused.json()["reasons"]
    assert reason == {"where": "inputs[1]", "what": "the first number is at most 100, got 500"}


@pytest.mark.asyncio
async def test_dead_letters_have_pages_from_both_ends(pair: ar.MirroredStrategy) -> None:
    async with serving(pair, max_failures_in_a_row=None) as (service, learner):
        await post(service, "/learn", {"examples": [example(-i - 1.0) for i in range(7)]})
        await until_learned(learner)

        async def pages(query: str) -> list[list[int]]:
            found = []
            while query:
                answer = (await ask(service, "GET", f"/dead-letters?{query}")).json()
                found.append([letter["number"] for letter in answer["dead_letters"]])
                query = answer["next"]
            return found

        first = (await ask(service, "GET", "/dead-letters")).json()
        up, down = await pages("limit=3"), await pages("limit=3&before=99")
        refused = [
            (await ask(service, "GET", f"/dead-letters?{query}")).status
            for query in ("limit=x", "after=-1", "page=2", "after=1&after=2", "after=" + "9" * 19)
        ]

    assert (len(first["dead_letters"]), first["next"]) == (7, None)
    assert up == [[1, 2, 3], [4, 5, 6], [7]]
    assert down == [[5, 6, 7], [2, 3, 4], [1]]
    assert refused == [422] * 5


@pytest.mark.asyncio
async def test_services_in_one_registry_are_told_apart_by_their_names(tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    services = []
    for number, name in enumerate(("ctr", "cvr"), 1):
        publish_snapshot(tmp_path / name, number, {"w": np.ones(2)})
        reader = SnapshotReader(tmp_path / name)
        services.append(
            OnlineService(
                reader, lambda _s, x: x, input_like=np.zeros(2), registry=registry, model=name
            )
        )
    for service in services:
        await post(service, "/predict", {"input": [0, 0]})
    metrics = (await ask(services[0], "GET", "/metrics")).body.decode()
    for refused in ("ctr", None):
        with pytest.raises(ValueError, match="another service already: 'ctr', 'cvr'"):
            OnlineService(reader, lambda _s, x: x, input_like=0.0, registry=registry, model=refused)

    for line in (
        'aioreplica_online_version{model="ctr"} 1.0',
        'aioreplica_online_version{model="cvr"} 2.0',
        'aioreplica_online_requests_total{model="cvr",route="/predict",status="200"} 1.0',
        'aioreplica_online_predict_seconds_count{model="ctr"} 1.0',
    ):
        assert line in metrics


@pytest.mark.asyncio
async def test_while_it_catches_up_it_lives_and_is_not_ready(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    async with serving(pair, journal=tmp_path / "journal") as (service, learner):
        await learner.pause()
        await post(service, "/learn", example(2.0))
        for name in ("journal", "journal-wal"):
            shutil.copy(tmp_path / name, tmp_path / name.replace("journal", "copy"))
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as other,
        serving(other, journal=tmp_path / "copy", gate=gate) as (service, learner),
    ):
        alive = await ask(service, "GET", "/healthz")
        catching_up = await ask(service, "GET", "/readyz")
        predicted = await post(service, "/predict", {"input": [0, 0]})
        gate.set()
        await until(lambda: learner.is_ready)

    assert (alive.status, catching_up.status, predicted.status) == (200, 503, 200)
    assert catching_up.json() == {"status": "recovering"}


# ---- refusals ------------------------------------------------------------------------------

REFUSED = {
    "no json": (b"{", {}, 422, "not JSON"),
    "nan": (b'{"input": [NaN, 0], "target": 0}', {}, 422, "not JSON"),
    "infinite": (b'{"input": [1e999, 0], "target": 0}', {}, 422, "nothing was taken"),
    "too few": (b'{"input": [1], "target": 0}', {}, 422, "nothing was taken"),
    "ragged": (b'{"input": [[1], [2, 3]], "target": 0}', {}, 422, "nothing was taken"),
    "text": (b'{"input": ["1", "2"], "target": 0}', {}, 422, "nothing was taken"),
    "null": (b'{"input": null, "target": 0}', {}, 422, "nothing was taken"),
    "no target": (b'{"input": [1, 2]}', {}, 422, "nothing was taken"),
    "more": (b'{"input": [1, 2], "target": 0, "x": 1}', {}, 422, "nothing was taken"),
    "half a target": (b'{"input": [1, 2], "target": 0.5}', {}, 422, "nothing was taken"),
    "no list": (b'{"examples": 3}', {}, 422, "list"),
    "empty": (b'{"examples": []}', {}, 422, "list"),
    "a list": (b"[]", {}, 422, "not what is needed"),
    "deep": (b"[" * 50 + b"]" * 50, {}, 422, "deeper than 16"),
    "huge": (b" " * 2000, {}, 413, "at most 1000 bytes"),
    "said to be huge": (b"{}", {"content-length": "999999999999999999999"}, 413, "at most"),
    "too many": (json.dumps({"examples": [example()] * 9}).encode(), {}, 413, "at most 8"),
    "a form": (b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415, "JSON"),
    "text/plain": (b"{}", {"content-type": "text/plain"}, 415, "JSON"),
    "other site": (b"{}", {"origin": "http://example.com"}, 403, "other sites"),
    "other name": (b"{}", {"host": "example.com"}, 400, "example.com"),
}


@pytest.mark.asyncio
async def test_bad_requests_are_answered_with_reasons_and_change_nothing(
    pair: ar.MirroredStrategy,
) -> None:
    limits = Limits(body_bytes=1000, examples=8)
    answers: dict[str, Answer] = {}
    async with serving(pair, limits=limits) as (service, learner):
        for name, (body, headers, _, _) in REFUSED.items():
            half = len(body) // 2
            answers[name] = await ask(
                service, "POST", "/learn", body[:half], body[half:], **headers
            )
        method = await ask(service, "GET", "/learn")
        nowhere = await ask(service, "GET", "/learn/x")
        statistics = learner.statistics()

    for name, (_, _, status, words) in REFUSED.items():
        assert answers[name].status == status, (name, answers[name])
        assert words in answers[name].json()["error"], (name, answers[name])
    assert answers["too few"].json()["reasons"][0]["where"] == ""
    assert answers["huge"].headers["connection"] == "close"
    assert (method.status, method.headers["allow"]) == (405, "POST")
    assert nowhere.status == 404
    assert statistics.num_taken == statistics.num_learned == 0


@pytest.mark.asyncio
async def test_a_body_that_does_not_come_is_not_waited_for(pair: ar.MirroredStrategy) -> None:
    async with serving(pair, limits=Limits(body_s=0.01)) as (service, _):
        answer = await ask(service, "POST", "/learn", b"{", stalls=True)

    assert (answer.status, answer.headers["connection"]) == (408, "close")


@pytest.mark.asyncio
async def test_a_client_that_goes_before_its_body_ends_takes_nothing(served: Any) -> None:
    service, learner = served
    whole = json.dumps(example()).encode()

    gone = await asyncio.gather(
        *(ask(service, "POST", "/learn", whole[:cut], goes=True) for cut in range(len(whole)))
    )

    assert {answer.status for answer in gone} == {0}
    assert learner.statistics().num_taken == 0


@pytest.mark.asyncio
async def test_the_token_covers_everything_but_probes(pair: ar.MirroredStrategy) -> None:
    async with serving(pair, token="secret") as (service, _):
        without = [await ask(service, route.method, route.path) for route in service.routes]
        paths = [route.path for route in service.routes]
        wrong = await ask(service, "GET", "/snapshot", authorization="Bearer secreT")
        right = await ask(service, "GET", "/snapshot", authorization="bearer secret")

    open_paths = [path for path, answer in zip(paths, without, strict=True) if answer.status != 401]
    assert sorted(open_paths) == ["/healthz", "/readyz"]
    assert (wrong.status, right.status) == (401, 200)


def test_a_token_that_no_client_could_send_is_refused() -> None:
    learner: Any = None
    for token in ("", "é", "a\n"):
        with pytest.raises(ValueError, match="printable ASCII"):
            OnlineService(learner, lambda *_: None, input_like=0.0, token=token)


# ---- telling -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_readiness_and_metrics_tell_where_the_learner_stands(served: Any) -> None:
    service, learner = served
    await post(service, "/learn", {"examples": [example()] * 3})
    await until_learned(learner)
    ready = await ask(service, "GET", "/readyz", host="10.0.0.1:8000")
    await post(service, "/predict", {"input": [0, 0]})
    metrics = (await ask(service, "GET", "/metrics")).body.decode()
    snapshot = (await ask(service, "GET", "/snapshot")).json()
    service.close()
    closing = await ask(service, "GET", "/readyz")
    alive = await ask(service, "GET", "/healthz")

    assert ready.status == alive.status == 200
    assert (closing.status, closing.json()) == (503, {"status": "closing"})
    assert snapshot["version"] == learner.version
    assert snapshot["age_s"] >= 0
    for line in (
        "aioreplica_online_taken_total 3.0",
        "aioreplica_online_learned_total 3.0",
        "aioreplica_online_journal_failing 0.0",
        'aioreplica_online_requests_total{route="/predict",status="200"} 1.0',
        "aioreplica_online_predict_seconds_count 1.0",
        'aioreplica_replicas{kind="MirroredStrategy",strategy="online"} 2.0',
    ):
        assert line in metrics


class Follower:
    """A client of /events; `stops_reading` leaves every event unaccepted."""

    def __init__(self, *, stops_reading: bool = False) -> None:
        self.body = b""
        self.gone = asyncio.Event()
        self.status = 0
        self.stops_reading = stops_reading

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if self.stops_reading and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        self.body += message.get("body", b"")

    async def follow(self, service: Any) -> None:
        await service(scope_of("GET", "/events", {}), self.receive, self.send)


def num_told(follower: Follower) -> int:
    """Count the examples of the steps that a client has been told of."""
    return sum(
        step["num_examples"] for state in events_of(follower.body) for step in state["steps"]
    )


@pytest.mark.asyncio
async def test_followers_see_changes_and_go_when_they_or_the_service_want(served: Any) -> None:
    service, learner = served
    staying, going = Follower(), Follower()
    following = [asyncio.create_task(each.follow(service)) for each in (staying, going)]
    await until(lambda: staying.body and going.body)
    going.gone.set()
    await following[1]
    await post(service, "/learn", {"examples": [example()] * 3})
    await until(lambda: b'"num_learned": 3' in staying.body)
    await post(service, "/learn", example(1e7))
    await until(lambda: b'"num_learned": 4' in staying.body and num_told(staying) == 4)
    service.close()
    await following[0]

    states = events_of(staying.body)
    assert states[0]["statistics"]["num_learned"] == 0
    assert states[-1]["version"] == learner.version
    steps = [step for state in states for step in state["steps"]]
    assert steps[-1]["scalars"]["loss"] is None  # it was not finite
    assert [replica["replica_id"] for replica in steps[0]["replicas"]] == [0, 1]
    assert len(events_of(going.body)) == 1


@pytest.mark.asyncio
async def test_a_step_that_is_recorded_after_it_was_counted_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch, served: Any
) -> None:
    service, _ = served
    recorded = asyncio.Event()
    keep = _events.Events._keep

    async def keep_late(self: Any, records: Any) -> None:
        await recorded.wait()
        await keep(self, records)

    monkeypatch.setattr(_events.Events, "_keep", keep_late)
    follower = Follower()
    following = asyncio.create_task(follower.follow(service))
    await until(lambda: follower.body)
    await post(service, "/learn", example())
    await until(lambda: b'"num_learned": 1' in follower.body)
    assert num_told(follower) == 0
    recorded.set()
    await until(lambda: num_told(follower) == 1)  # though nothing else has changed
    service.close()
    await following


@pytest.mark.asyncio
async def test_the_end_of_the_lifespan_ends_followers_and_readiness(
    pair: ar.MirroredStrategy,
) -> None:
    follower = Follower()
    async with serving(pair) as (service, _):
        following = asyncio.create_task(follower.follow(service))
        await until(lambda: follower.body)
        assert (await ask(service, "GET", "/readyz")).json() == {"status": "ok"}
    async with asyncio.timeout(60):
        await following
    assert (await ask(service, "GET", "/readyz")).json() == {"status": "closing"}


@pytest.mark.asyncio
async def test_followers_are_few_and_one_that_does_not_read_is_dropped(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.integrations._events.HEARTBEAT_S", 0.02)
    async with serving(pair, limits=Limits(streams=1, send_s=0.05)) as (service, _):
        deaf = Follower(stops_reading=True)
        following = asyncio.create_task(deaf.follow(service))
        await until(lambda: deaf.status)
        refused = await ask(service, "GET", "/events")
        await following
        third = Follower()
        following = asyncio.create_task(third.follow(service))
        await until(lambda: b": still there" in third.body)
        service.close()
        await following

    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert third.status == 200


@pytest.mark.asyncio
async def test_a_reader_of_another_learner_only_predicts(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    def predict(snapshot: Any, inputs: Any) -> Any:
        return np.full(len(inputs), len(snapshot))

    reading = OnlineService(
        SnapshotReader(tmp_path / "model"), predict, input_like=np.zeros(2), target_like=0
    )
    async with reading.lifespan():
        early = await post(reading, "/predict", {"input": [0, 0]})
        unready = await ask(reading, "GET", "/readyz")
        unheard = await ask(reading, "GET", "/events")
        async with serving(pair, publish_to=tmp_path / "model") as (service, learner):
            await post(service, "/learn", example())
            await until_learned(learner)

            async def is_ready() -> bool:
                return (await ask(reading, "GET", "/readyz")).status == 200

            await until(is_ready)
            predicted = await post(reading, "/predict", {"input": [0, 0]})
            learned = await post(reading, "/learn", example())

    assert [early.status, unready.status, unheard.status] == [503] * 3
    assert (predicted.status, learned.status) == (200, 404)


@pytest.mark.asyncio
async def test_a_reader_goes_on_when_its_file_is_damaged_or_gone_and_says_how_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    publish_snapshot(path, 7, {"w": np.ones(2)})
    reader = SnapshotReader(path, max_age_s=1000.0)
    service = OnlineService(reader, lambda s, x: x @ s["w"], input_like=np.zeros(2))
    async with service.lifespan():
        fresh = await ask(service, "GET", "/readyz")
        (tmp_path / "bad").write_bytes(b"bad")
        (tmp_path / "bad").replace(path)
        damaged = await everything(service)
        path.unlink()
        missing = await everything(service)
        monkeypatch.setattr("aioreplica.online._published.time", lambda: time.time() + 5000.0)
        old = await everything(service)

    assert (fresh.status, fresh.json()["status"]) == (200, "ok")
    for answers, why, status in (
        (damaged, "damaged by a crash", 200),
        (missing, "No such file", 200),
        (old, "No such file", 503),
    ):
        ready, predicted, snapshot, metrics = answers
        assert (ready.status, predicted.status, snapshot.status) == (status, 200, 200)
        assert why in ready.json()["error"]
        assert predicted.json() == {"version": 7, "prediction": 2.0}
        found = snapshot.json()
        assert (found["version"], found["error"]) == (7, ready.json()["error"])
        assert 0 <= found["publisher_age_s"] <= found["age_s"] + 60
        assert b"aioreplica_online_version 7.0" in metrics.body
        assert b"aioreplica_online_reading_failing 1.0" in metrics.body
        assert b"aioreplica_online_version_age_seconds" in metrics.body
    assert "its publisher is silent for 5" in old[0].json()["status"]


async def everything(service: OnlineService) -> tuple[Answer, ...]:
    return (
        await ask(service, "GET", "/readyz"),
        await post(service, "/predict", {"input": [1, 1]}),
        await ask(service, "GET", "/snapshot"),
        await ask(service, "GET", "/metrics"),
    )


def test_a_service_runs_again_on_another_loop(tmp_path: Path) -> None:
    """As the tests of an application do, which enter its lifespan once for each."""
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
    made: list[tuple[OnlineService, OnlineLearner]] = []

    async def first() -> None:
        async with serving(strategy, journal=tmp_path / "journal") as found:
            made.append(found)
            await use(found[0], 1)

    async def again() -> None:
        async with made[0][0].lifespan():
            await use(made[0][0], 2)
        await strategy.aclose()

    async def use(service: OnlineService, number: int) -> None:
        assert (await ask(service, "GET", "/readyz")).status == 200
        assert (await post(service, "/learn", example())).json()["number"] == number
        await until_learned(made[0][1])
        is_following = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def send_and_tell(message: Any) -> None:
                await send(message)
                is_following.set()

            await service(scope, receive, send_and_tell)

        follower = asyncio.create_task(ask(app, "GET", "/events", stalls=True))
        await is_following.wait()
        assert not follower.done()
        service.close()
        events = events_of((await follower).body)
        assert events[-1]["statistics"]["learned_number"] == number

    asyncio.run(first())
    asyncio.run(again())
    assert made[0][1].version == 2


@pytest.mark.asyncio
async def test_without_its_lifespan_a_service_answers_503(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        weight = ar.Variable(0.0)
    learner = OnlineLearner(pair, print, {"w": weight}, max_batch=1, max_delay_s=0.0, queue_size=1)
    service = OnlineService(learner, lambda _s, x: x, input_like=np.zeros(2))
    ready = await ask(service, "GET", "/readyz")
    metrics = await ask(service, "GET", "/metrics")
    answers = [
        await post(service, "/learn", {"input": [0, 0]}),
        await post(service, "/predict", {"input": [0, 0]}),
        await ask(service, "GET", "/events"),
        await ask(service, "GET", "/dead-letters"),
    ]
    assert ready.status == 503
    assert "lifespan" in ready.json()["status"]
    assert metrics.status == 200
    assert [answer.status for answer in answers] == [503] * 4


def test_hosts_are_names_in_any_case_and_not_one_text(pair: ar.MirroredStrategy) -> None:
    with pytest.raises(TypeError, match=r"got one text: 'example\.org'"):
        OnlineService(SnapshotReader("x"), print, input_like=0.0, hosts="example.org")

    async def main() -> int:
        service = OnlineService(SnapshotReader("x"), print, input_like=0.0, hosts=["Example.org"])
        return (await ask(service, "GET", "/snapshot", host="eXample.org")).status

    assert asyncio.run(main()) == 503  # nothing is published, and not 400
