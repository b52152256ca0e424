"""Optimizers: gradients of all replicas in, variables updated together."""

from .._export import export_public
from . import schedules as schedules
from ._accumulator import BlockingAccumulator as BlockingAccumulator
from ._accumulator import GradientAccumulator as GradientAccumulator
from ._adagrad import Adagrad as Adagrad
from ._adam import Adam as Adam
from ._adam import AdamW as AdamW
from ._blocks import Block as Block
from ._elementwise import ElementwiseOptimizer as ElementwiseOptimizer
from ._elsewhere import Finished as Finished
from ._elsewhere import OptimizerRecipe as OptimizerRecipe
from ._elsewhere import finished_gradients as finished_gradients
from ._elsewhere import recipe_of as recipe_of
from ._elsewhere import weighed_gradients as weighed_gradients
from ._from_optax import from_optax as from_optax
from ._from_torch import from_torch as from_torch
from ._fused import FusedRules as FusedRules
from ._gradient import checked_pairs as checked_pairs
from ._loss import differentiate_loss as differentiate_loss
from ._loss import require_loss as require_loss
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._loss_scale import LossScale as LossScale
from ._loss_scale import LossScaling as LossScaling
from ._merged_gradient import merge_gradients as merge_gradients
from ._moving_average import BlockingMovingAverage as BlockingMovingAverage
from ._moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from ._optimizer import BlockingOptimizer as BlockingOptimizer
from ._optimizer import Optimizer as Optimizer
from ._rmsprop import RMSprop as RMSprop
from ._scaled_gradient import ScaledGradient as ScaledGradient
from ._settings import OptimizerOptions as OptimizerOptions
from ._sgd import SGD as SGD
from ._slots import working_dtype as working_dtype
from ._step import take_step as take_step

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Block",
    "BlockingAccumulator",
    "BlockingMovingAverage",
    "BlockingOptimizer",
    "DynamicLossScale",
    "ElementwiseOptimizer",
    "ExponentialMovingAverage",
    "GradientAccumulator",
    "LossScaling",
    "Optimizer",
    "OptimizerOptions",
    "RMSprop",
    "SGD",
    "ScaledGradient",
    "from_optax",
    "from_torch",
    "schedules",
]

export_public(__name__, __all__, globals())
