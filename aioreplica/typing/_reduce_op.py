"""Reduction operators and how users may spell them."""

from __future__ import annotations

from enum import Enum, unique
from typing import final


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


# The usual spellings, looked up without changing their case.
_SPELLINGS = {name: op for op in ReduceOp for name in (op.name, op.name.lower())}
