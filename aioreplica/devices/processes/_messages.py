"""Messages between a device and its process: one request and one reply per op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

from ._context_variables import VarName
from ._parcel import Parcel
from ._segments import Extent

Where: TypeAlias = tuple[str, int, str | None]
"""Where a warning was raised: file, line, and module if it is known."""


@final
class Setup(NamedTuple):
    """Configuration of a device process, sent at its start.

    Attributes:
        device_name: The device that it works for.
        num_devices: How many logical CPU devices the program has.
        log_levels: The levels that loggers have, by name; "" is the root.
    """

    device_name: str
    num_devices: int
    log_levels: dict[str, int]


@final
class NewSegment(NamedTuple):
    """A segment whose descriptor is on its way through the socket.

    Attributes:
        segment_id: Its number in its arena.
        size: In bytes.
    """

    segment_id: int
    size: int


@final
class Memory(NamedTuple):
    """State of the memory that one side writes and the other one reads.

    Attributes:
        new: Segments that are to be mapped; their descriptors come in this order.
        dropped: Segments that are used no more.
    """

    new: tuple[NewSegment, ...] = ()
    dropped: tuple[int, ...] = ()


@final
class Value(NamedTuple):
    """A new value of something that ops read by name.

    Attributes:
        number: The name.
        num_writes: How many writes it has seen.
        data: Its bytes, or where they lie.
        dtype: Of the array.
        shape: Of the array.
        strides: Of the array; None for C order.
    """

    number: int
    num_writes: int
    data: bytes | Extent
    dtype: Any  # Any: NumPy's dtypes are generic
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


@final
class Request(NamedTuple):
    """An op, and everything that the device process has to know before.

    Attributes:
        fn_name: Name of the op's function.
        own: Memory that only this device process reads.
        public: Memory that all device processes read.
        released: Blocks of results that are read no more.
        forgotten: Names that are used no more.
        stand_ins: What new names stand for: a pickled call and its arguments.
        values: New values of names.
        parcel: The function, its positional and its keyword arguments.
        replica: The call that makes the replica context, pickled; None outside steps.
        strategy: Name of the strategy; None if there is none.
        context: The context variables.
        numpy_errors: How NumPy treats errors, pickled; None for its default.
        blas_threads: How many threads BLAS may use; None for as many as it likes.
    """

    fn_name: str
    own: Memory
    public: Memory
    released: Sequence[Extent]
    forgotten: Sequence[int]
    stand_ins: Sequence[tuple[int, bytes]]
    values: Sequence[Value]
    parcel: Parcel
    replica: bytes | None
    strategy: int | None
    context: Sequence[tuple[VarName, bytes]]
    numpy_errors: bytes | None
    blas_threads: int | None


@final
class OpFailure(NamedTuple):
    """Exception of an op that cannot be pickled as a parcel.

    Attributes:
        text: The traceback, as text.
        what: Why it is told in words: "raised", "returned", "rebuilt" or "memory".
        words: The error, or what could not be sent, in words.
    """

    text: str
    what: str = ""
    words: str = ""


@final
class Reply(NamedTuple):
    """Outcome of an op.

    Attributes:
        memory: Memory that the device process writes.
        released: Blocks of the device that the process reads no more.
        public_released: The same for those that all device processes read.
        parcel: The result, or the exception; None if it cannot be sent.
        failure: What is known of the exception; None for a result.
        warnings: Message, category (pickled) and place of every warning.
        records: What was logged, each pickled.
        recorded: What the op recorded with `ctx.record`.
        refused: Context variables that could not be set, and why.
    """

    memory: Memory
    released: Sequence[Extent]
    public_released: Sequence[Extent]
    parcel: Parcel | None
    failure: OpFailure | None
    warnings: Sequence[tuple[bytes, Where]]
    records: Sequence[bytes]
    recorded: Sequence[tuple[str, float | str]]
    refused: Sequence[tuple[VarName, str]]
