"""Trees as JSON: the one codec of checkpoints, journals, and values sent to other workers.

What JSON has stays as it is. Anything else is an object with one member, whose name begins with
`$`:

    $float     NaN or an infinity, as text
    $bytes     bytes, in base64
    $tuple     the members of a tuple
    $items     keys and values of a dict with a key that is not text, or begins with `$`
    $tensor    an array, by its number among those stored beside the text
    $scalar    a NumPy scalar, likewise
    $array     an array by its name, in journals

Nothing here is ever executed, unlike a pickle. Tests read files that older versions have written.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

from ._tree import Tree

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
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$items":
            return {decode(name, arrays): decode(child, arrays) for name, child in content}
    return {name: decode(child, arrays) for name, child in found.items()}
