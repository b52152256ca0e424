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
from ._watching import Telemetry as Telemetry
from .parameter_server import ClusterCoordinator as ClusterCoordinator
from .parameter_server import CoordinatorStatistics as CoordinatorStatistics
from .parameter_server import FixedShardsPartitioner as FixedShardsPartitioner
from .parameter_server import MaxSizePartitioner as MaxSizePartitioner
from .parameter_server import MinSizePartitioner as MinSizePartitioner
from .parameter_server import ParameterServerStrategy as ParameterServerStrategy
from .parameter_server import ParameterServerVariable as ParameterServerVariable
from .parameter_server import Partitioner as Partitioner
from .parameter_server import PerWorkerDataset as PerWorkerDataset
from .parameter_server import PerWorkerIterator as PerWorkerIterator
from .parameter_server import PerWorkerResource as PerWorkerResource
from .parameter_server import RemoteValue as RemoteValue
from .parameter_server import ServedVariable as ServedVariable
from .parameter_server import Shard as Shard
from .parameter_server import ShardedVariable as ShardedVariable

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "CoordinatorStatistics",
    "DefaultStrategy",
    "Extended",
    "FixedShardsPartitioner",
    "GroupView",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Partitioner",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerResource",
    "RemoteValue",
    "RunOptions",
    "ServedVariable",
    "Shard",
    "ShardedVariable",
    "Strategy",
    "StrategyStatistics",
    "TPUStrategy",
    "Telemetry",
    "ValueContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
]

export_public(__name__, __all__, globals())
