"""Signature of a call, which must be equal on all workers: text that is equal in every process.

The replicas of one worker compare what they bring itself. Workers compare a hash of this text, so
it says exactly what decides there: kinds, dtypes, shapes and constants, and nothing that belongs to
one process, such as addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from hashlib import blake2b
from types import MethodType
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj

from ..collectives import sent_text
from ..devices.backends import backend_of
from ..tree import LEAF_SPEC, describe_structure, flatten
from ..values import IndexedSlices, Variable, is_floating


def payload_signature(leaves: Sequence[object], spec: Any, leaf_text: Callable[[Any], str]) -> str:
    """Return the structure of a tree with a text per leaf."""
    if spec is LEAF_SPEC:
        return leaf_text(leaves[0])
    return f"{describe_structure(spec)}: {', '.join(map(leaf_text, leaves))}"


def summand_text(leaf: Any) -> str:
    """Describe a leaf that is reduced: by what is sent of it, and its library."""
    if is_array_api_obj(leaf) and not isinstance(leaf, (np.ndarray, np.generic)):
        return array_text(leaf, leaf.shape)
    return sent_text(leaf)


def joined_text(leaf: Any, axis: int) -> str:
    """Describe a leaf that is joined along an axis, whose size may differ."""
    shape = list(np.shape(leaf))
    shape[axis] = -1
    return array_text(leaf, shape)


def array_text(leaf: Any, shape: Sequence[int]) -> str:
    """Describe an array of any library."""
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{list(shape)}"
    if is_array_api_obj(leaf) and not isinstance(leaf, np.generic):
        return f"{backend_of(leaf).name} {leaf.dtype}{list(shape)}"
    return f"{np.asarray(leaf).dtype}{list(shape)}"


def function_text(fn: object) -> str:
    """Name a function, through partials and methods, by module, name and line."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            break
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    line = "" if code is None else f":{code.co_firstlineno}"
    return f"{getattr(fn, '__module__', None)}.{name}{line}"


def arguments_text(args: Sequence[object], kwargs: dict[str, object] | None) -> str:
    """Describe the arguments of a merge function: structures, constants and variables."""
    texts = [_argument_text(value) for value in args]
    texts += [f"{name}={_argument_text(value)}" for name, value in sorted((kwargs or {}).items())]
    return f"({', '.join(texts)})"


def value_text(value: object) -> str:
    """Describe a value that has to be equal, by its bits; long ones by a hash of them."""
    leaves, spec = flatten(value)
    return payload_signature(leaves, spec, _equal_text)


def equal_values(first: object, other: object) -> bool:
    """Tell whether two values are equal: structures, dtypes, shapes and numbers; NaN equals NaN."""
    leaves, spec = flatten(first)
    other_leaves, other_spec = flatten(other)
    return spec == other_spec and all(map(_equal_leaves, leaves, other_leaves))


def _argument_text(value: object) -> str:
    leaves, spec = flatten(value)
    return payload_signature(leaves, spec, _constant_text)


def _constant_text(leaf: object) -> str:
    if isinstance(leaf, Variable):
        return f"variable {leaf.name!r}"
    if isinstance(leaf, (str, bytes, Enum)):
        return repr(leaf)
    if isinstance(leaf, type) or (callable(leaf) and hasattr(leaf, "__qualname__")):
        return function_text(leaf)
    return "*"


def _equal_text(leaf: object) -> str:
    parts = _parts(leaf)
    if len(parts) > 1:
        return f"{type(leaf).__name__} of {', '.join(map(_equal_text, parts))}"
    found = _array_of(leaf)
    if found is not None:
        array = _with_one_nan(found)
        text = f"{type(leaf).__name__} {array_text(leaf, array.shape)}"
        if not array.ndim or array.dtype.char in "OTgG":  # whose bytes are addresses, or have gaps
            return f"{text} {array.tolist()!r}"
        digest = blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
        return f"{text} #{digest}"
    if isinstance(leaf, (str, bytes, bool, int, Enum)) or leaf is None:
        return repr(leaf)
    if isinstance(leaf, (set, frozenset)):  # which have another order in each process
        return f"{type(leaf).__name__} {sorted(map(repr, leaf))}"
    return _constant_text(leaf) if _constant_text(leaf) != "*" else repr(leaf)


def _equal_leaves(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    ours, theirs = _parts(a), _parts(b)
    if len(ours) > 1:
        return all(map(_equal_leaves, ours, theirs))
    x, y = _array_of(a), _array_of(b)
    if x is None or y is None:
        return bool(a == b)
    if array_text(a, x.shape) != array_text(b, y.shape):
        return False
    return bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fcmM"))


def _parts(leaf: object) -> tuple[object, ...]:
    """Return what a leaf that is more than one array consists of, else the leaf alone."""
    if isinstance(leaf, IndexedSlices):
        return leaf.values, leaf.indices, leaf.dense_shape
    if isinstance(leaf, np.ma.MaskedArray):
        return np.ma.getmaskarray(leaf), leaf.filled(np.zeros((), leaf.dtype).item())
    return (leaf,)


def _array_of(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Return an array of any library, or a number with a point, as NumPy's; None for the rest."""
    if isinstance(leaf, (np.ndarray, np.generic, float, complex)):
        array = np.asarray(leaf)
    elif is_array_api_obj(leaf):
        array = backend_of(leaf).get(leaf)
    else:
        return None
    is_half = array.dtype.kind == "V" and is_floating(array.dtype)  # bfloat16 of jax
    return array.astype(np.float32) if is_half else array


def _with_one_nan(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array whose NaNs have the same bits, and whose zeros have no sign."""
    if array.dtype.kind not in "fc":
        return array
    return np.asarray(np.where(np.isnan(array), array.dtype.type(np.nan), array) + 0)
