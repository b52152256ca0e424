"""The example as a user starts it: a stream replayed, restarted, and read by other processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from aioreplica.checkpoint import EXIT_CODE
from aioreplica.integrations.asgi import OnlineService
from examples.online_learning import web
from examples.online_learning.__main__ import parse_options
from examples.online_learning.predicting import make_app
from examples.online_learning.progress import Progress
from tests.integrations.asking import ask as asked_here
from tests.online.program import Counting

ROOT = Path(__file__).resolve().parents[2]
INPUTS = [[0, 0, 0.5, 0.5, 1, 0.5, 0, 1, 0], [1, 0, 0, 0, 0, 0.5, 1, 1, 1]]


@contextmanager
def running(*command: str, **environment: str) -> Iterator[Any]:
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


@contextmanager
def serving(data: Path, *more: str, **environment: str) -> Iterator[tuple[Any, str]]:
    # Other tests may keep every core busy.
    options = ["--no-replay", "--no-background", "--data", str(data), *more]
    command = ["examples.online_learning", "--port", "0", *options]
    with running(*command, **environment) as process:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        yield process, line.partition(" at ")[2].partition(",")[0]


def ask(url: str, path: str, body: Any = None, **headers: str) -> Any:
    """Ask; a process that is starting is asked again for some minutes."""
    method = "GET" if body is None else "POST"
    with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=60) as client:
        return client.request(method, url + path, json=body, headers=headers)


def replayed(url: str) -> Any:
    command = ["examples.online_learning.replay", "--url", url, "--passes", "1", "--rate", "1e6"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=500,
    )
    return json.loads(done.stdout)


def test_a_stream_is_learned_about_as_well_as_river_does_and_kept(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        found = replayed(url)
        history = ask(url, "/history").json()
        page = ask(url, "/")
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    with serving(tmp_path) as (_, url):
        after = ask(url, "/predict", {"inputs": INPUTS}).json()
        metrics = ask(url, "/metrics").text

    assert found["seen"] == 1250
    assert found["accuracy_river"] == 0.8928  # the same at every run
    assert found["accuracy"] > 0.75  # how far learning is behind when it is asked depends
    assert history["points"][-1]["accuracy"] > 0.75
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert status == EXIT_CODE
    assert "aioreplica_online_learned_number 1250.0" in metrics
    assert "aioreplica_online_learned_total 0.0" in metrics  # nothing was learned again
    assert after["version"] > 0


def test_workers_predict_what_the_learner_publishes(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url):
        app = "examples.online_learning.predicting:make_app"
        port = url[-5:-1] + str(9 - int(url[-1]))
        command = ["uvicorn", "--factory", app, "--workers", "2", "--port", port]
        with running(*command, ONLINE_LEARNING_MODEL=str(tmp_path / "model")):
            other = url.replace(url[-5:], port)
            seen = {}
            for _ in range(30):
                examples = [{"input": each, "target": 1} for each in INPUTS]
                assert ask(url, "/learn", {"examples": examples}).status_code == 202
                for asked in (url, other, other):
                    answer = ask(asked, "/predict", {"inputs": INPUTS})
                    assert answer.status_code == 200, answer.text
                    found = answer.json()
                    known = seen.setdefault(found["version"], found["predictions"])
                    assert known == found["predictions"]
            learned = ask(other, "/learn", {"examples": examples})

    assert len(seen) > 5
    assert learned.status_code == 404


def test_a_service_that_is_killed_leaves_no_client_behind(tmp_path: Path) -> None:
    options = ["--no-background", "--data", str(tmp_path)]
    command = ["examples.online_learning", "--port", "0", *options]
    with running(*command) as process:
        assert "http://127.0.0.1:" in process.stdout.readline()
        watched = psutil.Process(process.pid)
        while not (children := watched.children()):
            assert process.poll() is None
        process.kill()
        _, left = psutil.wait_procs(children, timeout=60)

    assert left == []


def test_the_token_guards_all_but_the_page(tmp_path: Path) -> None:
    with serving(tmp_path, ONLINE_LEARNING_TOKEN="secret") as (_, url):
        paths = ("/", "/page.js", "/page.css", "/healthz", "/history", "/events", "/openapi.json")
        codes = [ask(url, path).status_code for path in paths]
        let_in = ask(url, "/history", authorization="Bearer secret").status_code
        report = ask(url, "/replay", {}, origin="http://example.com", authorization="Bearer secret")

        described = ask(url, "/openapi.json", authorization="Bearer secret").json()

    assert codes == [200, 200, 200, 200, 401, 401, 401]
    assert let_in == 200
    assert report.status_code == 403
    assert "/predict" in described["paths"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_hosts_are_let_in_with_a_token_or_if_someone_says_so(host: str) -> None:
    options = parse_options(["--host", host, "--no-token"])
    refused = subprocess.run(
        [sys.executable, "-m", "examples.online_learning", "--host", host, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "ONLINE_LEARNING_TOKEN": ""},
        timeout=120,
    )

    assert options.host == host
    assert refused.returncode == 2
    assert "Set ONLINE_LEARNING_TOKEN, or say --no-token" in refused.stderr


def test_workers_behind_a_proxy_know_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of the page: the proxy passes `Host` on unchanged."""
    monkeypatch.setenv("ONLINE_LEARNING_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("ONLINE_LEARNING_HOSTS", "model.example, other.example")
    app = make_app()
    statuses = []
    for name in ("model.example", "other.example", "127.0.0.1", "evil.example"):
        transport = httpx.ASGITransport(app)
        answer = asyncio.run(asked(transport, name))
        statuses.append(answer.status_code)

    assert statuses == [503, 503, 503, 400]  # nothing is published; the last is not known


async def asked(transport: httpx.ASGITransport, name: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{name}") as client:
        return await client.get("/snapshot")


@pytest.mark.parametrize("option", ["--port=70000", "--port=-1", "--rate=0", "--rate=nan"])
def test_numbers_that_cannot_be_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options([option])
    assert (end.value.code, "must be " in capsys.readouterr().err) == (2, True)


def test_reports_that_are_none_are_refused_and_those_who_go_are_no_errors(tmp_path: Path) -> None:
    program = Counting(tmp_path)
    service = OnlineService(program.learner, lambda _, x: x, input_like=np.zeros(1))
    app = web.make_app(service, program.learner, Progress())
    report = json.dumps(
        {"accuracy": 1, "accuracy_river": 1, "river": 1, "seen": 1, "began_at_version": 1}
    ).encode()

    async def statuses() -> list[int]:
        with_charset = "application/json; charset=utf-8"
        found = [
            await asked_here(app, "POST", "/replay", report, content_type=with_charset),
            await asked_here(app, "POST", "/replay", b"[" * 4000),
            await asked_here(app, "POST", "/replay", report, content_type="text/plain"),
            await asked_here(app, "POST", "/replay", b"{", goes=True),
        ]
        return [each.status for each in found]

    assert asyncio.run(statuses()) == [200, 422, 415, 499]
