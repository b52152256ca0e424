"""Clusters: which workers there are, which one this process is, and collectives among them."""

from .._export import export_public
from ._communicator import Communicator as Communicator
from ._communicator import CommunicatorStatistics as CommunicatorStatistics
from ._connect import connect as connect
from ._environment import resolve as resolve
from ._local import LocalCommunicator as LocalCommunicator
from ._mpi import MpiCommunicator as MpiCommunicator
from ._resolver import ClusterResolver as ClusterResolver
from ._torch import TorchCommunicator as TorchCommunicator
from ._turns import WorkersRun as WorkersRun
from ._workers import Workers as Workers

__all__ = [
    "ClusterResolver",
    "Communicator",
    "CommunicatorStatistics",
    "LocalCommunicator",
    "MpiCommunicator",
    "TorchCommunicator",
    "Workers",
    "WorkersRun",
    "connect",
    "resolve",
]

export_public(__name__, __all__, globals())
