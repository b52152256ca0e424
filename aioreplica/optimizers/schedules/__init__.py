"""Learning rates that change over time: functions of the number of updates done before."""

from ..._export import export_public
from ._schedules import Constant as Constant
from ._schedules import CosineDecay as CosineDecay
from ._schedules import ExponentialDecay as ExponentialDecay
from ._schedules import LinearWarmup as LinearWarmup
from ._schedules import PiecewiseConstantDecay as PiecewiseConstantDecay
from ._schedules import ReduceOnPlateau as ReduceOnPlateau

__all__ = [
    "Constant",
    "CosineDecay",
    "ExponentialDecay",
    "LinearWarmup",
    "PiecewiseConstantDecay",
    "ReduceOnPlateau",
]

export_public(__name__, __all__, globals())
