"""Numbers of 64 bits where jax computes in 32: refused before it cuts them, or failing the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ContextError
from ...tree import DType, flatten, unflatten
from ...values import Variable

Traced: TypeAlias = jax.Array

WIDEN = 'Call jax.config.update("jax_enable_x64", True) at program start.'
"""What to do about numbers that need 64 bits."""


def may_wrap(variable: Variable) -> bool:
    """Tell whether a variable is of integers that jax computes in fewer bits."""
    return is_cut(variable.dtype)


def require_own_dtype(variable: Variable) -> None:
    """Check that jax trains a variable in its own dtype.

    Raises:
        ContextError: If it is of 64 bits, and jax may not use 64.
    """
    dtype = variable.dtype
    if variable.trainable and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ContextError(
            f"Variable {variable.name!r} has dtype {dtype}, which jax computes in 32 bits. "
            f"{WIDEN} Or make it of float32."
        )


def as_traced(value: object) -> Traced:
    """Return a number or an array as one of jax.

    Raises:
        OverflowError: If it is one of NumPy that jax would cut.
    """
    require_32_bits([value], "The step")
    return jnp.asarray(value)


def is_cut(dtype: Any) -> bool:
    """Tell whether jax gives another dtype than the integers of 64 bits that it is asked for."""
    try:
        asked = jnp.dtype(dtype)
    except TypeError:
        return True  # whatever it is
    return asked.kind in "iu" and bool(jax.dtypes.canonicalize_dtype(asked) != asked)


def require_32_bits(values: Iterable[object], holder: str) -> None:
    """Check that integers of NumPy are none that jax would cut, as it may not use 64 bits.

    Args:
        values: What to look at, also inside tuples, lists and dicts; others are left alone.
        holder: Who holds them, for the error.

    Raises:
        OverflowError: If one would be cut.
    """
    seen: dict[int, object] = {}  # each once: a list may hold itself
    found = list(values)
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (tuple, list)):
            found += value
        elif isinstance(value, dict):
            found += value.values()
        elif isinstance(value, (np.ndarray, np.integer)) and value.dtype.kind in "iu":
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            if dtype == value.dtype or not value.size:
                continue
            limits, least, most = np.iinfo(dtype), value.min(), value.max()
            if least < limits.min or most > limits.max:
                raise OverflowError(
                    f"{holder} holds {most if most > limits.max else least}, which {dtype} does "
                    f"not, in which jax computes. {WIDEN}"
                )


def widen_sums(outputs: Sequence[dict[str, Any]], names: Iterable[str]) -> None:
    """Give integers 64 bits whose sum over all replicas does not fit the 32 in which jax made them.

    Args:
        outputs: Of each replica, by name; changed.
        names: Those that are going to be summed.
    """
    for name in names:
        flat = [flatten(own[name]) for own in outputs]
        for i, leaf in enumerate(flat[0][0]):
            if leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < 4:
                continue  # smaller ones were chosen, and are summed as without compiling
            wide = np.int64 if leaf.dtype.kind == "i" else np.uint64
            total = np.sum([leaves[i] for leaves, _ in flat], axis=0, dtype=wide)
            if not np.array_equal(total, total.astype(leaf.dtype)):
                for leaves, _ in flat:
                    leaves[i] = leaves[i].astype(wide)
        for own, (leaves, spec) in zip(outputs, flat, strict=True):
            own[name] = unflatten(spec, leaves)


def halves_of(array: Traced) -> tuple[Traced, Traced]:
    """Return what integers of up to 32 bits are multiples of 2**16 of, and the rest."""
    wide = array if array.dtype.itemsize == 4 else array.astype(jnp.int32)
    return (wide >> 16).astype(jnp.int32), (wide & 0xFFFF).astype(jnp.int32)


def is_beyond(limits: DType, halves: Sequence[Traced]) -> Traced:
    """Tell whether an element of integers, given in halves, is one that a dtype does not hold."""
    high, info = halves[0] + (halves[1] >> 16), jnp.iinfo(limits)
    return ((high < info.min >> 16) | (high > info.max >> 16)).any()
