"""Compression: what is done to arrays on their way into and out of a reduction.

Inside one process nothing is sent, so compression only costs time there. It is for clusters, and
for trying out on one machine what it would do to a training run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from ..tree import Array, DType
from ..typing import ReduceOp
from ..values import IndexedSlices
from ._kind import require_sum

Key = tuple[int, object]  # replica id and index of the leaf, or what names it


class Compression(ABC):
    """A lossy code for floating-point arrays in a reduction.

    Subclasses say how to encode an array and how to decode the reduced code. With error feedback
    what a code loses is remembered per replica and leaf, and added to the next value, so that in
    the long run nothing is lost. Use one object per reduction: a loop's gradients, say.

    Args:
        error_feedback: Whether to remember what was lost.

    Source:
        Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error
        Feedback Fixes SignSGD" (2019).
    """

    def __init__(self, *, error_feedback: bool) -> None:
        self.error_feedback = bool(error_feedback)
        self._lost: dict[Key, Array] = {}

    @abstractmethod
    def encode(self, value: Array) -> Any:
        """Return the code of an array: an array or IndexedSlices, which can be summed."""

    @abstractmethod
    def decode(self, code: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return the array that a code, or a sum or mean of codes, stands for."""

    def take_lost(self, key: Key, shape: tuple[int, ...]) -> Array | None:
        """Take out what was lost before, to be added to a value of that shape; None if nothing.

        Raises:
            ValueError: If what was lost had another shape.
        """
        lost = self._lost.get(key)
        if lost is not None and lost.shape != shape:
            raise ValueError(
                f"{self!r} remembers what it lost of an array of shape {lost.shape}, but got shape "
                f"{shape}. Use one object per reduction."
            )
        return self._lost.pop(key, None)

    def lost(self, value: Array, code: Any) -> Array:
        """Return what a code loses of an array; nothing where that is not finite.

        A NaN or an infinity shows in the result, once. Remembered it would show for ever.
        """
        with np.errstate(invalid="ignore"):
            lost = np.asarray(value - self.decode(code, value.shape, value.dtype))
        lost[~np.isfinite(lost)] = 0
        return lost

    def remember(self, lost: Mapping[Key, Array]) -> None:
        """Add to what is remembered: what a reduction has lost, or took out and did not send."""
        for key, value in lost.items():
            before = self._lost.get(key)
            self._lost[key] = value if before is None else before + value

    def reset(self) -> None:
        """Forget what was lost."""
        self._lost.clear()


@final
class Float16(Compression):
    """Sends halves: 16 bits per number, reduced in float32 and rounded once.

    Args:
        error_feedback: Whether to remember what rounding lost.

    Example:
        >>> import numpy as np
        >>> Float16().encode(np.array([1.0, 2.0])).dtype
        dtype('float16')
    """

    def __init__(self, *, error_feedback: bool = False) -> None:
        super().__init__(error_feedback=error_feedback)

    def encode(self, value: Array) -> Any:
        """Round to half precision; what is too large becomes infinite."""
        with np.errstate(over="ignore"):
            return value.astype(np.float16)

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """Widen again."""
        widened: Array = code.astype(dtype)
        return widened

    def __repr__(self) -> str:
        return f"Float16(error_feedback={self.error_feedback})"


