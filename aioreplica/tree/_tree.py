"""Pytrees over optree: which containers are opened, settings all code must share, and JSON.

Two settings are made here and nowhere else: None is a leaf (a replica that returns None differs
from one that returns nothing), and types are looked up in namespaces of our own, so that
registering a node for aioreplica cannot change another library.

Every `collections.abc.Mapping` is a container, as a dict is: subclasses of dict, UserDict and the
like. optree looks types up exactly, so each kind is taught when the first one is seen.

There are two namespaces. Users see `PUBLIC`, where distributed values are nodes like any
container. Inside the library `OPAQUE` is used, where they stay leaves: unwrapping one must find
the value itself, not its components.
"""

from __future__ import annotations

import base64
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import optree

PUBLIC = "aioreplica"
OPAQUE = "aioreplica.opaque"

Array: TypeAlias = npt.NDArray[Any]  # of any dtype
DType: TypeAlias = np.dtype[Any]
TreeSpec: TypeAlias = optree.PyTreeSpec
Tree: TypeAlias = Any  # a nested structure has no static type

LEAF_TYPES = frozenset(
    {np.ndarray, float, int, bool, complex, str, bytes, type(None), np.float32, np.float64}
)
"""Exact types that are certainly leaves: the fast path of regrouping skips optree for them."""


class Leaf:
    """Base of mappings that are leaves all the same."""

    __slots__ = ()


def register_node(
    cls: type[Any],
    flatten_fn: Callable[[Any], tuple[Iterable[object], object]],
    unflatten_fn: Callable[[Any, Iterable[Any]], Any],
    *,
    opaque: bool = False,
) -> None:
    """Teach the library to look inside instances of `cls`.

    Args:
        cls: The container type. Registering one twice is an error.
        flatten_fn: Gives `(children, metadata)`; metadata must be hashable and comparable.
        unflatten_fn: Rebuilds an instance from `(metadata, children)`.
        opaque: Keep instances whole inside the library (for distributed values).

    Raises:
        ValueError: If `cls` is registered already; a mapping is once an instance was seen.
    """

    def with_entries(node: object) -> tuple[Iterable[object], object, None]:
        children, metadata = flatten_fn(node)
        return children, metadata, None

    optree.register_pytree_node(cls, with_entries, unflatten_fn, namespace=PUBLIC)
    if not opaque:
        optree.register_pytree_node(cls, with_entries, unflatten_fn, namespace=OPAQUE)


def flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of `tree` and its structure; None and distributed values are leaves.

    A bare leaf, and a list, tuple or dict of nothing but leaves, are told from their types alone:
    looking every leaf up in the registry would take five times longer.
    """
    kind = type(tree)
    if kind in LEAF_TYPES:
        return [tree], LEAF_SPEC
    if kind is list or kind is tuple:
        if LEAF_TYPES.issuperset(map(type, tree)):
            return list(tree), _list_spec(len(tree)) if kind is list else _tuple_spec(len(tree))
    elif kind is dict and LEAF_TYPES.issuperset(map(type, tree.values())):
        known = _dict_spec(tuple(tree))
        if known is not None:
            return list(map(tree.__getitem__, known[0])), known[1]
    return _flatten(tree)


def flatten_arrays(tree: Tree) -> tuple[list[object], TreeSpec] | None:
    """Flatten a list, tuple or dict of nothing but NumPy arrays; None for all other trees."""
    kind = type(tree)
    if kind is dict:
        if set(map(type, tree.values())) != _ARRAYS:
            return None
        known = _dict_spec(tuple(tree))
        return None if known is None else (list(map(tree.__getitem__, known[0])), known[1])
    if (kind is not list and kind is not tuple) or set(map(type, tree)) != _ARRAYS:
        return None
    return list(tree), _list_spec(len(tree)) if kind is list else _tuple_spec(len(tree))


def _flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    found, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPAQUE)
    for kind in set(map(type, found)):
        if kind not in LEAF_TYPES and _is_mapping(kind):
            _teach_mapping(kind)
            return _flatten(tree)
    return found, spec


def _teach_mapping(kind: type[Any]) -> None:
    """Register a kind of mapping, so that it is a leaf no more."""
    rebuild = functools.partial(_new_mapping, kind)
    for namespace in (OPAQUE, PUBLIC):
        with suppress(ValueError):  # another thread, or the program, was here before
            optree.register_pytree_node(kind, _open_mapping, rebuild, namespace=namespace)


@functools.lru_cache(maxsize=1024)
def _is_mapping(kind: type[object]) -> bool:
    return issubclass(kind, Mapping) and not issubclass(kind, Leaf)


@final
class _Keys:
    """The keys of a mapping as it had them; equal if they are the same in any order."""

    __slots__ = ("given", "sorted")

    def __init__(self, given: Sequence[Any], *, is_ordered: bool) -> None:
        self.given = tuple(given)
        try:
            self.sorted = self.given if is_ordered else tuple(sorted(given))
        except TypeError:  # of several types
            self.sorted = self.given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keys) and self.sorted == other.sorted

    def __hash__(self) -> int:
        return hash(self.sorted)

    def __repr__(self) -> str:
        return repr(list(self.given))


def _open_mapping(mapping: Any) -> tuple[list[object], _Keys, tuple[object, ...]]:
    keys = _Keys(list(mapping), is_ordered=isinstance(mapping, OrderedDict))
    return [mapping[key] for key in keys.sorted], keys, keys.sorted


def _new_mapping(kind: type[Any], keys: _Keys, children: Iterable[object]) -> Any:
    by_key = dict(zip(keys.sorted, children, strict=True))
    items = {key: by_key[key] for key in keys.given}
    try:
        made = kind(items)
    except Exception:  # noqa: BLE001 - it is not made from a dict, whatever that raises
        return items
    return made if isinstance(made, Mapping) and len(made) == len(items) else items


@functools.lru_cache(maxsize=1024)
def _list_spec(size: int) -> TreeSpec:
    return _flatten([0] * size)[1]


@functools.lru_cache(maxsize=1024)
def _tuple_spec(size: int) -> TreeSpec:
    return _flatten((0,) * size)[1]


@functools.lru_cache(maxsize=1024)
def _dict_spec(keys: tuple[object, ...]) -> tuple[list[str], TreeSpec] | None:
    """Return the keys in the order of the leaves, and the structure; None unless all are str."""
    if set(map(type, keys)) != _STR:  # 1 and True are equal as keys, but not the same structure
        return None
    return _flatten({key: key for key in keys})


LEAF_SPEC: TreeSpec = _flatten(0)[1]
"""The structure of a bare leaf."""

_STR = {str}
_ARRAYS = {np.ndarray}


def unflatten(spec: TreeSpec, new_leaves: Sequence[object]) -> Tree:
    """Rebuild a tree of the given structure."""
    if spec.type is list and spec.num_nodes == len(new_leaves) + 1 == spec.num_leaves + 1:
        return list(new_leaves)
    return optree.tree_unflatten(spec, new_leaves)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of `tree` in the order of `flatten`."""
    return _flatten(tree)[0]


def map_leaves(fn: Callable[[Any], object], tree: Tree) -> Tree:
    """Apply `fn` to every leaf and keep the structure.

    Example:
        >>> map_leaves(lambda x: x * 2, {"a": 1, "b": (2, 3)})
        {'a': 2, 'b': (4, 6)}
    """
    if type(tree) in LEAF_TYPES:
        return fn(tree)
    found, spec = _flatten(tree)
    return optree.tree_unflatten(spec, map(fn, found))


