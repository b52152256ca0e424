"""Strategies: which devices take part, and what runs on each."""

from .._export import export_lazily
from ._default import DefaultStrategy as DefaultStrategy
from ._default import get_replica_context as get_replica_context
from ._default import get_strategy as get_strategy
from ._default import has_strategy as has_strategy
from ._default import with_context as with_context
from ._extended import Extended as Extended
from ._extended import GroupView as GroupView
from ._launch import RunOptions as RunOptions
from ._lifecycle import StrategyStatistics as StrategyStatistics
from ._mirrored import CentralStorageStrategy as CentralStorageStrategy
from ._mirrored import MirroredStrategy as MirroredStrategy
from ._mirrored import OneDeviceStrategy as OneDeviceStrategy
from ._strategy import Strategy as Strategy
from ._watching import Telemetry as Telemetry

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "_distribute": ("ValueContext",),
        "_multi_worker": ("MultiWorkerMirroredStrategy",),
        "_pipeline": ("pipeline",),
        "_prepare": ("no_sync", "prepare"),
        "_tpu": ("TPUStrategy",),
        "parameter_server": (
            "ClusterCoordinator",
            "CoordinatorStatistics",
            "FixedShardsPartitioner",
            "MaxSizePartitioner",
            "MinSizePartitioner",
            "ParameterServerStrategy",
            "Partitioner",
            "PerWorkerDataset",
            "PerWorkerResource",
            "RemoteValue",
            "ServedVariable",
            "ShardedVariable",
        ),
    },
    unlisted=("parameter_server",),
    loaded=(
        "DefaultStrategy",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "with_context",
        "Extended",
        "GroupView",
        "StrategyStatistics",
        "CentralStorageStrategy",
        "MirroredStrategy",
        "OneDeviceStrategy",
        "RunOptions",
        "Strategy",
        "Telemetry",
    ),
)
