"""Devices whose lanes are processes: starting them, what travels, what it travels in.

Imported when the first of them gets an op: it needs cloudpickle.
"""

from ._parcel import dumps as dumps
from ._parcel import dumps_pair as dumps_pair
from ._parcel import loads as loads
from ._parcel import loads_pair as loads_pair
from ._parcel import obstacle as obstacle
from ._parcel import put_apart as put_apart
from ._process import DeviceProcess as DeviceProcess
from ._process import RemoteTracebackError as RemoteTracebackError

__all__ = ()
