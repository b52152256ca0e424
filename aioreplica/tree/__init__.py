"""Pytrees: nested containers of values, over optree in a namespace of our own."""

from .._export import export_public
from ._tree import LEAF_TYPES as LEAF_TYPES
from ._tree import TreeSpec as TreeSpec
from ._tree import flatten as flatten
from ._tree import flatten_one_level as flatten_one_level
from ._tree import leaves as leaves
from ._tree import map_leaves as map_leaves
from ._tree import paths as paths
from ._tree import register_node as register_node
from ._tree import unflatten as unflatten

__all__ = [
    "LEAF_TYPES",
    "flatten",
    "flatten_one_level",
    "leaves",
    "map_leaves",
    "paths",
    "register_node",
    "unflatten",
]

export_public(__name__, __all__, globals())
