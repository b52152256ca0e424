"""Distributed values and variables: what a strategy's users hold between and inside steps."""

from .._export import export_public
from ._array_like import ArrayLike as ArrayLike
from ._array_like import is_floating as is_floating
from ._creation import rows_between as rows_between
from ._distributed import DistributedValues as DistributedValues
from ._distributed import Mirrored as Mirrored
from ._distributed import PerReplica as PerReplica
from ._distributed import new_per_replica as new_per_replica
from ._divided import DividedVariable as DividedVariable
from ._division import Division as Division
from ._division import Ranges as Ranges
from ._division import Shard as Shard
from ._division import as_slice as as_slice
from ._division import cut as cut
from ._division import divided as divided
from ._division import parts_of as parts_of
from ._indexed_slices import IndexedSlices as IndexedSlices
from ._indexed_slices import require_unmasked as require_unmasked
from ._mirrored import CentralVariable as CentralVariable
from ._mirrored import MirroredVariable as MirroredVariable
from ._mirrored import SyncOnReadVariable as SyncOnReadVariable
from ._mirrored import aggregate as aggregate
from ._plain import PlainVariable as PlainVariable
from ._plain import default_store as default_store
from ._regroup import argument_difference as argument_difference
from ._regroup import merged_column as merged_column
from ._regroup import read_at as read_at
from ._regroup import regroup_results as regroup_results
from ._regroup import split_per_replica as split_per_replica
from ._snapshot import Snapshot as Snapshot
from ._snapshot import take_snapshot as take_snapshot
from ._step_gate import StepGate as StepGate
from ._step_gate import between_steps as between_steps
from ._store import CAN_COUNT_REFERENCES as CAN_COUNT_REFERENCES
from ._store import Done as Done
from ._store import VariableStore as VariableStore
from ._store import wait_error as wait_error
from ._store import writable_buffer as writable_buffer
from ._update import Staging as Staging
from ._update import is_own as is_own
from ._update import require_own as require_own
from ._update import run_per_component as run_per_component
from ._update import split_arguments as split_arguments
from ._update import update_components as update_components
from ._variable import BlockingVariable as BlockingVariable
from ._variable import Variable as Variable
from ._variable import VariableOptions as VariableOptions
from ._variable import combined as combined
from ._variable import fitting as fitting
from ._variable import local_value as local_value
from ._variable import rename as rename
from ._variable import some_workers_error as some_workers_error
from ._variable import workers_of as workers_of
from ._weak_dict import WeakVariableDict as WeakVariableDict
from ._weighted import Weighted as Weighted
from ._weighted import flatten_summands as flatten_summands

__all__ = [
    "ArrayLike",
    "BlockingVariable",
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "MirroredVariable",
    "PerReplica",
    "Shard",
    "Snapshot",
    "SyncOnReadVariable",
    "Variable",
    "Weighted",
]

export_public(__name__, __all__, globals())
