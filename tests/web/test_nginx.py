"""The recipe of docs/online_service.md in a real nginx, before the example and its workers.

Needs `nginx`, and `pip install trustme`; left out where they are not there.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .test_example import INPUTS, ROOT, serving

trustme = pytest.importorskip("trustme")

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

NAME = "model.example"
LIMIT_S = 300.0
TOKENS = {"ONLINE_LEARNING_TOKEN": "client", "ONLINE_LEARNING_OPERATOR_TOKEN": "operator"}
MAX_BODY = 64 * 1024
AROUND = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {{}}
http {{
access_log off;
client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
uwsgi_temp_path uwsgi; scgi_temp_path scgi;
{recipe}
}}
"""


@contextmanager
def predicting(data: Path) -> Iterator[str]:
    """Run prediction workers as the page says; gives the port."""
    app = "examples.online_learning.predicting:make_app"
    command = ["uvicorn", "--factory", app, "--workers", "2", "--port", "0", "--no-access-log"]
    found = {"ONLINE_LEARNING_MODEL": str(data / "model"), "ONLINE_LEARNING_HOSTS": NAME, **TOKENS}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **found},
    ) as process:
        try:
            assert process.stdout is not None
            limit, said = time.monotonic() + LIMIT_S, b""
            while (at := re.search(rb"running on http://127.0.0.1:(\d+)", said)) is None:
                left_s = max(0.0, limit - time.monotonic())
                assert select.select([process.stdout], [], [], left_s)[0], said
                said += (more := os.read(process.stdout.fileno(), 4096))
                assert more, said
            yield at[1].decode()
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def proxying(folder: Path, learner: str, workers: str) -> Iterator[httpx.Client]:
    """Run nginx with the recipe, on a socket in the folder; gives a client that trusts it."""
    page = (ROOT / "docs/online_service.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```nginx\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    authority = trustme.CA()
    certificate = authority.issue_cert(NAME)
    certificate.private_key_pem.write_to_path(folder / "key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(folder / "pem", append=True)
    own = {
        "listen 443 ssl;": f"listen unix:{folder}/socket ssl;",
        "127.0.0.1:8000;": f"127.0.0.1:{learner};",
        "127.0.0.1:8001;": f"127.0.0.1:{workers};",
        f"/etc/ssl/{NAME}.pem;": f"{folder}/pem;",
        f"/etc/ssl/{NAME}.key;": f"{folder}/key;",
    }
    for theirs, ours in own.items():
        assert recipe.count(theirs) == 1, theirs
        recipe = recipe.replace(theirs, ours)
    (folder / "nginx.conf").write_text(AROUND.format(recipe=recipe), encoding="utf-8")
    command = [NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", "stderr"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    transport = httpx.HTTPTransport(verify=trusted, uds=f"{folder}/socket")
    with subprocess.Popen(command) as process:
        try:
            limit = time.monotonic() + LIMIT_S
            while not is_listening(folder / "socket"):
                assert process.poll() is None
                assert time.monotonic() < limit
            with httpx.Client(
                base_url=f"https://{NAME}",
                transport=transport,
                headers={"authorization": "Bearer client"},
                timeout=60,
            ) as client:
                yield client
        finally:
            process.terminate()
            process.wait(60)


def is_listening(at: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(at)) == 0


def learn(client: httpx.Client, **headers: str) -> int:
    body = {"examples": [{"input": each, "target": 1} for each in INPUTS]}
    return client.post("/learn", json=body, headers=headers).status_code


def states(events: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in events.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["statistics"]


def test_the_recipe_serves_the_learner_and_its_workers(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--name", NAME, **TOKENS) as (process, url),
        predicting(tmp_path) as workers,
        proxying(tmp_path, url.rpartition(":")[2], workers) as client,
    ):
        # What is learned is seen in a stream that does not end, as it comes.
        with client.stream("GET", "/events") as events:
            seen = states(events)
            before = next(seen)
            learned = learn(client)
            assert any(each["learned_number"] == len(INPUTS) for each in seen)
        assert before["learned_number"] == 0
        assert learned == 202

        # Workers predict, the learner does not.
        predicted = client.post("/predict", json={"inputs": INPUTS})
        counted = client.get("/metrics").text
        assert predicted.status_code == 200
        assert 'requests_total{route="/learn",status="202"} 1.0' in counted
        assert 'route="/predict"' not in counted

        # Tokens, names and origins come through; a browser names a port that is not 443.
        for path in ("/learn", "/predict"):
            bare = client.post(path, json={}, headers={"authorization": ""})
            assert (bare.status_code, bare.headers["www-authenticate"]) == (401, "Bearer")
            other = client.post(path, json={}, headers={"host": "evil.example"})
            assert "is not 'evil.example'" in other.json()["error"]
        for token, status in ("client", 401), ("operator", 200):
            for path in ("/pause", "/resume"):
                given = {"authorization": f"Bearer {token}"}
                assert client.post(path, json={}, headers=given).status_code == status
        for host in (NAME, f"{NAME}:8443"):
            assert learn(client, origin=f"https://{host}", host=host) == 202
        assert learn(client, origin="https://other.example") == 403

        # Bodies up to the service's limit.
        body, kind = json.dumps({"inputs": INPUTS}), {"content-type": "application/json"}
        for size, status in (MAX_BODY, 200), (MAX_BODY + 1, 413):
            large = client.post("/predict", content=body.ljust(size), headers=kind)
            assert large.status_code == status

        # Without the learner predictions go on.
        process.kill()
        process.wait(60)
        assert learn(client) == 502
        assert client.post("/predict", json={"inputs": INPUTS}).status_code == 200
