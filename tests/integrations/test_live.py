"""The live view: what it draws, in the program and over the socket, and who may connect."""

import asyncio
import io
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.integrations import live
from aioreplica.integrations._status import read_status, status_of

pytest.importorskip("rich")

from rich.console import Console

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def step() -> None:
    await me().run_on_device(int)
    await me().barrier()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "aioreplica"


def draw(now: Any, before: Any = None) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(live.render(now, before))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


# --- what is drawn ----------------------------------------------------------------------------


async def test_replicas_devices_rates_and_waits_are_drawn(pair: ar.MirroredStrategy) -> None:
    seen: list[Any] = []
    named = {"train": pair}

    async def look() -> None:
        if me().replica_id_in_sync_group == 1:
            await asyncio.sleep(0)
            seen.append(status_of(named))
        await me().barrier()

    await pair.run(step)
    before = status_of(named)
    await pair.run(step)
    await pair.run(look)
    now = json.loads(json.dumps(seen[0]))
    now["time_s"] = before["time_s"] + 0.5

    text = draw(now, before)

    assert "train  open  step 3  4.0 steps/s  1 running" in text
    assert f"replica 0 waits for 1: barrier #1 at {__file__}" in text.replace("\n", "")
    for device in pair._runtime.device_names:
        assert device in text
    assert "of 2" in text
    assert "2.0" in text  # ops per second


async def test_names_cannot_drive_the_terminal(solo: ar.Strategy) -> None:
    now = status_of({"a\x1b[2J[red]": solo})
    now["strategies"][0]["waits"] = [
        {"step": 0, "replica_id": 0, "what": f"op{i}\x07[/]", "waits_for": [], "where": "\n"}
        for i in range(20)
    ]

    text = draw(now)

    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"a\x1b[2J[red]" in text
    assert "and 8 more waits" in text


async def test_the_view_is_drawn_on_another_thread_and_given_back(
    pair: ar.MirroredStrategy,
) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    async with live.view(pair, refresh_s=60, console=console):
        await pair.run(step)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]

    assert "MirroredStrategy" in text
    assert "step 1" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


async def test_nothing_to_look_at_is_refused(solo: ar.Strategy) -> None:
    for wrong in ((), (7,)):
        with pytest.raises(TypeError, match=r"at least one strategy|Only strategies"):
            async with live.view(*wrong):
                pass
        with pytest.raises(TypeError, match=r"at least one strategy|Only strategies"):
            async with live.serve(*wrong):
                pass
    with pytest.raises(ValueError, match="refresh_s must be positive, got 0"):
        async with live.view(solo, refresh_s=0):
            pass


async def test_a_missing_package_names_the_extra(
    solo: ar.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)

    with pytest.raises(ImportError, match=r'needs rich.*"aioreplica\[cli\]"'):
        async with live.view(solo):
            pass


# --- the socket -------------------------------------------------------------------------------


async def test_the_socket_is_private_and_gone_afterwards(
    pair: ar.MirroredStrategy, runtime: Path
) -> None:
    async with live.serve(pair) as path:
        assert path == runtime / f"{os.getpid()}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        await pair.run(step)
        status = await asyncio.to_thread(read_status, path)
    assert not path.exists()

    assert status["pid"] == os.getpid()
    [one] = status["strategies"]
    assert (one["name"], one["num_steps"]) == ("MirroredStrategy", 1)
    assert [replica["device"] for replica in one["replicas"]] == list(pair._runtime.device_names)


async def test_a_path_in_use_is_refused_and_a_dead_socket_replaced(
    solo: ar.Strategy, tmp_path: Path
) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with live.serve(solo, path=path):
        with pytest.raises(FileExistsError, match="Another process listens at"):
            async with live.serve(solo, path=path):
                pass
        assert (await asyncio.to_thread(read_status, path))["pid"] == os.getpid()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="is not a socket"):
        async with live.serve(solo, path=path):
            pass
    assert path.read_text() == "mine"


async def test_a_folder_that_others_can_open_is_refused(solo: ar.Strategy, runtime: Path) -> None:
    runtime.mkdir(mode=0o755)

    with pytest.raises(PermissionError, match="must belong to this user alone"):
        async with live.serve(solo):
            pass


async def test_a_path_that_is_too_long_is_named(solo: ar.Strategy, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Cannot listen at .*too long"):
        async with live.serve(solo, path=tmp_path / ("x" * 120)):
            pass


STRANGER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    try:
        connection.connect(sys.argv[1])
    except PermissionError:
        print("mode")
    else:
        try:
            print("told" if connection.recv(1) else "refused")
        except ConnectionResetError:
            print("refused")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("mode", "answer"), [(0o600, "mode"), (0o666, "refused")])
async def test_a_process_of_another_user_is_refused(
    solo: ar.Strategy, caplog: pytest.LogCaptureFixture, mode: int, answer: str
) -> None:
    path = Path(f"/tmp/aioreplica-test-{os.getpid()}.sock")
    async with live.serve(solo, path=path):
        path.chmod(mode)
        command = [sys.executable, "-c", STRANGER, str(path)]
        result = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True
        )

    assert result.stdout.strip() == answer
    assert ("of user 65534 asked" in caplog.text) == (answer == "refused")


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "hung up"),
        (b"[1]", "not the status of this version"),
        (b'{"version": 99}', "not the status of this version"),
        (b"\x80\x04", "utf-8|decode"),  # a pickle is never opened
    ],
)
async def test_an_invalid_status_is_an_error(tmp_path: Path, sent: bytes, error: str) -> None:
    path = tmp_path / "s.sock"

    class Teller(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(sent)
            transport.close()

    server = await asyncio.get_running_loop().create_unix_server(Teller, str(path))
    try:
        with pytest.raises((ValueError, OSError), match=error):
            await asyncio.to_thread(read_status, path)
    finally:
        server.close()
