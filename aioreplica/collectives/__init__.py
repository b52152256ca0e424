"""Collectives on arrays: reduce and gather over replicas, in replica order."""

from .._export import export_public
from ._across import Carry as Carry
from ._across import Summands as Summands
from ._across import Turn as Turn
from ._across import Wire as Wire
from ._across import broadcast_arrays as broadcast_arrays
from ._across import broadcast_bytes as broadcast_bytes
from ._across import gather_across as gather_across
from ._across import gather_bytes as gather_bytes
from ._across import join_across as join_across
from ._across import join_run as join_run
from ._across import no_data as no_data
from ._across import reduce_across as reduce_across
from ._across import reduce_summands as reduce_summands
from ._across import reduces_to_itself as reduces_to_itself
from ._across import runs_of as runs_of
from ._across import share_totals as share_totals
from ._across import widen_halves as widen_halves
from ._compression import Compressed as Compressed
from ._compression import Compression as Compression
from ._compression import Float16 as Float16
from ._compression import TopK as TopK
from ._kind import array_like as array_like
from ._kind import narrowed as narrowed
from ._kind import pieces as pieces
from ._kind import reduce_slices as reduce_slices
from ._kind import require_dense as require_dense
from ._kind import share as share
from ._kind import share_cut as share_cut
from ._plain_tree import broadcast_tree as broadcast_tree
from ._plain_tree import packed_tree as packed_tree
from ._plan import BufferPool as BufferPool
from ._plan import Job as Job
from ._plan import deal as deal
from ._plan import num_threads as num_threads
from ._plan import run_here as run_here
from ._plan import run_on_threads as run_on_threads
from ._reduce import concatenate as concatenate
from ._reduce import extreme_over_axis as extreme_over_axis
from ._reduce import gather_difference as gather_difference
from ._reduce import leaf_bytes as leaf_bytes
from ._reduce import leaf_difference as leaf_difference
from ._reduce import reduce_leaves as reduce_leaves
from ._reduce import reduce_over_axis as reduce_over_axis
from ._reduce import require_axis as require_axis
from ._reduce import require_reducible as require_reducible
from ._reducer import INLINE_SUM_BYTES as INLINE_SUM_BYTES
from ._reducer import CommunicationOptions as CommunicationOptions
from ._reducer import Reducer as Reducer
from ._reducer import require_options as require_options
from ._scattered import Dealt as Dealt
from ._scattered import gather_parts as gather_parts
from ._scattered import scatter_across as scatter_across
from ._sent import SLOT_BYTES as SLOT_BYTES
from ._sent import as_before as as_before
from ._sent import form_text as form_text
from ._sent import host_array as host_array
from ._sent import sent_text as sent_text

__all__ = [
    "CommunicationOptions",
    "Compression",
    "Float16",
    "TopK",
]

export_public(__name__, __all__, globals())
