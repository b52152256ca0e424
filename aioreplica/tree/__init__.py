"""Pytrees: nested containers of values, over optree in a namespace of our own."""

from ._tree import LEAF_SPEC as LEAF_SPEC
from ._tree import LEAF_TYPES as LEAF_TYPES
from ._tree import Array as Array
from ._tree import DType as DType
from ._tree import Leaf as Leaf
from ._tree import Tree as Tree
from ._tree import TreeSpec as TreeSpec
from ._tree import decode as decode
from ._tree import describe_structure as describe_structure
from ._tree import encode as encode
from ._tree import flatten as flatten
from ._tree import flatten_arrays as flatten_arrays
from ._tree import flatten_one_level as flatten_one_level
from ._tree import leaves as leaves
from ._tree import map_leaves as map_leaves
from ._tree import map_nodes as map_nodes
from ._tree import paths as paths
from ._tree import paths_of as paths_of
from ._tree import register_node as register_node
from ._tree import unflatten as unflatten

__all__ = ()
