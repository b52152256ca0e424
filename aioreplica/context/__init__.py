"""Context of running code: the context variables, and the one registry of the process."""

from .._export import export_public
from ._place import AWAITED_BY as AWAITED_BY
from ._place import BESIDE as BESIDE
from ._place import CARRIER as CARRIER
from ._place import CLOSURE as CLOSURE
from ._place import CLUSTER as CLUSTER
from ._place import CREATORS as CREATORS
from ._place import DEFAULT_PLACE as DEFAULT_PLACE
from ._place import DEVICE as DEVICE
from ._place import DIFFERENTIATING as DIFFERENTIATING
from ._place import INLINE_STEP as INLINE_STEP
from ._place import LOOP as LOOP
from ._place import OVERRIDES as OVERRIDES
from ._place import PLACE as PLACE
from ._place import STAGE as STAGE
from ._place import TRACE as TRACE
from ._place import Carrier as Carrier
from ._place import CurrentReplica as CurrentReplica
from ._place import CurrentStrategy as CurrentStrategy
from ._place import LoopStep as LoopStep
from ._place import Place as Place
from ._place import get_update_replica_id as get_update_replica_id
from ._place import in_cross_replica_context as in_cross_replica_context
from ._registry import REGISTRY as REGISTRY
from ._registry import Living as Living
from ._registry import Registry as Registry

__all__ = [
    "get_update_replica_id",
    "in_cross_replica_context",
]

export_public(__name__, __all__, globals())
