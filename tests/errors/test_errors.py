"""The error classes: one root, built-in relatives, fields that survive pickling."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from aioreplica import errors

ROW = errors.ReplicaRow(1, "cpu:1", "waiting", "all_reduce #3", "step.py:7")

CLASSES = {
    "ContextError": RuntimeError,
    "LoopMismatchError": RuntimeError,
    "MergeMismatchError": RuntimeError,
    "StallError": TimeoutError,
    "DeviceError": RuntimeError,
    "OutOfSyncError": RuntimeError,
    "NonFiniteError": ArithmeticError,
    "WorkerLostError": ConnectionError,
    "CheckpointError": OSError,
}

MADE = [
    errors.AioReplicaError("root"),
    errors.ContextError("a collective in a merge function"),
    errors.LoopMismatchError("another loop"),
    errors.DeviceError("no such device"),
    errors.DeviceError("no such device", device="cpu:9"),
    errors.OutOfSyncError("apart"),
    errors.OutOfSyncError("apart", variable="w", replica_id=2, index=(0, 3), max_difference=0.5),
    errors.MergeMismatchError("table"),
    errors.MergeMismatchError("table", step=4, reason="replica 1 returned", rows=(ROW, ROW)),
    errors.StallError("table"),
    errors.StallError("table", step=4, timeout_s=0.5, rows=(ROW,), stacks=("a", "b")),
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_one_root_and_a_built_in_relative(name: str) -> None:
    error_type = getattr(errors, name)

    assert issubclass(error_type, errors.AioReplicaError)
    assert issubclass(error_type, CLASSES[name])
    assert name in errors.__all__
    assert error_type.__module__ == "aioreplica.errors"


def test_the_root_error_derives_from_exception_only() -> None:
    assert errors.AioReplicaError.__mro__[1] is Exception


def fields(error: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


@pytest.mark.parametrize("error", MADE, ids=repr)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling_with_fields_and_notes(error: Exception, protocol: int) -> None:
    noted = copy.deepcopy(error)  # after `import distributed` a shallow one shares its notes
    noted.add_note("Raised in replica 1.")
    noted.add_note("And later.")

    loaded = pickle.loads(pickle.dumps(noted, protocol))

    assert type(loaded) is type(error)
    assert str(loaded) == str(error)
    assert fields(loaded) == fields(error)
    assert loaded.__notes__ == ["Raised in replica 1.", "And later."]


@pytest.mark.parametrize("error", MADE, ids=repr)
def test_errors_survive_copying(error: Exception) -> None:
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert fields(copied) == fields(error)


@pytest.mark.parametrize("error", MADE, ids=repr)
def test_the_text_is_the_message(error: Exception) -> None:
    assert str(error) == error.args[0]


def test_fields_have_defaults() -> None:
    mismatch, stall = errors.MergeMismatchError("m"), errors.StallError("s")
    apart = errors.OutOfSyncError("a")

    assert errors.DeviceError("d").device is None
    assert (mismatch.step, mismatch.reason, mismatch.rows) == (None, "", ())
    assert (stall.step, stall.timeout_s, stall.rows, stall.stacks) == (None, None, (), ())
    assert (apart.variable, apart.replica_id) == ("", None)
    assert (apart.index, apart.max_difference) == ((), 0.0)


def test_a_stall_is_caught_as_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        raise errors.StallError("stalled")


def test_a_row_is_an_immutable_record() -> None:
    assert pickle.loads(pickle.dumps(ROW)) == ROW
    assert dataclasses.astuple(ROW) == (1, "cpu:1", "waiting", "all_reduce #3", "step.py:7")
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.state = "running"  # type: ignore[misc]
