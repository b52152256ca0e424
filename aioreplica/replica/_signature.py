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
from ..values import Variable


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
    if isinstance(leaf, (np.ndarray, np.generic, float, complex)):
        array = np.asarray(leaf) + 0  # 0.0 and -0.0 are equal
        if not array.ndim:
            return f"{type(leaf).__name__} {array.item()!r}"
        digest = blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
        return f"{array.dtype}{list(array.shape)} #{digest}"
    if isinstance(leaf, (str, bytes, bool, int, Enum)) or leaf is None:
        return repr(leaf)
    return _constant_text(leaf) if _constant_text(leaf) != "*" else repr(leaf)
