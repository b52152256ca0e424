"""Optimizers: gradients of all replicas in, variables updated together."""

from .._export import export_public
from . import schedules as schedules
from ._accumulator import BlockingAccumulator as BlockingAccumulator
from ._accumulator import GradientAccumulator as GradientAccumulator
from ._adam import Adam as Adam
from ._adam import AdamW as AdamW
from ._apply_gradients import BlockingOptimizer as BlockingOptimizer
from ._apply_gradients import require_loss as require_loss
from ._apply_gradients import sort_by_creation as sort_by_creation
from ._blocks import Block as Block
from ._blocks import FusedRules as FusedRules
from ._checks import learning_rate_at as learning_rate_at
from ._checks import require_owner as require_owner
from ._checks import written as written
from ._elementwise import SGD as SGD
from ._elementwise import Adagrad as Adagrad
from ._elementwise import ElementwiseOptimizer as ElementwiseOptimizer
from ._elementwise import RMSprop as RMSprop
from ._from_optax import from_optax as from_optax
from ._from_torch import from_torch as from_torch
from ._gradient import ScaledGradient as ScaledGradient
from ._gradient import checked_pairs as checked_pairs
from ._local_sgd import LocalSGD as LocalSGD
from ._loss import DynamicLossScale as DynamicLossScale
from ._loss import LossScale as LossScale
from ._loss import LossScaling as LossScaling
from ._loss import ScaleRule as ScaleRule
from ._loss import differentiate_loss as differentiate_loss
from ._merged_gradient import merge_gradients as merge_gradients
from ._moving_average import BlockingMovingAverage as BlockingMovingAverage
from ._moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from ._optimizer import Optimizer as Optimizer
from ._optimizer import OptimizerRecipe as OptimizerRecipe
from ._optimizer import recipe_of as recipe_of
from ._settings import OptimizerOptions as OptimizerOptions
from ._settings import StepSettings as StepSettings
from ._slots import working_dtype as working_dtype
from ._step import FinishedGradients as FinishedGradients
from ._step import finish_gradients as finish_gradients
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
    "LocalSGD",
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
