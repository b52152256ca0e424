"""Devices whose lanes are worker processes: starting them, what travels, what it travels in.

Imported when the first of them gets an op: it needs cloudpickle.
"""

from ._parcel import dumps as dumps
from ._parcel import find_obstacle as find_obstacle
from ._process import RemoteTracebackError as RemoteTracebackError
from ._process import WorkerProcess as WorkerProcess
from ._worker import kind_of as kind_of

__all__ = ()
