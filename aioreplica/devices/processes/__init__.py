"""Devices whose lanes are worker processes: starting them, what travels, what it travels in.

Imported when the first of them gets an op: it needs cloudpickle.
"""

from ..._export import export_public
from ._process import RemoteTracebackError as RemoteTracebackError
from ._process import WorkerProcess as WorkerProcess

__all__ = ["RemoteTracebackError", "WorkerProcess"]

export_public(__name__, __all__, globals())
