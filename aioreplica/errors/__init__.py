"""Errors raised by aioreplica, all under `AioReplicaError`."""

from .._export import export_public
from ._errors import AioReplicaError as AioReplicaError
from ._errors import CheckpointError as CheckpointError
from ._errors import CheckpointNotCommittedError as CheckpointNotCommittedError
from ._errors import CheckpointUncertainError as CheckpointUncertainError
from ._errors import ClosureCancelledError as ClosureCancelledError
from ._errors import ContextError as ContextError
from ._errors import DeviceError as DeviceError
from ._errors import JournalError as JournalError
from ._errors import KeyReusedError as KeyReusedError
from ._errors import LoopMismatchError as LoopMismatchError
from ._errors import MergeMismatchError as MergeMismatchError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import OutOfSyncError as OutOfSyncError
from ._errors import PoisonedExampleError as PoisonedExampleError
from ._errors import ReplicaCancelledError as ReplicaCancelledError
from ._errors import ReplicaRow as ReplicaRow
from ._errors import StallError as StallError
from ._errors import WorkerLostError as WorkerLostError

__all__ = [
    "AioReplicaError",
    "CheckpointError",
    "CheckpointNotCommittedError",
    "CheckpointUncertainError",
    "ClosureCancelledError",
    "ContextError",
    "DeviceError",
    "JournalError",
    "KeyReusedError",
    "LoopMismatchError",
    "MergeMismatchError",
    "NonFiniteError",
    "OutOfSyncError",
    "PoisonedExampleError",
    "ReplicaCancelledError",
    "ReplicaRow",
    "StallError",
    "WorkerLostError",
]

export_public(__name__, __all__, globals())
