"""The reducer of a strategy: reductions of whole trees, packed, off the event loop when large."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, final

from ..devices import INLINE_BYTES, num_collective_streams, run_together
from ..typing import ReduceOp
from ._buffers import MIN_BYTES, BufferPool
from ._compress import Compressed
from ._options import CommunicationOptions
from ._plan import Plan, Row
from ._reduce import leaf_bytes, reduce_leaves

DEFAULT_OPTIONS = CommunicationOptions()


@final
class Reducer:
    """Reduces the leaves of all replicas, leaf by leaf in ascending replica order.

    Args:
        options: What holds for calls that bring none.

    Determinism:
        Bitwise the same for every number of threads and every pack size.
    """

    __slots__ = ("_pool", "options")

    def __init__(self, options: CommunicationOptions | None = None) -> None:
        self.options = options or DEFAULT_OPTIONS
        self._pool = BufferPool()

    def reduce(
        self,
        op: ReduceOp,
        rows: Sequence[Row],
        options: CommunicationOptions | None = None,
        members: Sequence[int] | None = None,
    ) -> list[Any] | Awaitable[list[Any]]:
        """Combine rows of leaves, one row per replica.

        Args:
            op: The operator.
            rows: The leaves of each replica: equal in number, kinds, dtypes and shapes.
            options: Of this call; None takes those of the strategy.
            members: The replicas' ids, for compression; None counts from 0.

        Returns:
            One result per leaf, read-only where it is an array; or, if there is much to read,
            what to await for them.

        Cancellation:
            Of the awaitable: pieces that run end first; nothing is kept.
        """
        chosen = options or self.options
        first = rows[0]
        if len(first) == 1 and chosen.compression is None and leaf_bytes(first[0]) < MIN_BYTES:
            return [reduce_leaves(op, [row[0] for row in rows])]
        self._pool.next_call()
        if chosen.compression is not None:
            code = Compressed(chosen.compression, op, rows, members or range(len(rows)))
            return self._reduce_compressed(code, op, chosen)
        plan = Plan(op, rows, self._pool, chosen.bytes_per_pack)
        return plan.run() if plan.num_bytes <= INLINE_BYTES else _run_in_threads(plan)

    async def _reduce_compressed(
        self, code: Compressed, op: ReduceOp, options: CommunicationOptions
    ) -> list[Any]:
        [rows] = await run_together([code.encode])
        plan = Plan(op, rows, self._pool, options.bytes_per_pack)
        reduced = plan.run() if plan.num_bytes <= INLINE_BYTES else await _run_in_threads(plan)
        [results] = await run_together([lambda: code.decode(reduced)])
        code.commit()
        return results

    def clear(self) -> None:
        """Let go of the memory kept for coming results."""
        self._pool.clear()


async def _run_in_threads(plan: Plan) -> list[Any]:
    """Run a plan off the event loop, on as many threads as are worth waking."""
    count = max(1, min(num_collective_streams(), plan.num_bytes // INLINE_BYTES))
    if count > 1:
        plan.cut(plan.num_bytes // count)
    await run_together(plan.shares(count))
    return plan.results
