"""Synchronous data-parallel computation as plain async Python."""

from . import autodiff as autodiff
from . import checkpoint as checkpoint
from . import cluster as cluster
from . import collectives as collectives
from . import device_loop as device_loop
from . import errors as errors
from . import metrics as metrics
from . import optimizers as optimizers
from . import telemetry as telemetry
from .checkpoint import CheckpointManager as CheckpointManager
from .collectives import CommunicationOptions as CommunicationOptions
from .context import get_update_replica_id as get_update_replica_id
from .context import in_cross_replica_context as in_cross_replica_context
from .device_loop import MultiStepContext as MultiStepContext
from .device_loop import TPUClusterResolver as TPUClusterResolver
from .device_loop import outside_compilation as outside_compilation
from .devices import Device as Device
from .devices import DeviceSpec as DeviceSpec
from .devices import current_device as current_device
from .devices import device as device
from .devices import device_op as device_op
from .devices import list_devices as list_devices
from .devices import run_on_host as run_on_host
from .devices import set_logical_devices as set_logical_devices
from .input import ArrayDataset as ArrayDataset
from .input import Dataset as Dataset
from .input import DistributedDataset as DistributedDataset
from .input import InputContext as InputContext
from .input import InputOptions as InputOptions
from .input import InputReplicationMode as InputReplicationMode
from .optimizers import GradientAccumulator as GradientAccumulator
from .replica import Handle as Handle
from .replica import ReplicaContext as ReplicaContext
from .strategies import CentralStorageStrategy as CentralStorageStrategy
from .strategies import DefaultStrategy as DefaultStrategy
from .strategies import MirroredStrategy as MirroredStrategy
from .strategies import OneDeviceStrategy as OneDeviceStrategy
from .strategies import RunOptions as RunOptions
from .strategies import Strategy as Strategy
from .strategies import TPUStrategy as TPUStrategy
from .strategies import ValueContext as ValueContext
from .strategies import get_replica_context as get_replica_context
from .strategies import get_strategy as get_strategy
from .strategies import has_strategy as has_strategy
from .typing import ReduceOp as ReduceOp
from .typing import VariableAggregation as VariableAggregation
from .typing import VariableSynchronization as VariableSynchronization
from .values import DistributedValues as DistributedValues
from .values import IndexedSlices as IndexedSlices
from .values import Mirrored as Mirrored
from .values import MirroredVariable as MirroredVariable
from .values import PerReplica as PerReplica
from .values import Snapshot as Snapshot
from .values import SyncOnReadVariable as SyncOnReadVariable
from .values import Variable as Variable
from .values import Weighted as Weighted

__all__ = [
    "ArrayDataset",
    "CheckpointManager",
    "CentralStorageStrategy",
    "CommunicationOptions",
    "Dataset",
    "DefaultStrategy",
    "Device",
    "DeviceSpec",
    "DistributedDataset",
    "DistributedValues",
    "GradientAccumulator",
    "Handle",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MultiStepContext",
    "MirroredStrategy",
    "MirroredVariable",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Snapshot",
    "Strategy",
    "SyncOnReadVariable",
    "TPUClusterResolver",
    "TPUStrategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "Weighted",
    "autodiff",
    "checkpoint",
    "cluster",
    "collectives",
    "current_device",
    "device",
    "device_loop",
    "device_op",
    "errors",
    "get_replica_context",
    "get_strategy",
    "get_update_replica_id",
    "has_strategy",
    "in_cross_replica_context",
    "list_devices",
    "metrics",
    "optimizers",
    "outside_compilation",
    "run_on_host",
    "set_logical_devices",
    "telemetry",
]
