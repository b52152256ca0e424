"""Learning rates that change over time: pure functions of the number of updates done before."""

from ..._export import export_public
from ._constant import Constant as Constant
from ._cosine_decay import CosineDecay as CosineDecay
from ._exponential_decay import ExponentialDecay as ExponentialDecay
from ._linear_warmup import LinearWarmup as LinearWarmup
from ._piecewise_constant import PiecewiseConstantDecay as PiecewiseConstantDecay

__all__ = [
    "Constant",
    "CosineDecay",
    "ExponentialDecay",
    "LinearWarmup",
    "PiecewiseConstantDecay",
]

export_public(__name__, __all__, globals())
