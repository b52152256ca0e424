"""The reducer of a strategy, and its options: reductions of whole trees, in threads if large."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeAlias, final

import numpy as np

from ..devices import run_together
from ..devices.backends import reduce_arrays
from ..typing import ReduceOp
from ._compression import Compressed, Compression
from ._plan import (
    POOLED_BYTES,
    BufferPool,
    Layout,
    Leaves,
    ReductionPlan,
    num_threads,
    run_on_threads,
)
from ._reduce import leaf_bytes, reduce_leaves

IMPLEMENTATIONS = ("auto", "mpi", "torch")


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives, for a strategy or for one call.

    Options of a call replace those of its strategy as a whole. Nothing here but `compression`
    changes a bit of any result.

    Attributes:
        bytes_per_pack: Small arrays are reduced together in packs of about this many bytes; 0
            chooses a size that fits into the cache.
        timeout_seconds: How long replicas wait for each other in one collective before the run
            ends with a StallError; None waits for ever.
        implementation: What carries values between workers: "mpi", "torch" (torch.distributed), or
            "auto", by what has launched the program. One worker needs none.
        compression: What is done to floating-point arrays on their way into a reduction; None
            reduces them as they are.

    Raises:
        ValueError: If a field is out of range.
        TypeError: If a field has the wrong type.

    Example:
        >>> CommunicationOptions(bytes_per_pack=1 << 20).timeout_seconds is None
        True

    Source:
        tf.distribute.experimental.CommunicationOptions, but for `compression`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"
    compression: Compression | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        size, timeout = self.bytes_per_pack, self.timeout_seconds
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"bytes_per_pack must be an int, got {size!r}.")
        if size < 0:
            raise ValueError(f"bytes_per_pack must be 0 (automatic) or more, got {size}.")
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, Real):
                raise TypeError(f"timeout_seconds must be a number or None, got {timeout!r}.")
            if not 0 < timeout < math.inf:
                raise ValueError(
                    f"timeout_seconds must be above 0 and finite, got {timeout}. None waits for "
                    "ever."
                )
            object.__setattr__(self, "timeout_seconds", float(timeout))  # 30 is as 30.0 is,
        object.__setattr__(self, "bytes_per_pack", int(size))  # in what workers compare too
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got "
                f"{self.implementation!r}."
            )
        if self.compression is not None and not isinstance(self.compression, Compression):
            raise TypeError(
                f"compression must be an ar.collectives.Compression or None, got "
                f"{self.compression!r}."
            )

    def __repr__(self) -> str:
        """Show what differs from the usual options: tables of mismatches are wide enough."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"CommunicationOptions({', '.join(changed)})"


def require_options(options: object, where: str) -> None:
    """Check that what was passed as options is some.

    Raises:
        TypeError: If it is neither None nor a CommunicationOptions.
    """
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"{where} takes options as an ar.CommunicationOptions or None, got {options!r}."
        )


DEFAULT_OPTIONS = CommunicationOptions()
KEPT_LAYOUTS = 8

INLINE_SUM_BYTES = 8 * 1024 * 1024
"""A reduction that reads no more than this runs on the event loop, which takes it half a
millisecond, a tenth of the time after which one Python thread makes way for another. A thread would
have the result 60 to 100 µs later at any size up to 16 MiB."""

SUM_THREAD_BYTES = 16 * 1024 * 1024
"""What a further thread has to read to be worth waking: it starts 0.1 ms after the first."""

FEW_LEAVES, FEW_BYTES = 8, 16 * 1024
"""So few small leaves are reduced one by one: planning packs would take longer."""

Signature: TypeAlias = tuple[list[Any], list[tuple[int, ...]]] | None  # dtypes and shapes


