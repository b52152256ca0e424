"""Parameter servers: variables that live on them, and a coordinator that runs closures."""

from ._coordinator import ClusterCoordinator as ClusterCoordinator
from ._messages import CoordinatorStatistics as CoordinatorStatistics
from ._packing import PerWorkerDataset as PerWorkerDataset
from ._packing import PerWorkerResource as PerWorkerResource
from ._partition import FixedShardsPartitioner as FixedShardsPartitioner
from ._partition import MaxSizePartitioner as MaxSizePartitioner
from ._partition import MinSizePartitioner as MinSizePartitioner
from ._partition import Partitioner as Partitioner
from ._per_worker_variable import PerWorkerVariable as PerWorkerVariable
from ._progress import Reopened as Reopened
from ._remote_value import RemoteValue as RemoteValue
from ._strategy import ParameterServerStrategy as ParameterServerStrategy
from ._variables import ParameterServerVariable as ParameterServerVariable
from ._variables import ServedVariable as ServedVariable
from ._variables import ShardedVariable as ShardedVariable

__all__ = ()
