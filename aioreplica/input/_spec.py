"""What one leaf of a batch looks like, whatever the size of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..tree import map_leaves


@final
@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array; None stands for the axis that counts the examples.

    Attributes:
        shape: (None, ...).
        dtype: Its NumPy dtype.

    Source:
        tf.TensorSpec.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(batch: Any) -> Any:
    """Return the pytree of specs of a batch of NumPy arrays.

    Example:
        >>> import numpy as np
        >>> spec_of(np.zeros((8, 3), np.float32))
        ArraySpec(shape=(None, 3), dtype=dtype('float32'))
    """
    return map_leaves(lambda array: ArraySpec((None, *array.shape[1:]), array.dtype), batch)
