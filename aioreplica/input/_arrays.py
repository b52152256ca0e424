"""Leaves of a batch as NumPy arrays, and batches that are what they have to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..devices.backends import find_backends
from ..tree import TreeSpec, flatten, paths

Array = npt.NDArray[Any]


def to_array(leaf: Any, path: str) -> Array:
    """Return a leaf as a NumPy array, without a copy where its library allows it.

    Raises:
        TypeError: If it is no array, or has a mask.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"Leaf {path} is a {type(leaf).__name__}, whose mask would be lost. Fill it with "
            "leaf.filled(value), and pass the mask as a leaf of its own if the step needs it."
        )
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf)  # a subclass becomes the array it is made of
    for backend in find_backends():
        if backend.owns(leaf):
            return np.asarray(backend.get(leaf))
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Leaf {path} is a {type(leaf).__name__}, which NumPy cannot read ({error}). Convert "
            "it to a NumPy array in the source."
        ) from error
    if array.dtype.hasobject and not isinstance(leaf, (list, tuple)):
        raise TypeError(
            f"Leaf {path} is a {type(leaf).__name__}, which is no array. Batches are pytrees of "
            "arrays; drop it, or convert it in the source."
        )
    return array


@final
class BatchReader:
    """Reads the batches of one pass: arrays with one leading axis, always in one structure.

    Args:
        what: What a batch is called in messages, such as "global batch".
        label: Where the batches come from.
    """

    __slots__ = ("_label", "_num_read", "_spec", "_what")

    def __init__(self, what: str, label: str) -> None:
        self._what = what
        self._label = label
        self._num_read = 0
        self._spec: TreeSpec | None = None

    @property
    def name(self) -> str:
        """What to call the batch that was read last."""
        return self._named(self._num_read - 1)

    def read(self, batch: Any) -> tuple[list[Array], TreeSpec]:
        """Return the leaves of a batch, all of one length, and its structure.

        Raises:
            ValueError: If leaves differ in length or are scalars, there is none, or the structure
                is not that of the batches before.
            TypeError: If a leaf is no array.
        """
        leaves, spec = flatten(batch)
        if spec != self._spec:
            if self._spec is not None:
                raise ValueError(
                    f"{self._named(self._num_read)} has the structure {spec}, but those before it "
                    f"had {self._spec}. Make the source yield one structure."
                )
            self._spec = spec
        arrays = [
            leaf if type(leaf) is np.ndarray else to_array(leaf, paths(batch)[i])
            for i, leaf in enumerate(leaves)
        ]
        length = arrays[0].shape[0] if arrays and arrays[0].ndim else None
        for array in arrays:
            if length is None or array.ndim == 0 or array.shape[0] != length:
                raise ValueError(self._uneven(batch, arrays))
        if length is None:
            raise ValueError(self._uneven(batch, arrays))
        self._num_read += 1
        return arrays, spec

    def _named(self, number: int) -> str:
        return f"{self._what.capitalize()} {number} of {self._label}"

    def _uneven(self, batch: Any, arrays: Sequence[Array]) -> str:
        named = ", ".join(f"{p}: {a.shape}" for p, a in zip(paths(batch), arrays, strict=True))
        if any(array.ndim == 0 for array in arrays):
            advice = " If the source yields single examples: ar.Dataset(source).batch(batch_size)."
        else:
            advice = " Make the source yield arrays with one row per example."
        return (
            f"{self._named(self._num_read)} needs leaves with one common leading axis, got "
            f"{named or 'no leaf'}.{advice}"
        )
