"""Synchronous data-parallel computation as plain async Python."""

from ._export import export_lazily

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "checkpoint": ("CheckpointManager",),
        "collectives": ("CommunicationOptions",),
        "context": ("get_update_replica_id", "in_cross_replica_context"),
        "device_loop": ("MultiStepContext", "TPUClusterResolver", "outside_compilation"),
        "devices": (
            "Device",
            "DeviceSpec",
            "current_device",
            "device",
            "device_op",
            "list_devices",
            "run_on_host",
            "set_logical_devices",
        ),
        "input": (
            "ArrayDataset",
            "Dataset",
            "DistributedDataset",
            "InputContext",
            "InputOptions",
            "InputReplicationMode",
        ),
        "optimizers": ("GradientAccumulator",),
        "replica": ("Handle", "ReplicaContext"),
        "strategies": (
            "CentralStorageStrategy",
            "DefaultStrategy",
            "MirroredStrategy",
            "MultiWorkerMirroredStrategy",
            "OneDeviceStrategy",
            "RunOptions",
            "Strategy",
            "TPUStrategy",
            "ValueContext",
            "get_replica_context",
            "get_strategy",
            "has_strategy",
        ),
        "typing": ("ReduceOp", "VariableAggregation", "VariableSynchronization"),
        "values": (
            "DistributedValues",
            "IndexedSlices",
            "Mirrored",
            "MirroredVariable",
            "PerReplica",
            "Snapshot",
            "SyncOnReadVariable",
            "Variable",
            "Weighted",
        ),
    },
    packages=(
        "autodiff",
        "checkpoint",
        "cluster",
        "collectives",
        "device_loop",
        "errors",
        "metrics",
        "online",
        "optimizers",
        "telemetry",
    ),
    unlisted=("context", "devices", "input", "replica", "strategies", "tree", "typing", "values"),
)
