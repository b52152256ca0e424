"""Checkpoints: a state saved between two steps, and put back whole."""

from .._export import export_public
from ._claims import read_listing as read_listing
from ._description import EntryDescription as EntryDescription
from ._description import StepDescription as StepDescription
from ._description import plain_data as plain_data
from ._description import plain_value as plain_value
from ._format import DTYPES as DTYPES
from ._format import Manifest as Manifest
from ._format import dtype_of as dtype_of
from ._format import tensors_header as tensors_header
from ._fsspec import FsspecStorage as FsspecStorage
from ._lock import FileLock as FileLock
from ._manager import CheckpointManager as CheckpointManager
from ._manager import wait_beside as wait_beside
from ._manager import waited_for as waited_for
from ._preemption import EXIT_CODE as EXIT_CODE
from ._reading import find_leftovers as find_leftovers
from ._reading import newest_whole as newest_whole
from ._restoring import MisfitError as MisfitError
from ._restoring import Restored as Restored
from ._restoring import relabelled as relabelled
from ._savepoint import Savepoint as Savepoint
from ._savepoint import model_variables as model_variables
from ._state import DescribedState as DescribedState
from ._state import State as State
from ._state import read_state as read_state
from ._statistics import SAVE_BOUNDS_S as SAVE_BOUNDS_S
from ._statistics import CheckpointStatistics as CheckpointStatistics
from ._storage import LocalStorage as LocalStorage
from ._storage import Sink as Sink
from ._storage import Source as Source
from ._storage import Storage as Storage
from ._writing import remove_leftover as remove_leftover
from ._writing import remove_step as remove_step

__all__ = [
    "EXIT_CODE",
    "CheckpointManager",
    "CheckpointStatistics",
    "EntryDescription",
    "FsspecStorage",
    "LocalStorage",
    "Restored",
    "Savepoint",
    "Sink",
    "Source",
    "StepDescription",
    "Storage",
    "model_variables",
]

export_public(__name__, __all__, globals())
