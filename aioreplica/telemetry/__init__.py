"""What happened: the ring recorder of merges, and the log of events."""

from .._export import export_public
from ._events import EventLog as EventLog
from ._observer import KINDS as KINDS
from ._observer import Event as Event
from ._observer import MergeEntry as MergeEntry
from ._observer import ObservedCall as ObservedCall
from ._observer import ObservedMerge as ObservedMerge
from ._observer import ObservedOp as ObservedOp
from ._observer import ObservedRun as ObservedRun
from ._observer import ObservedWait as ObservedWait
from ._observer import Observer as Observer
from ._observer import Observers as Observers
from ._observer import Visit as Visit
from ._observer import observe_everywhere as observe_everywhere
from ._recorder import CollectiveRecord as CollectiveRecord
from ._recorder import MergeRecord as MergeRecord
from ._recorder import Recorder as Recorder
from ._recorder import source_line as source_line

__all__ = [
    "KINDS",
    "CollectiveRecord",
    "Event",
    "EventLog",
    "MergeEntry",
    "MergeRecord",
    "ObservedCall",
    "ObservedMerge",
    "ObservedOp",
    "ObservedRun",
    "ObservedWait",
    "Observer",
    "Observers",
    "Recorder",
    "Visit",
    "observe_everywhere",
    "source_line",
]

export_public(__name__, __all__, globals())
