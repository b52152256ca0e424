"""Optimizers: gradients of all replicas in, variables updated together."""

from .._export import export_public
from ._adam import Adam as Adam
from ._from_optax import from_optax as from_optax
from ._from_torch import from_torch as from_torch
from ._optimizer import Optimizer as Optimizer

__all__ = ["Adam", "Optimizer", "from_optax", "from_torch"]

export_public(__name__, __all__, globals())
