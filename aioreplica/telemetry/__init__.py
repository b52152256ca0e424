"""What happened: the ring recorder of merges, and the log of events."""

from .._export import export_public
from ._events import Event as Event
from ._events import EventLog as EventLog
from ._recorder import CollectiveRecord as CollectiveRecord
from ._recorder import MergeRecord as MergeRecord
from ._recorder import Recorder as Recorder
from ._recorder import source_line as source_line

__all__ = ["CollectiveRecord", "Event", "EventLog", "MergeRecord", "Recorder", "source_line"]

export_public(__name__, __all__, globals())
