"""Being told what happens: observers, the recorder, the log of events, sinks, traces."""

from .._export import export_public
from ._observer import KINDS as KINDS
from ._observer import Event as Event
from ._observer import MergeEntry as MergeEntry
from ._observer import MessageEntry as MessageEntry
from ._observer import ObservedCall as ObservedCall
from ._observer import ObservedCheckpoint as ObservedCheckpoint
from ._observer import ObservedMerge as ObservedMerge
from ._observer import ObservedMessage as ObservedMessage
from ._observer import ObservedOp as ObservedOp
from ._observer import ObservedRun as ObservedRun
from ._observer import ObservedWait as ObservedWait
from ._observer import Observer as Observer
from ._observer import Observers as Observers
from ._observer import ThreadWait as ThreadWait
from ._observer import Visit as Visit
from ._observer import observe_everywhere as observe_everywhere
from ._recorder import CollectiveRecord as CollectiveRecord
from ._recorder import MergeRecord as MergeRecord
from ._recorder import Recorder as Recorder
from ._recorder import Ring as Ring
from ._recorder import source_line as source_line
from ._sinks import EventLog as EventLog
from ._sinks import MemorySink as MemorySink
from ._sinks import checked_scalar as checked_scalar
from ._sinks import events_to as events_to
from ._sinks import log_observer as log_observer
from ._sinks import printable as printable
from ._statistics import BOUNDS_S as BOUNDS_S
from ._statistics import CollectiveTotals as CollectiveTotals
from ._statistics import ReplicaSkew as ReplicaSkew
from ._statistics import ReplicaWait as ReplicaWait
from ._statistics import Totals as Totals
from ._statistics import Usage as Usage
from ._statistics import UsageCounters as UsageCounters
from ._statistics import skew_of as skew_of
from ._statistics import straggler_text as straggler_text
from ._statistics import usage as usage

__all__ = [
    "CollectiveRecord",
    "Event",
    "EventLog",
    "MemorySink",
    "MergeRecord",
    "ObservedCall",
    "ObservedMerge",
    "ObservedOp",
    "ObservedRun",
    "ObservedWait",
    "Observer",
    "Observers",
    "Recorder",
    "ReplicaSkew",
    "ReplicaWait",
    "Usage",
    "events_to",
    "log_observer",
    "observe_everywhere",
    "usage",
]

export_public(__name__, __all__, globals())
