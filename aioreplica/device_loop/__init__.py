"""Device loops: many steps on the device threads, fed by queues, left only on purpose."""

from .._export import export_public
from ._feeder import Feeder as Feeder
from ._feeder import KeptIterators as KeptIterators
from ._feeder import new_feeder as new_feeder
from ._feeder import open_iterator as open_iterator
from ._infeed import Infeed as Infeed
from ._outside import current_cluster as current_cluster
from ._outside import outside_compilation as outside_compilation
from ._program import MultiStepContext as MultiStepContext
from ._program import combine_outputs as combine_outputs
from ._program import require_equal_outputs as require_equal_outputs
from ._program import run_loop as run_loop
from ._static_shapes import StaticShapes as StaticShapes
from ._topology import DeviceAssignment as DeviceAssignment
from ._topology import HasTopology as HasTopology
from ._topology import Topology as Topology
from ._topology import TPUClusterResolver as TPUClusterResolver
from ._topology import find_topology as find_topology

__all__ = [
    "DeviceAssignment",
    "MultiStepContext",
    "TPUClusterResolver",
    "Topology",
    "current_cluster",
    "outside_compilation",
]

export_public(__name__, __all__, globals())
