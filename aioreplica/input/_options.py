"""Options of feeding a dataset to replicas, their bounds, and the context of dataset functions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from operator import index
from typing import Any, Literal, final

SHARDINGS = ("auto", "off", "data", "file")
REMAINDERS = ("weight", "drop", "error")


@final
@unique
class InputReplicationMode(Enum):
    """Number of datasets that `distribute_datasets_from_function` makes.

    Example:
        >>> InputReplicationMode.parse("per_replica")
        <InputReplicationMode.PER_REPLICA: 'PER_REPLICA'>

    Source:
        tf.distribute.InputReplicationMode.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"

    @classmethod
    def parse(cls, mode: InputReplicationMode | str) -> InputReplicationMode:
        """Accept a mode or its name in any case.

        Raises:
            ValueError: If the name is unknown.
            TypeError: If it is neither a mode nor a string.
        """
        if isinstance(mode, cls):
            return mode
        if isinstance(mode, str):
            found = cls.__members__.get(mode.upper())
            if found is not None:
                return found
            legal = ", ".join(cls.__members__)
            raise ValueError(f"Unknown replication mode {mode!r}. Use one of {legal}, in any case.")
        raise TypeError(
            "A replication mode is an ar.InputReplicationMode or its name, got "
            f"{mode!r} ({type(mode).__name__})."
        )


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options of feeding a dataset to the replicas.

    Attributes:
        fetch_to_device: Whether batches are brought to the devices ahead of time; needs PER_WORKER.
            If not, they are read ahead on the host.
        replication_mode: One dataset per worker, or (from a function) one per replica.
        place_on_device: Whether each replica's dataset lives on its device; needs PER_REPLICA, and
            `fetch_to_device=False`.
        per_replica_buffer_size: Batches read ahead; 0 reads each when it is asked for.
        remainder: What becomes of a batch that cannot be shared out evenly. "weight": parts of
            different sizes, empty ones too, in which every example counts once. "drop": equal
            parts, the examples left over are left out. "error": a ValueError.
        sharding: What each of several workers reads: its own files ("file"), all but only its
            replicas' parts ("data"), or all ("off"). "auto" takes "file" for `ar.input.Files` with
            a file for each worker, else "data".

    Raises:
        ValueError: If a value is not legal, or two do not go together.
        TypeError: If a value has the wrong type.

    Source:
        tf.distribute.InputOptions; the last two fields are additions.
    """

    fetch_to_device: bool = True
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    place_on_device: bool = False
    per_replica_buffer_size: int = 1
    remainder: Literal["weight", "drop", "error"] = "weight"
    sharding: Literal["auto", "off", "data", "file"] = "auto"

    def __post_init__(self) -> None:
        mode = InputReplicationMode.parse(self.replication_mode)
        object.__setattr__(self, "replication_mode", mode)
        for name in ("fetch_to_device", "place_on_device"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        advice = " 0 turns reading ahead off."
        size = as_count("per_replica_buffer_size", self.per_replica_buffer_size, advice=advice)
        object.__setattr__(self, "per_replica_buffer_size", size)
        for name, legal in (("remainder", REMAINDERS), ("sharding", SHARDINGS)):
            if getattr(self, name) not in legal:
                raise ValueError(
                    f"{name} must be one of {', '.join(legal)}, got {getattr(self, name)!r}."
                )
        if self.fetch_to_device and mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                "fetch_to_device=True needs replication_mode=PER_WORKER, got PER_REPLICA. Pass "
                "fetch_to_device=False, and place_on_device=True if the datasets live on devices."
            )
        if self.place_on_device and mode is not InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "place_on_device=True needs replication_mode=PER_REPLICA, got PER_WORKER. Use "
                "fetch_to_device=True to have batches brought to the devices."
            )

    @property
    def is_per_replica(self) -> bool:
        """True if there is one dataset per replica."""
        return self.replication_mode is InputReplicationMode.PER_REPLICA


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """Given to the function of `distribute_datasets_from_function`.

    Attributes:
        num_input_pipelines: How many datasets feed the sync group.
        input_pipeline_id: Which of them this one is.
        num_replicas_in_sync: How many replicas they feed.

    Raises:
        ValueError: If the numbers do not fit together.

    Example:
        >>> InputContext(1, 0, 4).get_per_replica_batch_size(256)
        64

    Source:
        tf.distribute.InputContext.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            object.__setattr__(self, name, as_count(name, getattr(self, name), least=1))
        pipeline_id = count_or_none(self.input_pipeline_id)
        if pipeline_id is None or pipeline_id >= self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be an int from 0 to {self.num_input_pipelines - 1}, got "
                f"{self.input_pipeline_id!r}."
            )
        object.__setattr__(self, "input_pipeline_id", pipeline_id)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return how many examples of a global batch each replica gets.

        Raises:
            ValueError: If it is not divisible by the number of replicas.
            TypeError: If it is not an int.
        """
        size = index(global_batch_size)
        share, rest = divmod(size, self.num_replicas_in_sync)
        if rest or size < 0:
            raise ValueError(
                f"A global batch of {global_batch_size} cannot be shared evenly by "
                f"{self.num_replicas_in_sync} replicas. Use a multiple of "
                f"{self.num_replicas_in_sync}."
            )
        return share


def as_count(name: str, value: object, *, least: int = 0, advice: str = "") -> int:
    """Return `value` as an int; a bool is refused.

    Raises:
        ValueError: If it is not an integer, or below `least`.

    Example:
        >>> import numpy as np
        >>> as_count("batch_size", np.int64(3), least=1)
        3
    """
    number = count_or_none(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}.{advice}")
    return number


def count_or_none(value: Any) -> int | None:
    """Return an integer of any kind as an int >= 0; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = index(value)
    except TypeError:
        return None
    return number if number >= 0 else None
