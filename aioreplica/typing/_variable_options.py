"""Options of distributed variables."""

from __future__ import annotations

from enum import Enum, unique
from typing import TypeVar, final


@final
@unique
class VariableSynchronization(Enum):
    """Time at which the components of a distributed variable are synchronized.

    AUTO is ON_WRITE: every write is merged, so the components stay equal. ON_READ lets every
    replica write its own component and combines them where they are read outside the replicas.

    Source:
        tf.VariableSynchronization.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"

    @classmethod
    def parse(
        cls, synchronization: VariableSynchronization | str, variable: str
    ) -> VariableSynchronization:
        """Accept a member or its name in any case; `variable` names the owner in errors.

        Raises:
            ValueError: If the name is unknown.
        """
        return _parse(cls, synchronization, variable, "synchronization")


@final
@unique
class VariableAggregation(Enum):
    """Aggregation of values that several replicas assign to a mirrored variable.

    Source:
        tf.VariableAggregation.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @classmethod
    def parse(cls, aggregation: VariableAggregation | str, variable: str) -> VariableAggregation:
        """Accept a member or its name in any case; `variable` names the owner in errors.

        Raises:
            ValueError: If the name is unknown.
        """
        return _parse(cls, aggregation, variable, "aggregation")


Option = TypeVar("Option", VariableSynchronization, VariableAggregation)


def _parse(kind: type[Option], given: Option | str, variable: str, what: str) -> Option:
    if isinstance(given, kind):
        return given
    found = kind.__members__.get(str(given).upper())
    if found is None:
        legal = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"Variable {variable!r} got {what}={given!r}. Use one of {legal}.")
    return found