def map_nodes(cls: type[object], fn: Callable[[Any], object], tree: Tree) -> Tree:
    """Replace every container of type `cls`, as a whole, by what `fn` makes of it.

    Example:
        >>> map_nodes(tuple, sum, {"a": (1, 2), "b": [3]})
        {'a': 3, 'b': [3]}
    """

    def is_one(part: object) -> bool:
        return type(part) is cls

    return optree.tree_map(
        lambda part: fn(part) if is_one(part) else part,
        tree,
        is_leaf=is_one,
        none_is_leaf=True,
        namespace=OPAQUE,
    )


def paths(tree: Tree) -> list[str]:
    """Return a readable path per leaf, such as "['w'][0]", or "value" for a bare leaf.

    Example:
        >>> paths({"w": [1, 2]})
        ["['w'][0]", "['w'][1]"]
    """
    return paths_of(_flatten(tree)[1])


def paths_of(spec: TreeSpec) -> list[str]:
    """Return the path of each leaf of a structure, as `paths` does."""
    return [accessor.codify("") or "value" for accessor in spec.accessors()]


def describe_structure(spec: TreeSpec) -> str:
    """Return a structure as text, with an asterisk for each leaf.

    Example:
        >>> describe_structure(flatten({"w": [1, (2,)]})[1])
        "{'w': [*, (*,)]}"
    """
    return str(spec).removeprefix("PyTreeSpec(").split(", NoneIsLeaf")[0]


def flatten_one_level(
    tree: Tree,
) -> tuple[list[object], Callable[[Sequence[object]], Tree], object] | None:
    """Open one container: its children, a rebuilder, and a comparable description of its kind.

    Returns:
        None for a leaf. The description is equal for containers of the same type and keys.
    """
    spec = _flatten(tree)[1]
    if spec.is_leaf():
        return None
    one_level = spec.one_level()
    assert one_level is not None  # a spec that is not a leaf has one
    children = optree.tree_flatten_one_level(tree, none_is_leaf=True, namespace=OPAQUE)[0]
    return list(children), lambda parts: optree.tree_unflatten(one_level, parts), one_level


_PLAIN = frozenset({str, int, bool, type(None)})


def encode(tree: Tree, leaf: Callable[[Any], object]) -> Any:
    """Return a tree of numbers, text, bytes, None, lists, tuples and dicts as JSON has it.

    Args:
        tree: The tree. Types are compared exactly.
        leaf: Returns the JSON of everything else, such as arrays, or raises.

    Example:
        >>> encode({"rate": 0.5, "shape": (2, 3)}, repr)
        {'rate': 0.5, 'shape': {'$tuple': [2, 3]}}
    """
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is float:
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if kind is list:
        return [encode(child, leaf) for child in tree]
    if kind is tuple:
        return {"$tuple": [encode(child, leaf) for child in tree]}
    if kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in tree):
            return {name: encode(child, leaf) for name, child in tree.items()}
        return {"$items": [[encode(each, leaf) for each in item] for item in tree.items()]}
    return {"$bytes": base64.b64encode(tree).decode()} if kind is bytes else leaf(tree)


def decode(found: object, arrays: Any) -> Tree:
    """Return the tree that was encoded; anything else than its JSON is an error of any kind.

    Args:
        found: What JSON has.
        arrays: The arrays, by number or name.

    Example:
        >>> decode({"shape": {"$tuple": [2, {"$float": "inf"}]}}, [])
        {'shape': (2, inf)}
    """
    if isinstance(found, list):
        return [decode(child, arrays) for child in found]
    if not isinstance(found, dict):
        return found
    if len(found) == 1:
        [(tag, content)] = found.items()
        if tag == "$tuple":
            return tuple(decode(content, arrays))
        if tag in {"$tensor", "$array"}:
            return arrays[content]
        if tag == "$scalar":
            return arrays[content][()]
        if tag == "$float":
            return float(content)
        if tag == "$complex":
            return complex(content)
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$items":
            return {decode(name, arrays): decode(child, arrays) for name, child in content}
    return {name: decode(child, arrays) for name, child in found.items()}