@final
class TopK(Compression):
    """Sends the numbers of largest magnitude and keeps the rest for later steps.

    Args:
        fraction: Which part of each array is sent, above 0 and at most 1; at least one number is.
        error_feedback: Whether to remember the rest; without it the rest is lost.

    Raises:
        ValueError: If `fraction` is out of range.

    Example:
        >>> import numpy as np
        >>> TopK(0.5).encode(np.array([1.0, -3.0, 0.0, 2.0])).indices
        array([1, 3])

    Source:
        Lin et al., "Deep Gradient Compression" (2018).
    """

    def __init__(self, fraction: float, *, error_feedback: bool = True) -> None:
        super().__init__(error_feedback=error_feedback)
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"TopK needs a number as its fraction, got {fraction!r}.")
        if not 0 < fraction <= 1:
            raise ValueError(f"TopK needs a fraction above 0 and at most 1, got {fraction}.")
        self.fraction = fraction

    def encode(self, value: Array) -> IndexedSlices:
        """Choose the largest magnitudes, NaN before all; of equal ones those that come first."""
        flat = value.reshape(-1)
        count = min(flat.size, max(1, round(self.fraction * flat.size)))
        magnitude = np.abs(flat)
        magnitude[np.isnan(magnitude)] = np.inf
        order = np.argsort(-magnitude, kind="stable")[:count]
        indices = np.sort(order)
        return IndexedSlices(flat[indices], indices, (flat.size,))

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """Fill in zeros."""
        dense: Array = code.to_dense().reshape(shape)
        return dense.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"TopK({self.fraction}, error_feedback={self.error_feedback})"


@final
class Compressed:
    """One compressed reduction. Leaves that are not floating-point arrays pass as they are.

    Args:
        compression: The code.
        op: The operator.
        rows: The leaves of each replica.
        members: The replicas' ids.
        names: Of the leaves, for what is remembered of each; None for their indices.
    """

    def __init__(
        self,
        compression: Compression,
        op: ReduceOp,
        rows: Sequence[Sequence[Any]],
        members: Sequence[int],
        names: Sequence[object] | None = None,
    ) -> None:
        self._compression = compression
        self._op = op
        self._rows = rows
        self._members = members
        self._names = names or range(len(rows[0]))
        self._coded = [_is_coded(leaf) for leaf in rows[0]]
        self._lost: dict[Key, Array] = {}
        self._taken = self._take() if compression.error_feedback else {}

    def encode(self) -> list[list[Any]]:
        """Return each replica's leaves in code.

        Raises:
            ValueError: If the code cannot be combined by the operator.
        """
        pairs = zip(self._members, self._rows, strict=True)
        return [self._encode_row(replica_id, row) for replica_id, row in pairs]

    def decode(self, reduced: Sequence[Any]) -> list[Any]:
        """Return what the reduced codes stand for."""
        return [
            self._decoded(code, leaf) if is_coded else code
            for code, leaf, is_coded in zip(reduced, self._rows[0], self._coded, strict=True)
        ]

    def commit(self) -> None:
        """Remember what was lost, now that the reduction is complete."""
        self._compression.remember(self._lost)

    def roll_back(self) -> None:
        """Put back what was taken out, as the reduction has failed."""
        self._compression.remember(self._taken)

    def _take(self) -> dict[Key, Array]:
        """Take out what was lost before: of two reductions in flight the first to begin sends it.

        Nothing is taken if something of it does not fit.
        """
        taken: dict[Key, Array] = {}
        try:
            for replica_id, row in zip(self._members, self._rows, strict=True):
                for name, leaf, is_coded in zip(self._names, row, self._coded, strict=True):
                    key = (replica_id, name)
                    lost = self._compression.take_lost(key, leaf.shape) if is_coded else None
                    if lost is not None:
                        taken[key] = lost
        except ValueError:
            self._compression.remember(taken)
            raise
        return taken

    def _encode_row(self, replica_id: int, row: Sequence[Any]) -> list[object]:
        return [
            self._encoded(leaf, (replica_id, name)) if is_coded else leaf
            for name, leaf, is_coded in zip(self._names, row, self._coded, strict=True)
        ]

    def _encoded(self, leaf: Array, key: Key) -> object:
        compression = self._compression
        value = np.asarray(leaf + self._taken[key]) if key in self._taken else leaf
        code = compression.encode(value)
        if type(code) is IndexedSlices:
            require_sum(self._op, f"all_reduce with {compression!r}")
        if compression.error_feedback:
            self._lost[key] = compression.lost(value, code)
        return code

    def _decoded(self, code: object, leaf: Array) -> object:
        result = self._compression.decode(code, leaf.shape, leaf.dtype)
        result.flags.writeable = False
        return result


def _is_coded(leaf: object) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype in (np.float32, np.float64) and leaf.size > 0
