"""Online learning: examples queued and journalled, learned as they come, snapshots served."""

from .._export import export_public
from ._example import ExampleSpec as ExampleSpec
from ._folder_source import FolderSource as FolderSource
from ._generations import roll_back_closed as roll_back_closed
from ._journal import Journal as Journal
from ._learner import OnlineLearner as OnlineLearner
from ._migration import Migration as Migration
from ._prequential import Prequential as Prequential
from ._published import PublishedSnapshot as PublishedSnapshot
from ._published import SnapshotReader as SnapshotReader
from ._published import publish_snapshot as publish_snapshot
from ._records import DeadLetter as DeadLetter
from ._records import ReplicaTiming as ReplicaTiming
from ._records import StepRecord as StepRecord
from ._serving import Candidate as Candidate
from ._serving import StepLimits as StepLimits
from ._sources import Source as Source
from ._statistics import LearnerStatistics as LearnerStatistics
from ._ticket import RecordStream as RecordStream
from ._ticket import Ticket as Ticket

__all__ = [
    "DeadLetter",
    "ExampleSpec",
    "FolderSource",
    "Journal",
    "LearnerStatistics",
    "Migration",
    "OnlineLearner",
    "Prequential",
    "SnapshotReader",
    "StepLimits",
    "StepRecord",
    "Ticket",
    "publish_snapshot",
]

export_public(__name__, __all__, globals())
