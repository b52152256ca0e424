"""Optimizers: gradients of all replicas in, variables updated together."""

from .._export import export_public
from ._adam import Adam as Adam
from ._blocking import BlockingOptimizer as BlockingOptimizer
from ._optimizer import Optimizer as Optimizer

__all__ = ["Adam", "BlockingOptimizer", "Optimizer"]

export_public(__name__, __all__, globals())
