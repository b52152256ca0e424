"""A reduction in code: encode each replica's leaves, reduce the codes, decode the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..typing import ReduceOp
from ..values import IndexedSlices
from ._compression import Compression, Key
from ._sparse import require_sum


@final
class Compressed:
    """One compressed reduction. Leaves that are not floating-point arrays pass as they are.

    Args:
        compression: The code.
        op: The operator.
        rows: The leaves of each replica.
        members: The replicas' ids.
    """

    def __init__(
        self,
        compression: Compression,
        op: ReduceOp,
        rows: Sequence[Sequence[Any]],
        members: Sequence[int],
    ) -> None:
        self._compression = compression
        self._op = op
        self._rows = rows
        self._members = members
        self._coded = [_is_coded(leaf) for leaf in rows[0]]
        self._lost: dict[Key, Any] = {}
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

    def _take(self) -> dict[Key, Any]:
        """Take out what was lost before, at once: of two reductions in flight the first sends it.

        Nothing is taken if something of it does not fit.
        """
        taken: dict[Key, Any] = {}
        try:
            for replica_id, row in zip(self._members, self._rows, strict=True):
                for index, (leaf, is_coded) in enumerate(zip(row, self._coded, strict=True)):
                    key = (replica_id, index)
                    lost = self._compression.take_lost(key, leaf.shape) if is_coded else None
                    if lost is not None:
                        taken[key] = lost
        except ValueError:
            self._compression.remember(taken)
            raise
        return taken

    def _encode_row(self, replica_id: int, row: Sequence[Any]) -> list[Any]:
        return [
            self._encoded(leaf, (replica_id, index)) if is_coded else leaf
            for index, (leaf, is_coded) in enumerate(zip(row, self._coded, strict=True))
        ]

    def _encoded(self, leaf: Any, key: Key) -> Any:
        compression = self._compression
        value = np.asarray(leaf + self._taken[key]) if key in self._taken else leaf
        code = compression.encode(value)
        if type(code) is IndexedSlices:
            require_sum(self._op, f"all_reduce with {compression!r}")
        if compression.error_feedback:
            self._lost[key] = compression.lost(value, code)
        return code

    def _decoded(self, code: Any, leaf: Any) -> Any:
        result = self._compression.decode(code, leaf.shape, leaf.dtype)
        result.flags.writeable = False
        return result


def _is_coded(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype in (np.float32, np.float64) and leaf.size > 0
