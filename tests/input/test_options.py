"""InputOptions, InputContext and InputReplicationMode: checked when they are made."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import aioreplica as ar

Mode = ar.InputReplicationMode


def test_the_defaults() -> None:
    options = ar.InputOptions()

    assert dataclasses.asdict(options) == {
        "fetch_to_device": True,
        "replication_mode": Mode.PER_WORKER,
        "place_on_device": False,
        "per_replica_buffer_size": 1,
        "remainder": "weight",
        "sharding": "auto",
    }
    assert not options.is_per_replica
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.remainder = "drop"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["PER_REPLICA", "per_replica", "Per_Replica", Mode.PER_REPLICA])
def test_modes_by_name(name: Any) -> None:
    options = ar.InputOptions(fetch_to_device=False, replication_mode=name)

    assert options.replication_mode is Mode.PER_REPLICA
    assert options.is_per_replica


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"replication_mode": "PER_HOST"}, ValueError, "PER_WORKER, PER_REPLICA"),
        ({"replication_mode": 3}, TypeError, "replication mode"),
        ({"replication_mode": "PER_REPLICA"}, ValueError, "Pass fetch_to_device=False"),
        ({"place_on_device": True}, ValueError, "needs replication_mode=PER_REPLICA"),
        (
            {"replication_mode": "PER_REPLICA", "place_on_device": True},
            ValueError,
            "fetch_to_device=False",
        ),
        ({"fetch_to_device": 1}, TypeError, "True or False, got 1"),
        ({"place_on_device": None}, TypeError, "True or False, got None"),
        ({"per_replica_buffer_size": -1}, ValueError, "got -1"),
        ({"per_replica_buffer_size": 1.0}, ValueError, r"got 1\.0"),
        ({"per_replica_buffer_size": True}, ValueError, "got True"),
        ({"remainder": "keep"}, ValueError, "weight, drop, error, got 'keep'"),
        ({"sharding": "even"}, ValueError, "auto, off, data, file, got 'even'"),
    ],
)
def test_invalid_options_are_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ar.InputOptions(**fields)


def test_the_share_of_a_replica() -> None:
    context = ar.InputContext(2, 1, 4)

    assert context.get_per_replica_batch_size(256) == 64
    assert context.get_per_replica_batch_size(np.int64(8)) == 2
    for size in (255, 2, -4):
        with pytest.raises(ValueError, match=f"{size} cannot be shared evenly by 4"):
            context.get_per_replica_batch_size(size)
    with pytest.raises(TypeError):
        context.get_per_replica_batch_size(8.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, 1, 1), (1, -1, 1), (1, 0, 0), (1.0, 0, 1)])
def test_numbers_that_do_not_fit_together(numbers: Any) -> None:
    with pytest.raises(ValueError, match=r"must be an int"):
        ar.InputContext(*numbers)


def test_numpy_integers_are_integers() -> None:
    """Sizes are often computed; what NumPy returns is no reason for an error."""
    options = ar.InputOptions(per_replica_buffer_size=np.int64(2))  # type: ignore[arg-type]
    assert options == ar.InputOptions(per_replica_buffer_size=2)
    assert ar.InputContext(*np.array([4, 1, 4])) == ar.InputContext(4, 1, 4)
    assert type(options.per_replica_buffer_size) is int


def test_defaults_of_contexts_mean_one_of_everything() -> None:
    assert ar.InputContext() == ar.InputContext(1, 0, 1)
    assert ar.ValueContext() == ar.ValueContext(0, 1)
