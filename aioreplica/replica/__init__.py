"""Replicas: the rendezvous they meet in, the group that runs them, the context they see."""

from .._export import export_public
from ._blocking import BlockingCollectives as BlockingCollectives
from ._blocking import BlockingContext as BlockingContext
from ._blocking import BlockingGroup as BlockingGroup
from ._blocking import run_device_program as run_device_program
from ._collectives import INFEED as INFEED
from ._collectives import Collectives as Collectives
from ._context import GroupContext as GroupContext
from ._context import ReplicaContext as ReplicaContext
from ._context import RunningReplica as RunningReplica
from ._errors import format_rows as format_rows
from ._errors import unless_asked_for as unless_asked_for
from ._exchanges import Along as Along
from ._exchanges import Broadcast as Broadcast
from ._exchanges import all_gather_named as all_gather_named
from ._failure import add_note_once as add_note_once
from ._failure import cause_of_unwinding as cause_of_unwinding
from ._failure import shown as shown
from ._group import ReplicaGroup as ReplicaGroup
from ._group import running_ops as running_ops
from ._group import waits_of as waits_of
from ._handle import Handle as Handle
from ._meeting import Call as Call
from ._meeting import CallSite as CallSite
from ._meeting import Collective as Collective
from ._meeting import Generation as Generation
from ._meeting import Parts as Parts
from ._meeting import SyncGroup as SyncGroup
from ._meeting import collective_named as collective_named
from ._meeting_point import MeetingPoint as MeetingPoint
from ._merge_call import Once as Once
from ._merge_call import update_variable as update_variable
from ._messages import SEND_BOUND as SEND_BOUND
from ._pending import Outcome as Outcome
from ._pending import Pending as Pending
from ._process_context import ProcessContext as ProcessContext
from ._reductions import STARTED_ALL_REDUCE as STARTED_ALL_REDUCE
from ._reductions import Reducing as Reducing
from ._reductions import Reduction as Reduction
from ._reductions import all_reduce_named as all_reduce_named
from ._reductions import payload_along as payload_along
from ._reductions import payload_of as payload_of
from ._reductions import payload_of_numbers as payload_of_numbers
from ._reductions import reduce_scatter_named as reduce_scatter_named
from ._rendezvous import Mismatch as Mismatch
from ._rendezvous import Rendezvous as Rendezvous
from ._rendezvous import ReplicaState as ReplicaState
from ._replica import random_stream as random_stream
from ._signature import joined_text as joined_text
from ._signature import payload_signature as payload_signature
from ._signature import summand_text as summand_text
from ._stall import QuietWatch as QuietWatch

__all__ = [
    "BlockingCollectives",
    "BlockingContext",
    "BlockingGroup",
    "Collectives",
    "GroupContext",
    "Handle",
    "ReplicaContext",
]

export_public(__name__, __all__, globals())
