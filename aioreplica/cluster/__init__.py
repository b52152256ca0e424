"""Clusters: which workers there are, which one this process is, and collectives among them."""

from .._export import export_public
from ._closures import ClosureEngine as ClosureEngine
from ._closures import ClosureTask as ClosureTask
from ._closures import ClosureWorker as ClosureWorker
from ._closures import StateHandle as StateHandle
from ._closures import Submission as Submission
from ._closures import WorkerInfo as WorkerInfo
from ._closures import current_worker_index as current_worker_index
from ._communicator import Communicator as Communicator
from ._communicator import CommunicatorStatistics as CommunicatorStatistics
from ._connect import connect as connect
from ._dask import DaskClosureEngine as DaskClosureEngine
from ._environment import is_added as is_added
from ._environment import resolve as resolve
from ._local import LocalCommunicator as LocalCommunicator
from ._local_closures import LocalClosureEngine as LocalClosureEngine
from ._mpi import MpiCommunicator as MpiCommunicator
from ._resolver import ClusterResolver as ClusterResolver
from ._run import WorkersRun as WorkersRun
from ._torch import TorchCommunicator as TorchCommunicator
from ._workers import Workers as Workers

__all__ = [
    "ClosureEngine",
    "ClosureTask",
    "ClosureWorker",
    "ClusterResolver",
    "Communicator",
    "CommunicatorStatistics",
    "DaskClosureEngine",
    "LocalClosureEngine",
    "LocalCommunicator",
    "MpiCommunicator",
    "StateHandle",
    "Submission",
    "TorchCommunicator",
    "WorkerInfo",
    "connect",
    "current_worker_index",
    "resolve",
]

export_public(__name__, __all__, globals())
