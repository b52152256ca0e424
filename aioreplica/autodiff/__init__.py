"""Gradients: one adapter for each library that differentiates, and losses that read variables."""

from .._export import export_public
from ._adapter import Adapter as Adapter
from ._adapter import Watch as Watch
from ._find import find_adapter as find_adapter
from ._outside import OutsideAdapter as OutsideAdapter
from ._outside import find_outside_adapter as find_outside_adapter
from ._value_and_grad import value_and_grad as value_and_grad
from ._variables import VariableReads as VariableReads
from ._variables import differentiate_variables as differentiate_variables

__all__ = [
    "Adapter",
    "OutsideAdapter",
    "VariableReads",
    "Watch",
    "differentiate_variables",
    "find_adapter",
    "find_outside_adapter",
    "value_and_grad",
]

export_public(__name__, __all__, globals())
