"""What a value function learns about the replica it makes a value for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class ValueContext:
    """Given to the function of `distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The replica that the value is for.
        num_replicas_in_sync: How many replicas there are.

    Source:
        tf.distribute.experimental.ValueContext.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
