"""Operations over HTTP: who may ask, what is done, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from aioreplica.errors import JournalError
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online._journal_file import JournalFile
from tests.online.program import RAISES, Counting, example
from tests.online.test_models import models
from tests.online.test_sources import Listed

from .asking import Answer, ask, post, until

prometheus_client = pytest.importorskip("prometheus_client")

BEARER = {"authorization": "Bearer operators"}
CLIENT = {"authorization": "Bearer clients"}


@pytest_asyncio.fixture
async def operated(tmp_path: Path) -> AsyncIterator[tuple[OnlineService, Counting]]:
    async with Counting(tmp_path, max_batch=1, queue_size=3) as program:
        yield served(program), program


def served(program: Counting, **options: Any) -> OnlineService:
    tokens = {"token": "clients", "operator_token": "operators", **options}
    return OnlineService(program.learner, lambda _, x: x, input_like=np.zeros(1), **tokens)


async def operate(service: OnlineService, path: str, body: Any = None, **headers: str) -> Answer:
    return await post(service, path, {} if body is None else body, **(headers or BEARER))


async def learn(program: Counting, *numbers: int) -> None:
    for i in numbers:
        await (await program.learner.submit(example(i)))


@pytest.mark.asyncio
async def test_a_bad_example_is_rolled_back_over_http(operated: Any) -> None:
    service, program = operated
    await learn(program, 0)
    assert (await operate(service, "/checkpoint")).json()["number"] == 1
    await learn(program, 1, 2)
    seen = program.learner.version

    answer = await operate(service, "/rollback", {"to": 1, "skip": [2]})
    assert (answer.status, answer.json()["number"], answer.json()["generation"]) == (200, 1, 1)
    await until(lambda: program.learner.is_ready)
    assert program.learned() == [1, 0, 1]
    assert program.learner.version > seen

    found = (await operate(service, "/retry", {"numbers": [2, 7]})).json()
    assert (found["numbers"], found["missing"]) == ({"2": 4}, [7])
    assert (found["state"], found["generation"]) == ("running", 1)
    await (await program.learner.ticket(4))  # the variables are those of one version then
    assert program.learned() == [1, 1, 1]
    metrics = (await ask(service, "GET", "/metrics", authorization="Bearer clients")).body.decode()
    assert "aioreplica_online_rollbacks_to_checkpoints 1.0" in metrics
    assert "aioreplica_online_pinned 0.0" in metrics


@pytest.mark.asyncio
async def test_a_version_is_pinned_and_steps_paused_over_http(operated: Any) -> None:
    service, program = operated
    await learn(program, 0)
    assert (await operate(service, "/pin", {"version": 1})).json()["version"] == 1
    await learn(program, 1)
    found = (await operate(service, "/pause")).json()
    assert (found["state"], found["version"], found["newest_version"]) == ("paused", 1, 2)
    assert (await operate(service, "/unpin")).json()["version"] == 2
    assert (await operate(service, "/resume", {"set_aside": True})).json()["state"] == "running"


@pytest.mark.asyncio
async def test_dead_letters_are_discarded_or_wait_for_room(operated: Any) -> None:
    service, program = operated
    for i in range(2):
        ticket = await program.learner.submit(example(i, RAISES))
        await until(lambda ticket=ticket: ticket.is_done)
    assert (await operate(service, "/discard", {"numbers": [1, 9]})).json()["missing"] == [9]
    await program.learner.pause()
    for i in range(2, 5):
        await program.learner.submit(example(i))
    full = await operate(service, "/retry", {"numbers": [2]})
    assert (full.status, full.headers["retry-after"]) == (429, "5")
    assert [each.number for each in await program.learner.dead_letters()] == [2]


@pytest.mark.asyncio
async def test_a_retry_of_several_says_which_ones_were_taken_when_the_queue_is_full(
    operated: Any,
) -> None:
    service, program = operated
    for i in range(3):
        ticket = await program.learner.submit(example(i, RAISES))
        await until(lambda ticket=ticket: ticket.is_done)
    await program.learner.pause()
    for i in range(3, 5):
        await program.learner.submit(example(i))
    full = await operate(service, "/retry", {"numbers": [1, 9, 2, 3]})
    assert (full.status, full.headers["retry-after"]) == (429, "5")
    assert "The letters taken again: 1; not: 2, 3." in full.body.decode()
    assert [each.number for each in await program.learner.dead_letters()] == [2, 3]


@pytest.mark.asyncio
async def test_a_discard_of_several_says_how_far_it_came(
    operated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, program = operated
    for i in range(3):
        ticket = await program.learner.submit(example(i, RAISES))
        await until(lambda ticket=ticket: ticket.is_done)
    discard = JournalFile.discard

    def failing(self: JournalFile, number: int, *more: Any) -> bool:
        if number == 2:
            raise JournalError("The disk is full.")
        return discard(self, number, *more)

    monkeypatch.setattr(JournalFile, "discard", failing)
    answer = await operate(service, "/discard", {"numbers": [1, 2, 3]})
    assert answer.status == 503
    assert "The disk is full. The letters discarded: 1; not: 2, 3." in answer.body.decode()
    assert [each.number for each in await program.learner.dead_letters()] == [2, 3]


@pytest.mark.asyncio
async def test_operators_see_what_became_of_an_example(operated: Any) -> None:
    service, program = operated

    async def state_of(number: object) -> Any:
        return await ask(service, "GET", f"/example?number={number}", **BEARER)

    await learn(program, 0)
    bad = await program.learner.submit(example(1, RAISES))
    await until(lambda: bad.is_done)
    await program.learner.pause()
    await program.learner.submit(example(2))

    found = [(await state_of(number)).json() for number in (1, 2, 3)]
    assert found[0] == {"number": 1, "state": "learned", "version": 1}
    assert (found[1]["state"], "a bad mood" in found[1]["error"]) == ("dead", True)
    assert found[2] == {"number": 3, "state": "waiting"}

    await operate(service, "/resume")
    await operate(service, "/retry", {"numbers": [2]})
    again = await program.learner.ticket(2)  # follows number 4
    await until(lambda: again.is_done)
    await operate(service, "/discard", {"numbers": [4]})
    for number in (2, 4):
        found = (await state_of(number)).json()
        assert (found["state"], "discarded" in found["error"]) == ("dead", True)
    never = await state_of(5)
    assert (never.status, "the last one has 4" in never.json()["error"]) == (404, True)
    assert (await state_of(0)).status == 404
    assert [(await state_of(each)).status for each in ("-1", "x")] == [422, 422]
    assert (await ask(service, "GET", "/example", **BEARER)).status == 422
    assert (await ask(service, "GET", "/example?number=1")).status == 401


@pytest.mark.asyncio
async def test_without_a_journal_nobody_knows_examples_by_number() -> None:
    async with Counting(None, max_batch=1) as program:
        service = served(program)
        found = await ask(service, "GET", "/example?number=1", **BEARER)
        assert (found.status, "Pass journal=path" in found.json()["error"]) == (409, True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/rollback", {}, 422, "to is missing"),
        ("/rollback", {"to": 9}, 422, "no way back to 9"),
        ("/rollback", {"to": "1"}, 422, "to must be an int"),
        ("/rollback", {"to": 0, "skip": 3}, 422, "must be a list"),
        ("/rollback", {"to": 0, "skp": []}, 422, "skp; there are to, skip"),
        ("/pin", {"version": 9}, 422, "Version 9 cannot be pinned"),
        ("/pin", {"version": True}, 422, "version must be a number"),
        ("/pause", {"now": 1}, 422, "now; there are model"),
        ("/resume", {"set_aside": 1}, 422, "true or false"),
        ("/retry", {"numbers": []}, 422, "a list of 1 to 1000"),
        ("/discard", {"numbers": [1.5]}, 422, "a list of 1 to 1000"),
        ("/pause", [], 422, "The body is an object"),
    ],
)
async def test_wrong_requests_change_nothing(
    operated: Any, path: str, body: Any, status: int, said: str
) -> None:
    service, program = operated
    answer = await operate(service, path, body)
    assert (answer.status, program.learner.state) == (status, "running")
    assert said in answer.json()["error"]


@pytest.mark.asyncio
async def test_operations_need_the_token_of_operators(operated: Any) -> None:
    service, program = operated
    assert (await post(service, "/pause", {})).status == 401
    assert (await operate(service, "/pause", authorization="Bearer clients")).status == 401
    assert (await ask(service, "GET", "/pause", **BEARER)).status == 405
    assert (await operate(service, "/pause", origin="http://else", **BEARER)).status == 403
    assert program.learner.state == "running"
    closed = served(program, operator_token=None, model="second")
    assert (await operate(closed, "/pause")).status == 404
    for wrong, said in (("clients", "Give operators their own"), ("", "not empty")):
        with pytest.raises(ValueError, match=said):
            served(program, operator_token=wrong)


@pytest.mark.asyncio
async def test_a_learner_without_checkpoints_says_so() -> None:
    async with Counting() as program:
        answer = await operate(served(program), "/rollback", {"to": 0})
        assert answer.status == 409
        assert "a journal and checkpoints" in answer.json()["error"]


@pytest.mark.asyncio
async def test_a_broken_release_is_not_ready_makes_no_letters_and_is_resumed(operated: Any) -> None:
    service, program = operated
    learner, step = program.learner, program.step

    async def broken(ctx: Any, batch: Any) -> None:
        raise NameError("name 'learning_rat' is not defined")

    async with asyncio.timeout(60):
        await learn(program, 0)
        learner.step_fn = broken
        for i in range(1, 6):  # as many in a row as are the fault of the step
            await learner.submit(example(i))
        await until(lambda: learner.state == "failed")
        ready = await ask(service, "GET", "/readyz")
        assert ready.status == 503
        assert ready.json()["status"].startswith("failed: ")
        assert "learning_rat" in ready.json()["status"]
        await predicts(service)
        letters = await ask(service, "GET", "/dead-letters", **CLIENT)
        assert letters.json()["dead_letters"] == []
        assert (
            b"aioreplica_online_failed 1.0"
            in (await ask(service, "GET", "/metrics", **CLIENT)).body
        )
        learner.step_fn = step
        assert (await operate(service, "/resume")).status == 200
        await until(lambda: learner.statistics().learned_number == 6)
        assert program.learned() == [1] * 6
        assert (await ask(service, "GET", "/readyz")).json() == {"status": "ok"}


@pytest.mark.asyncio
async def test_a_step_that_hangs_is_not_ready_and_goes_on_when_resumed(
    tmp_path: Path,
) -> None:
    async def hangs(ctx: Any, batch: Any) -> None:
        await asyncio.Event().wait()

    options: Any = {"max_batch": 1, "queue_size": 2, "step_timeout_s": 0.05}
    async with asyncio.timeout(60), Counting(tmp_path, **options) as program:
        service, step = served(program), program.step
        program.learner.step_fn = hangs
        tickets = [await program.learner.submit(example(i)) for i in range(2)]
        await until(lambda: program.learner.state == "failed")
        ready = await ask(service, "GET", "/readyz")
        assert ready.status == 503
        assert "failed: " in ready.json()["status"]
        assert "0.05 s" in ready.json()["status"]
        await predicts(service)
        program.learner.step_fn = step
        while not tickets[-1].is_done:  # on a busy machine a good step may take longer, too
            if program.learner.state == "failed":
                assert (await operate(service, "/resume")).status == 200
            await until(lambda: tickets[-1].is_done or program.learner.state == "failed")
        assert (await ask(service, "GET", "/readyz")).json() == {"status": "ok"}


async def predicts(service: OnlineService) -> None:
    answer = await post(service, "/predict", {"input": [1.0]}, **CLIENT)
    assert (answer.status, answer.json()["prediction"]) == (200, [1.0])


@pytest.mark.asyncio
async def test_metrics_tell_of_sources(tmp_path: Path) -> None:
    source = Listed([example(0), ValueError("none"), example(1)])
    async with Counting(tmp_path, sources={"list": source}) as program:
        await until(lambda: program.learner.statistics().sources["list"].offset == "3")
        service = served(program, token=None, operator_token=None)
        metrics = (await ask(service, "GET", "/metrics")).body.decode()
        for line in ("source_taken_total 2.0", "source_refused_total 1.0", "source_failing 0.0"):
            assert f"aioreplica_online_{line}" in metrics
        [event] = [json.loads(json.dumps(service._state()))]
        assert event["statistics"]["sources"]["list"]["num_taken"] == 2


@pytest.mark.asyncio
async def test_another_model_is_promoted_over_http_and_asked_by_name(tmp_path: Path) -> None:
    async with models(tmp_path, queue_size=3) as found:
        first, second = found["main"], found["b"]
        service = served(first)
        await learn(first, 0, 1)
        await until(lambda: not second.learner.statistics().lag)
        assert (await operate(service, "/pause", {"model": "b"})).json()["model"] == "b"
        assert (first.learner.state, second.learner.state) == ("running", "paused")
        assert (await operate(service, "/resume", {"model": "b"})).json()["state"] == "running"
        for path in ("/retry", "/discard"):
            assert (await operate(service, path, {"numbers": [2**63]})).status == 422
        assert (await operate(service, "/rollback", {"to": 0, "skip": [2**63]})).status == 422
        for body, said in (({}, "model is missing"), ({"model": "c"}, "'main', 'b'")):
            refused = await operate(service, "/promote", body)
            assert (refused.status, said in refused.json()["error"]) == (422, True)
        assert (await operate(service, "/pause", {"model": "c"})).status == 422

        done = (await operate(service, "/promote", {"model": "b"})).json()
        assert (done["champion"], done["version"]) == ("b", done["first_version"])
        assert (done["model"], done["newest_version"]) == ("b", done["first_version"])
        bad = await first.learner.submit(example(2, RAISES))
        await until(lambda: bad.is_done)
        assert (await operate(service, "/checkpoint")).json()["model"] == "b"

        async def look(path: str) -> Answer:
            return await ask(service, "GET", path, authorization="Bearer clients")

        assert len((await look("/dead-letters")).json()["dead_letters"]) == 1
        paged = (await look("/dead-letters?model=main&limit=1")).json()
        assert paged["next"] == "after=3&limit=1&model=main"
        assert (await look("/dead-letters?model=c")).status == 404
        await first.learner.pause()
        assert (await look("/readyz")).status == 200
        text = (await look("/metrics")).body.decode()
        for line in (
            'model_served{model="b"} 1.0',
            'model_served{model="main"} 0.0',
            'model_learned_total{model="b"} 2.0',
            'model_dead_total{model="b"} 1.0',
            'model_lag{model="b"} 0.0',
            "taken_total 3.0",
            "learned_total 2.0",  # of the one that is served, as the following
            "dead_total 1.0",
            "learned_number 3.0",
            f"version {second.learner.version}.0",
        ):
            assert f"aioreplica_online_{line}" in text
        engine = second.learner._engine
        assert engine is not None
        engine.learning.failure = "out of order"
        answer = await look("/readyz")
        assert (answer.status, answer.json()["status"]) == (503, "failed: out of order")
        engine.learning.failure = ""
