"""What happened: the ring recorder of merges."""

from .._export import export_public
from ._recorder import CollectiveRecord as CollectiveRecord
from ._recorder import MergeRecord as MergeRecord
from ._recorder import Recorder as Recorder
from ._recorder import source_line as source_line

__all__ = ["CollectiveRecord", "MergeRecord", "Recorder", "source_line"]

export_public(__name__, __all__, globals())
