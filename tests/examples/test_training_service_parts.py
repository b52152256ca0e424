"""The parts of the training service: who gets the devices, what is a job, what is missing."""

import asyncio
import json
import runpy
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from examples.training_service.__main__ import main
from examples.training_service.programs import (
    MIB,
    PROGRAMS,
    RejectedError,
    SpiralSettings,
    memory_of,
    read_submission,
)
from examples.training_service.sharing import DeviceSharing
from examples.training_service.store import Store


class Clock:
    """Tells the time that steps are said to have taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def keep_going(
    sharing: DeviceSharing, clock: Clock, num_devices: int, step_s: float, until: float
) -> float:
    """Take turn after turn until the clock says so; return the time that was had."""
    share, had = sharing.join(num_devices), 0.0
    while clock.now < until:
        async with sharing.turn(share):
            clock.now += step_s
            had += step_s
            await asyncio.sleep(0)
    sharing.leave(share)
    return had


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", [(1.0, 1.0), (10.0, 1.0), (1.0, 7.0, 3.0)])
async def test_jobs_get_equal_time_however_long_their_steps_are(steps: tuple[float, ...]) -> None:
    clock = Clock()
    sharing = DeviceSharing(["cpu:0"], clock=clock)

    had = await asyncio.gather(*(keep_going(sharing, clock, 1, each, 300) for each in steps))

    fair = sum(had) / len(steps)
    assert max(abs(each - fair) for each in had) <= 2 * max(steps)


@pytest.mark.asyncio
async def test_late_and_returning_jobs_get_an_equal_share() -> None:
    clock = Clock()
    sharing = DeviceSharing(["cpu:0"], clock=clock)
    early = asyncio.create_task(keep_going(sharing, clock, 1, 1.0, 200))
    while clock.now < 50:
        await asyncio.sleep(0)
    since = clock.now

    late = await keep_going(sharing, clock, 1, 1.0, 200)

    assert abs(late - (clock.now - since) / 2) <= 2
    assert await early + late == pytest.approx(clock.now)


@pytest.mark.asyncio
async def test_devices_are_spread_and_turns_on_different_ones_overlap() -> None:
    sharing = DeviceSharing(["cpu:0", "cpu:1"])
    one, other, both = sharing.join(1), sharing.join(1), sharing.join(2)
    order = []

    async def take(name: str, share: object) -> None:
        async with sharing.turn(share):  # type: ignore[arg-type]
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(take("one", one), take("other", other), take("both", both))

    assert (one.devices, other.devices) == (("cpu:0",), ("cpu:1",))
    assert set(order[:2]) == {"one begins", "other begins"}
    assert order[-2:] == ["both begins", "both ends"]


@pytest.mark.asyncio
async def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    sharing = DeviceSharing(["cpu:0"])
    shares = [sharing.join(1) for _ in range(3)]

    async def take(number: int) -> int:
        async with sharing.turn(shares[number]):
            return number

    async with sharing.turn(sharing.join(1)):
        tasks = [asyncio.create_task(take(number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
    tasks[1].cancel()  # its turn has come, and it does not know yet

    found = await asyncio.gather(*tasks, return_exceptions=True)

    assert [isinstance(each, asyncio.CancelledError) for each in found[:2]] == [True, True]
    assert found[2] == 2


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", [""]),
        (b"[]", [""]),
        (b"\xff", [""]),
        (b"[" * 10_000, [""]),
        (b"{}", ["program"]),
        (b'{"program": "os.system"}', ["program"]),
        (b'{"program": "digits", "code": "1"}', ["code"]),
        (b'{"program": "digits", "settings": 3}', ["settings"]),
        (b'{"program": "digits", "settings": {"arms": 3}}', ["settings.arms"]),
        (b'{"program": "digits", "settings": {"epochs": true}}', ["settings.epochs"]),
        (b'{"program": "digits", "settings": {"dropout": NaN}}', ["settings.dropout"]),
        (b'{"program": "digits", "settings": {"replicas": 5}}', ["settings.replicas"]),
        (
            b'{"program": "spirals", "settings": {"arms": 1, "noise": 2}}',
            ["settings.arms", "settings.noise"],
        ),
    ],
)
def test_an_invalid_job_is_explained(body: bytes, where: list[str]) -> None:
    with pytest.raises(RejectedError) as caught:
        read_submission(body, num_devices=4)

    assert [place for place, _ in caught.value.reasons] == where
    assert all(what for _, what in caught.value.reasons)


def test_settings_have_defaults() -> None:
    body = b'{"program": "spirals", "settings": {"noise": 0, "arms": 5}}'

    name, settings = read_submission(body, num_devices=2)

    assert name == "spirals"
    assert settings["noise"] == 0.0
    assert settings["arms"] == 5
    assert settings["epochs"] == 10


def test_a_job_that_takes_too_much_memory_is_refused_with_its_parts() -> None:
    settings = {"hidden": 1024, "batch_size": 4096, "points": 10_000, "arms": 10}
    body = json.dumps({"program": "spirals", "settings": settings}).encode()
    with pytest.raises(RejectedError, match=r"about \d+ MiB \(examples 4 MiB, .*may take 128 MiB"):
        read_submission(body, num_devices=2)
    assert read_submission(body, num_devices=2, max_bytes=2**30)[1]["hidden"] == 1024


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sizes_of_a_program_are_those_of_its_examples(name: str) -> None:
    program = PROGRAMS[name]
    settings = program.settings()
    examples, labels = program.load(settings)
    assert program.sizes(settings) == (*examples.shape, int(labels.max()) + 1)


def test_the_largest_job_within_all_bounds_keeps_a_bounded_curve() -> None:
    settings = SpiralSettings(epochs=1000, batch_size=1, points=10_000, arms=10)
    taken = memory_of(PROGRAMS["spirals"], settings)
    assert taken["curve"] == 8 * 3 * 100_000
    assert sum(taken.values()) < 16 * MIB


@pytest.mark.asyncio
async def test_a_table_belongs_to_one_service_and_keeps_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "jobs.sqlite"
    async with Store(path) as store:
        first = await store.add("digits", {"epochs": 3})
        await store.update(first["id"], status="done", losses=b"12345678" * 2, step=2)
        with pytest.raises(OSError, match="Another service may have it"):
            async with Store(path):
                pass

    async with Store(path) as store:
        [row] = await store.all()
        assert (row["status"], row["settings"], row["step"]) == ("done", '{"epochs": 3}', 2)
        assert await store.losses(row["id"]) == b"12345678" * 2
        assert (await store.add("digits", {}))["id"] == 2
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.asyncio
async def test_a_table_of_an_earlier_release_gets_its_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with closing(sqlite3.connect(path)) as old:
        old.execute(
            "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, program TEXT NOT NULL, "
            "settings TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'queued', "
            "submitted TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '', "
            "digest TEXT NOT NULL DEFAULT '', num_steps INTEGER NOT NULL DEFAULT 0, "
            "losses BLOB NOT NULL DEFAULT x'') STRICT"
        )
        old.execute("INSERT INTO jobs (program, settings, losses) VALUES ('a', '{}', zeroblob(24))")
        old.commit()

    for _ in range(2):
        async with Store(path) as store:
            [row] = await store.all()
        assert (row["program"], row["step"], row["starts"]) == ("a", 3, 0)


@pytest.mark.parametrize(
    ("option", "problem"),
    [("--port", "from 0 to 65535, got 70000"), ("--devices", "from 1 to 64, got 70000")],
)
def test_options_out_of_range_are_refused(
    option: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([option, "70000"])

    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_port_in_use_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = main(["--port", str(other.getsockname()[1]), "--data", str(tmp_path)])

    assert code == 1
    assert "in use" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["uvicorn", "pydantic", "starlette"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [*sys.modules]:
        if name.startswith(("examples.training_service", f"{package}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(SystemExit, match=rf"needs {package}.*\[examples\]"):
        runpy.run_module("examples.training_service", run_name="not main")
