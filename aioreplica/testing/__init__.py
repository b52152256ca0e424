"""Deterministic schedules for async code: explore, replay, shrink and explain."""

from .._export import export_public
from ._errors import DeadlockError as DeadlockError
from ._errors import LeakError as LeakError
from ._errors import NondeterminismError as NondeterminismError
from ._errors import RealIOError as RealIOError
from ._errors import StarvationError as StarvationError
from ._errors import Wait as Wait
from ._exhaustive import exhaustive as exhaustive
from ._explore import cancel_everywhere as cancel_everywhere
from ._explore import explore as explore
from ._explore import replay as replay
from ._explore import run as run
from ._faults import Faults as Faults
from ._faults import fault_point as fault_point
from ._linearizable import History as History
from ._linearizable import linearizable as linearizable
from ._report import Failure as Failure
from ._report import Report as Report
from ._schedule import Schedule as Schedule
from ._schedule import schedules as schedules
from ._token import is_token_of as is_token_of
from ._trace import Step as Step

__all__ = [
    "DeadlockError",
    "Failure",
    "Faults",
    "History",
    "LeakError",
    "NondeterminismError",
    "RealIOError",
    "Report",
    "Schedule",
    "StarvationError",
    "Step",
    "Wait",
    "cancel_everywhere",
    "exhaustive",
    "explore",
    "fault_point",
    "linearizable",
    "replay",
    "run",
    "schedules",
]

export_public(__name__, __all__, globals())
