"""Names everyone needs: reduction operators and variable options."""

from .._export import export_public
from ._options import AggregationName as AggregationName
from ._options import OpName as OpName
from ._options import ReduceOp as ReduceOp
from ._options import SynchronizationName as SynchronizationName
from ._options import VariableAggregation as VariableAggregation
from ._options import VariableSynchronization as VariableSynchronization

__all__ = ["ReduceOp", "VariableAggregation", "VariableSynchronization"]

export_public(__name__, __all__, globals())
