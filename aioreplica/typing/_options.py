"""Reduction operators and options of variables, and how users may spell them."""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, TypeAlias, TypeVar, final


@final
@unique
class ReduceOp(Enum):
    """Reduction of the values of several replicas to one.

    Example:
        >>> ReduceOp.parse("Mean")
        <ReduceOp.MEAN: 'MEAN'>

    Source:
        SUM and MEAN as in tf.distribute.ReduceOp; MIN and MAX as in MPI.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Accept an operator or its name in any case.

        Raises:
            ValueError: If the name is unknown.
            TypeError: If `op` is neither an operator nor a string.
        """
        if type(op) is cls:
            return op
        if type(op) is str and op in _SPELLINGS:
            return _SPELLINGS[op]
        if isinstance(op, str):
            found = cls.__members__.get(op.upper())
            if found is not None:
                return found
            legal = ", ".join(cls.__members__)
            raise ValueError(f"Unknown reduce op {op!r}. Use one of {legal}, in any case.")
        raise TypeError(
            f"A reduce op is an ar.ReduceOp or its name, got {op!r} ({type(op).__name__})."
        )


OpName: TypeAlias = Literal["sum", "mean", "min", "max", "SUM", "MEAN", "MIN", "MAX"]
SynchronizationName: TypeAlias = Literal[
    "auto", "none", "on_write", "on_read", "AUTO", "NONE", "ON_WRITE", "ON_READ"
]
AggregationName: TypeAlias = Literal[
    "none", "sum", "mean", "only_first_replica", "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"
]

# The usual spellings, looked up without changing their case.
_SPELLINGS = {name: op for op in ReduceOp for name in (op.name, op.name.lower())}


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
