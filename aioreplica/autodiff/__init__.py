"""Gradients: one adapter for each library that differentiates, and losses that read variables."""

from .._export import export_public
from ._adapter import Adapter as Adapter
from ._adapter import Watch as Watch
from ._collectives import all_gather as all_gather
from ._collectives import all_reduce as all_reduce
from ._collectives import broadcast as broadcast
from ._collectives import reduce_scatter as reduce_scatter
from ._find import find_adapter as find_adapter
from ._linear import LinearCollective as LinearCollective
from ._outside import OutsideAdapter as OutsideAdapter
from ._outside import find_outside_adapter as find_outside_adapter
from ._value_and_grad import value_and_grad as value_and_grad
from ._variables import VariableReads as VariableReads
from ._variables import differentiate_variables as differentiate_variables

__all__ = [
    "Adapter",
    "LinearCollective",
    "OutsideAdapter",
    "VariableReads",
    "Watch",
    "all_gather",
    "all_reduce",
    "broadcast",
    "differentiate_variables",
    "find_adapter",
    "reduce_scatter",
    "find_outside_adapter",
    "value_and_grad",
]

export_public(__name__, __all__, globals())