@final
class Reducer:
    """Reduces the leaves of all replicas, leaf by leaf in ascending replica order.

    Args:
        options: What holds for calls that bring none.

    Determinism:
        Bitwise the same for every number of threads and every pack size.
    """

    __slots__ = ("_layouts", "_lock", "_pool", "options")

    def __init__(self, options: CommunicationOptions | None = None) -> None:
        self.options = options or DEFAULT_OPTIONS
        self._pool = BufferPool()
        self._layouts: deque[tuple[Signature, int, Layout]] = deque(maxlen=KEPT_LAYOUTS)
        self._lock = threading.Lock()  # of the layouts: device threads reduce too

    def reduce(
        self,
        op: ReduceOp,
        rows: Sequence[Leaves],
        options: CommunicationOptions | None = None,
        members: Sequence[int] | None = None,
        signature: Signature = None,
    ) -> list[object] | Awaitable[list[object]]:
        """Combine rows of leaves, one row per replica.

        Args:
            op: The operator.
            rows: The leaves of each replica: equal in number, kinds, dtypes and shapes.
            options: Of this call; None takes those of the strategy.
            members: The replicas' ids, for compression; None counts from 0.
            signature: Dtypes and shapes of the leaves if all are arrays and there are several;
                with it the layout of the last calls is used again.

        Returns:
            One result per leaf, read-only where it is an array; or, if there is much to read,
            what to await for them.

        Cancellation:
            Of the awaitable: jobs that run end first; nothing is kept.
        """
        chosen = options or self.options
        first = rows[0]
        if len(first) == 1 and chosen.compression is None:
            leaf = first[0]
            is_array = type(leaf) is np.ndarray
            size = leaf.nbytes if is_array else leaf_bytes(leaf)
            if size < POOLED_BYTES and size * len(rows) <= INLINE_SUM_BYTES:  # no plan is needed
                column = [row[0] for row in rows]
                if not is_array:
                    return [reduce_leaves(op, column)]
                total = reduce_arrays(op, column)
                total.flags.writeable = False
                return [total]
        self._pool.next_call()
        if chosen.compression is not None:
            return self._reduce_compressed(chosen.compression, op, rows, members, chosen)
        plan = ReductionPlan(
            op, rows, self._layout(first, signature, chosen.bytes_per_pack), self._pool
        )
        return plan.run() if plan.num_bytes <= INLINE_SUM_BYTES else _run_in_threads(plan)

    def reduce_here(
        self,
        op: ReduceOp,
        rows: Sequence[Leaves],
        options: CommunicationOptions | None = None,
        members: Sequence[int] | None = None,
        signature: Signature = None,
        names: Sequence[object] | None = None,
    ) -> list[object]:
        """Combine rows of leaves in the calling thread, whatever their size.

        For device threads, which wait for each other without the event loop. Bitwise the same as
        `reduce`.

        Args:
            op: As for `reduce`.
            rows: As for `reduce`.
            options: As for `reduce`.
            members: As for `reduce`.
            signature: As for `reduce`.
            names: Of the leaves, for compression that remembers; None counts from 0.
        """
        chosen = options or self.options
        first = rows[0]
        if chosen.compression is None:
            if len(first) == 1 and leaf_bytes(first[0]) <= FEW_BYTES:
                return [reduce_leaves(op, [row[0] for row in rows])]
            if len(first) <= FEW_LEAVES and all(leaf_bytes(leaf) <= FEW_BYTES for leaf in first):
                return [reduce_leaves(op, column) for column in zip(*rows, strict=True)]
            self._pool.next_call()
            layout = self._layout(first, signature, chosen.bytes_per_pack)
            return ReductionPlan(op, rows, layout, self._pool).run()
        code = Compressed(chosen.compression, op, rows, members or range(len(rows)), names)
        try:
            coded = code.encode()
            plan = ReductionPlan(op, coded, Layout(coded[0], chosen.bytes_per_pack), self._pool)
            results = code.decode(plan.run())
        except BaseException:
            code.roll_back()
            raise
        code.commit()
        return results

    def _layout(self, leaves: Leaves, signature: Signature, bytes_per_pack: int) -> Layout:
        if signature is None:
            return Layout(leaves, bytes_per_pack)
        with self._lock:
            for known, pack, layout in self._layouts:
                if pack == bytes_per_pack and known == signature:
                    return layout
            layout = Layout(leaves, bytes_per_pack)
            self._layouts.appendleft((signature, bytes_per_pack, layout))
            return layout

    async def _reduce_compressed(
        self,
        compression: Compression,
        op: ReduceOp,
        rows: Sequence[Leaves],
        members: Sequence[int] | None,
        options: CommunicationOptions,
    ) -> list[object]:
        # Here and not at the call: a coroutine that is closed before it begins takes nothing out.
        code = Compressed(compression, op, rows, members or range(len(rows)))
        try:
            [coded] = await run_together([code.encode])
            plan = ReductionPlan(op, coded, Layout(coded[0], options.bytes_per_pack), self._pool)
            inline = plan.num_bytes <= INLINE_SUM_BYTES
            reduced = plan.run() if inline else await _run_in_threads(plan)
            [results] = await run_together([lambda: code.decode(reduced)])
        except BaseException:
            code.roll_back()
            raise
        code.commit()
        return results

    def clear(self) -> None:
        """Let go of the memory kept for coming results."""
        self._pool.clear()


async def _run_in_threads(plan: ReductionPlan) -> list[object]:
    """Run a plan off the event loop, on as many threads as are worth waking."""
    count = num_threads(plan.num_bytes, SUM_THREAD_BYTES)
    if count > 1:
        plan.cut(plan.num_bytes // count)
    await run_on_threads(plan.jobs, count)
    return plan.results
