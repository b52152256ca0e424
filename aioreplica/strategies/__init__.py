"""Strategies: which devices take part, and what runs on each."""

from .._export import export_public
from ._default import DefaultStrategy as DefaultStrategy
from ._default import get_replica_context as get_replica_context
from ._default import get_strategy as get_strategy
from ._default import has_strategy as has_strategy
from ._distribute import ValueContext as ValueContext
from ._extended import Extended as Extended
from ._group_view import GroupView as GroupView
from ._lifecycle import StrategyStatistics as StrategyStatistics
from ._mirrored import CentralStorageStrategy as CentralStorageStrategy
from ._mirrored import MirroredStrategy as MirroredStrategy
from ._multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from ._one_device import OneDeviceStrategy as OneDeviceStrategy
from ._run_options import RunOptions as RunOptions
from ._strategy import Strategy as Strategy
from ._tpu import TPUStrategy as TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "Extended",
    "GroupView",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "RunOptions",
    "Strategy",
    "StrategyStatistics",
    "TPUStrategy",
    "ValueContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
]

export_public(__name__, __all__, globals())
