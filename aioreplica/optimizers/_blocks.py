"""Elementwise rules on arrays, in place: block by block where dense, row by row where sparse.

A step goes over its arrays up to a dozen times in NumPy. Compiled by numba, where it is installed
(the extra `fast`), it goes over them once, and over those of the gradients' parts. Results have the
same bits, and the interpreter's lock is free meanwhile, so that several threads are worth waking
sooner. A kernel is compiled in the first step that can use it, never on the event loop, and kept on
disk for the next program.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np

from ..collectives import Job
from ..context import REGISTRY
from ..tree import Array, DType
from ..values import IndexedSlices, Variable
from ._kernels import Kernel, gather
from ._merged_gradient import MergedGradient

BLOCK_BYTES = 128 * 1024
"""A rule reads and writes five to eight arrays several times over. Blocks of this size of all of
them stay in a core's L2 cache; of 16 KiB to 256 KiB it was the fastest."""

CHECKED_AT_ONCE = 8192
"""Elements that are checked in one call of BLAS; with more it may wake threads."""

RANGE_BLOCKS = 4
"""A large variable is cut into ranges of so many blocks, which threads share."""

JOB_BYTES = 2 * 1024 * 1024
"""Small variables are put together until they read and write as much as this."""


@final
class Block:
    """Elements of one component: old values and slots, new ones to be filled in, the gradient.

    All arrays are flat, equally long and of the variable's dtype.

    Attributes:
        variable: Whose elements they are; None where a rule is only tried out.
        value: The old ones; do not write.
        slots: The old slots, in order of the optimizer's slot names; do not write.
        gradient: The aggregated gradient, ready for use; do not write.
        new_value: To be filled in; holds anything before.
        new_slots: Likewise.
        scratch: Memory for whatever the rule needs.
    """

    __slots__ = ("gradient", "new_slots", "new_value", "scratch", "slots", "value", "variable")

    def __init__(
        self,
        variable: Variable | None,
        old: Sequence[Array],
        new: Sequence[Array],
        gradient: Array,
        scratch: Array,
    ) -> None:
        self.variable = variable
        self.value, *self.slots = old
        self.new_value, *self.new_slots = new
        self.gradient = gradient
        self.scratch = scratch

    def __repr__(self) -> str:
        name = None if self.variable is None else self.variable.name
        return f"<Block | {self.value.size} elements of {name}>"


class BlockRule(Protocol):
    """Interface of an `ElementwiseOptimizer`'s rule for a block."""

    @property
    def kernel(self) -> Kernel | None:
        """The rule for a compiler."""

    def update_block(self, prepared: object, block: Block, /) -> None:
        """Fill in new values and slots."""

    def kernel_numbers(self, prepared: object, block: Block, /) -> tuple[float, ...]:
        """Return the numbers of the kernel."""


Range: TypeAlias = tuple[MergedGradient, Any, Sequence[Array], Sequence[Array], int, int]
"""A gradient, what the rule prepared, old and new arrays, the first element and the end."""


Scratch: TypeAlias = list[Array]
"""Memory for blocks that is used again, as fresh pages would cost more than the arithmetic in them:
pieces of two rows of `BLOCK_BYTES`. The methods of a list are safe from any thread."""


