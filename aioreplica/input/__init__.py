"""Input: datasets of global batches, read ahead, split over the replicas, resumed exactly."""

from .._export import export_public
from ._array_dataset import ArrayDataset as ArrayDataset
from ._batches import ArraySpec as ArraySpec
from ._batches import num_examples as num_examples
from ._batches import spec_of as spec_of
from ._batches import split_batch as split_batch
from ._batches import split_sizes as split_sizes
from ._dataset import Dataset as Dataset
from ._distribute import InputTarget as InputTarget
from ._distribute import distribute_dataset as distribute_dataset
from ._distribute import distribute_from_function as distribute_from_function
from ._distributed_dataset import DistributedDataset as DistributedDataset
from ._distributed_dataset import DistributedIterator as DistributedIterator
from ._distributed_dataset import InputStatistics as InputStatistics
from ._epoch import OpenLoops as OpenLoops
from ._iterables import Stateful as Stateful
from ._iterables import close_iterator as close_iterator
from ._options import InputContext as InputContext
from ._options import InputOptions as InputOptions
from ._options import InputReplicationMode as InputReplicationMode
from ._sharding import Files as Files
from ._sharding import local_replicas as local_replicas
from ._sharding import shard_items as shard_items
from ._shuffle import KeyedPermutation as KeyedPermutation

__all__ = [
    "ArrayDataset",
    "ArraySpec",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "Files",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InputStatistics",
    "num_examples",
]

export_public(__name__, __all__, globals())
