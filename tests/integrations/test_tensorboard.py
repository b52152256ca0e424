"""TensorBoard: scalars written by one replica, read back from the event file."""

import sys
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar

tensorboard_x = pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event  # noqa: E402
from tensorboardX.record_writer import masked_crc32c  # noqa: E402

from aioreplica.integrations import tensorboard  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def read(folder: Path) -> list[tuple[int, str, float | str]]:
    """Return step, tag and value of what a folder's event file holds."""
    [path] = folder.glob("*tfevents*")
    left, found = path.read_bytes(), []
    while left:
        size = int.from_bytes(left[:8], "little")
        assert int.from_bytes(left[8:12], "little") == masked_crc32c(left[:8])
        event = Event()
        event.ParseFromString(left[12 : 12 + size])
        left = left[16 + size :]
        for value in event.summary.value:
            text = b"".join(value.tensor.string_val).decode()
            found.append((event.step, value.tag, text or value.simple_value))
    return found


async def step() -> None:
    me().record("loss\x1b", 0.5)
    await me().run_on_device(lambda: me().record("note", "in an op"))


async def test_scalars_that_steps_record_are_written_once(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    with tensorboard.export(pair, tmp_path):
        await pair.run(step)
        await pair.run(step)
    await pair.run(step)

    assert read(tmp_path) == [  # tensorboardX puts a _ for the backslash
        (0, "loss_x1b", 0.5),
        (0, "note/text_summary", "in an op"),
        (1, "loss_x1b", 0.5),
        (1, "note/text_summary", "in an op"),
    ]


async def test_steps_of_a_device_loop_have_numbers_of_their_own(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    def one(ctx: Any, x: float) -> None:
        ctx.record("loss", x)

    with tensorboard.export(pair, tmp_path):
        await pair.run_steps(one, [0.25, 0.5, 0.75], 3)

    assert read(tmp_path) == [(0, "loss", 0.25), (1, "loss", 0.5), (2, "loss", 0.75)]


async def test_a_writer_that_is_given_stays_open(solo: ar.Strategy, tmp_path: Path) -> None:
    with tensorboard_x.SummaryWriter(str(tmp_path)) as writer:
        with tensorboard.export(solo, writer) as same:
            await solo.run(step)
        assert same is writer
        writer.add_scalar("after", 1.0, 7)

    assert (7, "after", 1.0) in read(tmp_path)


async def test_an_argument_that_is_not_a_writer_is_refused(solo: ar.Strategy) -> None:
    with (
        pytest.raises(TypeError, match="a folder or a SummaryWriter, got 7"),
        tensorboard.export(solo, 7),  # type: ignore[arg-type]
    ):
        pass
    assert solo.observers.event_added is None


async def test_a_missing_package_names_the_extra(
    solo: ar.Strategy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with (
        pytest.raises(ImportError, match=r'needs tensorboardX.*"aioreplica\[telemetry\]"'),
        tensorboard.export(solo, tmp_path),
    ):
        pass