def block_jobs(rule: BlockRule, ranges: Sequence[Range], scratch: Scratch) -> Iterator[Job]:
    """Cut dense variables into jobs of about the same size.

    Args:
        rule: Whose step it is.
        ranges: Whole components.
        scratch: Free memory.
    """
    together: list[Range] = []
    size = 0
    for whole in ranges:
        gradient, prepared, old, new, _, end = whole
        itemsize = old[0].itemsize
        each = 2 * len(old) * itemsize + gradient.num_bytes // max(1, end)
        step = RANGE_BLOCKS * (BLOCK_BYTES // itemsize)
        if end <= step:
            together.append(whole)
            size += end * each
            if size >= JOB_BYTES:
                yield size, partial(run_blocks, rule, together, scratch)
                together, size = [], 0
            continue
        for start in range(0, end, step):
            stop = min(start + step, end)
            part = [(gradient, prepared, old, new, start, stop)]
            yield (stop - start) * each, partial(run_blocks, rule, part, scratch)
    if together:
        yield size, partial(run_blocks, rule, together, scratch)


def run_blocks(rule: BlockRule, ranges: Sequence[Range], scratch: Scratch) -> None:
    """Run a rule over some ranges; gradients are summed, divided, checked and clipped on the way.

    Where the rule is compiled, one call does all of that for up to two parts of a gradient, over
    the whole range; of more parts NumPy adds up the others first, block by block.

    Args:
        rule: Whose step it is.
        ranges: Of any variables.
        scratch: Free memory.
    """
    memory = _taken(scratch)
    try:
        with np.errstate(all="ignore"):
            free, spare = memory
            for gradient, prepared, old, new, start, stop in ranges:
                if free.dtype != new[0].dtype:
                    free, spare = memory[0].view(new[0].dtype), memory[1].view(new[0].dtype)
                arrays = [*gradient.parts, *old, *new]
                columns = [each if each.ndim == 1 else each.reshape(-1) for each in arrays]
                count = len(gradient.parts)
                middle = count + len(old)
                fused = fused_rules().find(rule.kernel, new[0].dtype, columns[:count])
                is_whole_range = fused is not None and count <= 2
                step = stop - start if is_whole_range else free.size
                is_whole = start == 0 and stop == columns[0].size <= step
                for begin in range(start, stop, max(1, step)):
                    end = min(begin + step, stop)
                    rows = columns if is_whole else [each[begin:end] for each in columns]
                    room, part = free[: end - begin], rows[0]
                    out = spare[: end - begin]
                    for other in rows[1 : count if fused is None else count - 1]:
                        part = np.add(part, other, out=out)
                    if fused is None:
                        part = gradient.finished(part, out, room)
                    variable = gradient.variable
                    block = Block(variable, rows[count:middle], rows[middle:], part, room)
                    if fused is None:
                        rule.update_block(prepared, block)
                        if not _are_finite(rows[middle:]):
                            gradient.is_in_doubt = True  # only ever set to True, so any thread may
                        continue
                    last = rows[count - 1] if count > 1 else part[:0]
                    numbers = rule.kernel_numbers(prepared, block)
                    found = fused(part, last, gradient.how(part.dtype), *rows[count:], numbers)
                    if not found & 1:
                        gradient.is_finite = False
                    if not found & 2:
                        gradient.is_in_doubt = True
    finally:
        scratch.append(memory)


def _are_finite(arrays: Sequence[Array]) -> bool:
    """Tell whether flat arrays are finite; False for numbers whose products are not, too.

    The sum of products looks at two arrays in less time than another check takes for one.
    """
    size, last = arrays[0].size, arrays[-1]
    if size > CHECKED_AT_ONCE:
        starts = range(0, size, CHECKED_AT_ONCE)
        return all(_are_finite([a[i : i + CHECKED_AT_ONCE] for a in arrays]) for i in starts)
    total = last.dot(last) if len(arrays) % 2 else 0.0
    for i in range(0, len(arrays) - 1, 2):
        total += arrays[i].dot(arrays[i + 1])
    return math.isfinite(total)


def _taken(scratch: Scratch) -> Array:
    try:
        return scratch.pop()
    except IndexError:
        return np.empty((2, BLOCK_BYTES), np.uint8)


# ---- rows ----------------------------------------------------------------------------------------


@final
class _Change(NamedTuple):
    version: int  # how many writes the variable had seen before this one
    before: weakref.ref[Array]
    after: weakref.ref[Array]
    rows: Array


@final
class TouchedRows:
    """Remembers, per variable, how the current array came from the one before it.

    A new value is built in the buffer of the value before the current one. If the current one came
    from that by changing some rows, then bringing those rows up to date makes the buffer equal to
    the current value, and the other rows need not be copied. That pays: a step of Adam with 20 rows
    of 50,000 by 16 floats takes 0.35 ms instead of 1.5, with 2,000 of 500,000 by 32 it takes 5 ms
    instead of 29 (medians of interleaved rounds on one machine).

    Invariants:
        * Arrays are known by weak references: a strong one would make a buffer look held.
        * Two writes of anything else bring the same two arrays back with other rows changed, so
          what is remembered holds for the very next write only.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, _Change] = {}  # by the id of the variable: arrays tell if it is gone

    def bring_up_to_date(
        self, variable: Variable, current: Array, buffer: Array, room: Array
    ) -> None:
        """Make a buffer equal to the current array, by few rows if that is enough."""
        last = self._last.get(id(variable))
        if (
            last is not None
            and last.version + 1 == variable.version
            and last.before() is buffer
            and last.after() is current
        ):
            for rows in _some_at_a_time(last.rows, current):
                buffer[rows] = _gathered(current, rows, room)
        else:
            np.copyto(buffer, current)

    def remember(self, variable: Variable, old: Array, new: Array, rows: Array) -> None:
        """Note that `new` is `old` but for some rows; `new` is what the next write publishes."""
        change = _Change(variable.version, weakref.ref(old), weakref.ref(new), rows)
        self._last[id(variable)] = change

    def __repr__(self) -> str:
        return f"<TouchedRows | {len(self._last)} variables>"


def run_rows(
    rule: BlockRule,
    prepared: object,
    gradient: MergedGradient,
    group: Sequence[Variable],
    old: Sequence[Array],
    new: Sequence[Array],
    scratch: Scratch,
    touched: TouchedRows,
) -> None:
    """Update the rows that a sparse gradient has, a few of them at a time.

    Args:
        rule: Whose step it is.
        prepared: What it prepared for the variable.
        gradient: One IndexedSlices.
        group: The variable and its slots.
        old: A component of each.
        new: Memory for the new ones.
        scratch: Free memory.
        touched: What earlier sparse updates changed.
    """
    slices: IndexedSlices = gradient.summed()
    memory = [_taken(scratch) for _ in group]
    try:
        for variable, current, buffer, (room, _) in zip(group, old, new, memory, strict=True):
            touched.bring_up_to_date(variable, current, buffer, room)
        begin = 0
        for rows in _some_at_a_time(slices.indices, new[0]):
            values = slices.values[begin : begin + len(rows)]
            begin += len(rows)
            some = MergedGradient(gradient.variable, [values], (0,), gradient.divisor)
            some.factor, some.limit = gradient.factor, gradient.limit
            old_rows, new_rows = [], []
            for array, (room, other) in zip(old, memory, strict=True):
                old_rows.append(_gathered(array, rows, room))
                new_rows.append(_shaped(other, old_rows[-1].shape, array.dtype))
            if values.size:
                whole: Range = (some, prepared, old_rows, new_rows, 0, values.size)
                run_blocks(rule, [whole], scratch)
            if not some.is_finite:
                gradient.is_finite = False
            if some.is_in_doubt:
                gradient.is_in_doubt = True
            for array, changed in zip(new, new_rows, strict=True):
                array[rows] = changed
    finally:
        scratch += memory
    for variable, before, after in zip(group, old, new, strict=True):
        touched.remember(variable, before, after, slices.indices)


def _some_at_a_time(rows: Array, array: Array) -> Iterator[Array]:
    """Cut numbers of rows of an array into parts, whose rows fit a block unless it is one row."""
    width = max(1, array.itemsize * math.prod(array.shape[1:]))
    step = max(1, BLOCK_BYTES // width)
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step]


def _gathered(array: Array, rows: Array, room: Array) -> Array:
    """Copy some rows of an array, into memory that is there if they fit."""
    if not array.flags.c_contiguous:  # `take` would copy all of it
        return array[rows]
    out = _shaped(room, (len(rows), *array.shape[1:]), array.dtype)
    return array.take(rows, axis=0, out=out, mode="clip")  # they are in range; "raise" would copy


def _shaped(room: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > room.nbytes:
        return np.empty(shape, dtype)
    return room[:num_bytes].view(dtype).reshape(shape)


Compiled: TypeAlias = Callable[..., int]

FUSED_RULES = "fused_rules"
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@final
class FusedRules:
    """Compiles kernels, each once for a dtype, and finds the one for a block.

    Where numba is installed, `SGD`, `Adam`, `AdamW`, `Adagrad` and `RMSprop` find the process's
    by themselves.
    NUMBA_DISABLE_JIT=1 in the environment leaves every rule in NumPy.

    Args:
        is_on: Whether to compile; by default where numba is installed.
    """

    def __init__(self, is_on: bool | None = None) -> None:
        self._lock = threading.Lock()
        self._is_on = find_spec("numba") is not None if is_on is None else is_on
        self._compiled: dict[tuple[Kernel, DType], Compiled | None] = {}

    def find(self, kernel: Kernel | None, dtype: DType, parts: Iterable[Any]) -> Compiled | None:
        """Return what runs a kernel on variables of a dtype; None if NumPy has to.

        Args:
            kernel: The kernel, if there is one.
            dtype: Of the variables.
            parts: Of the gradient: arrays.
        """
        found = None if kernel is None else self._compiled.get((kernel, dtype))
        if found is not None:
            for part in parts:
                if part.dtype is not dtype or not part.flags.aligned:
                    return None
        return found

    def missing(self, kernel: Kernel, dtypes: Iterable[DType]) -> list[DType]:
        """Return the dtypes for which a kernel has to be compiled."""
        if not self._is_on:
            return []
        return [each for each in dict.fromkeys(dtypes) if (kernel, each) not in self._compiled]

    def compile(self, kernel: Kernel, dtypes: Iterable[DType]) -> None:
        """Compile a kernel: takes some seconds, or half of one where it is on disk.

        If it fails, the rule stays in NumPy, and a RuntimeWarning says why.
        """
        with self._lock:
            for dtype in self.missing(kernel, dtypes):
                made = None
                if dtype in FLOATS:
                    try:
                        made = _compiled(kernel, dtype)
                    except Exception as error:  # noqa: BLE001 - NumPy may be too new for it
                        self._give_up(error)
                self._compiled[kernel, dtype] = made

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        warnings.warn(
            f"numba cannot compile the update rules ({type(error).__name__}: {error}), so they run "
            "in NumPy, with the same results. Update numba, or uninstall it.",
            RuntimeWarning,
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return f"<FusedRules | {'on' if self._is_on else 'off'}, {len(self._compiled)} compiled>"


def fused_rules() -> FusedRules:
    """Return those of the process."""
    return REGISTRY.once(FUSED_RULES, FusedRules)


def _compiled(kernel: Kernel, dtype: DType) -> Compiled | None:
    from numba import config, from_dtype, njit, types

    if config.DISABLE_JIT:
        return None
    number = from_dtype(dtype)
    read = types.Array(number, 1, "C", readonly=True)
    written = types.Array(number, 1, "C")
    how = types.UniTuple(number, 5)
    numbers = types.UniTuple(number, kernel.num_numbers)
    old, new = [read] * (kernel.num_slots + 1), [written] * (kernel.num_slots + 1)
    options = {"nogil": True, "error_model": "numpy"}
    # The loop finds them under the names of what it calls in plain Python. They have no signatures:
    # so they are compiled only with it, and not if it is on disk.
    inner = {"gather": njit(**options)(gather), "rule": njit(**options)(kernel.rule)}
    loop = kernel.loop
    function = FunctionType(loop.__code__, {**loop.__globals__, **inner})
    function.__qualname__ = kernel.rule.__name__  # names the file on disk: rules share loops
    signature = types.int64(read, read, how, *old, *new, numbers)
    try:
        made: Compiled = njit(signature, cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        made = njit(signature, **options)(function)
    return made
