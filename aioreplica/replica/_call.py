"""One replica's call of one collective."""

from __future__ import annotations

from contextvars import Context
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, final

from ..telemetry import source_line

if TYPE_CHECKING:
    from ._bridge import CallSite
    from ._collective import Collective
    from ._sync_group import SyncGroup

_new = object.__new__


@final
class Call:
    """What a replica brought to a collective, and from where.

    Every collective of every replica makes one, so it is built by `new_call`, without the frame
    of an `__init__`, and its line is looked up when it is wanted: only errors and the recorder's
    one record per merge do.

    Attributes:
        collective: Which collective was called.
        argument: Its decisive argument: the merge function, or the reduce op.
        args: Positional arguments of the merge function, or what a collective works on.
        kwargs: Keyword arguments of the merge function.
        group: Whom it wants to meet.
        position: Index of the caller in that group.
        sequence: Number of the call among those of its replica in that group, from 1.
        context: Context variables at the await, for the group's first member only.
        code: The code object that made the call.
        instruction: Where in it, as a byte offset.
    """

    __slots__ = (
        "args",
        "argument",
        "code",
        "collective",
        "context",
        "group",
        "instruction",
        "kwargs",
        "position",
        "sequence",
    )

    collective: Collective
    argument: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    group: SyncGroup
    position: int
    sequence: int
    context: Context
    code: CodeType
    instruction: int

    @property
    def file(self) -> str:
        """Source file of the call."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Source line of the call."""
        return source_line(self.code, self.instruction)

    @property
    def site(self) -> str:
        """File and line of the call, with a colon between them."""
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        """Name the collective with its argument and number, such as "all_reduce #3 (SUM)"."""
        detail = self.collective.detail(self.argument)
        text = f"{self.collective.name} #{self.sequence}" + (f" ({detail})" if detail else "")
        return f"{text} in group {self.group.members}" if self.group.is_partial else text


def new_call(
    collective: Collective,
    argument: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    group: SyncGroup,
    position: int,
    sequence: int,
    frame: FrameType | CallSite,
) -> Call:
    """Make the call that a replica made at `frame`."""
    call = _new(Call)
    call.collective = collective
    call.argument = argument
    call.args = args
    call.kwargs = kwargs
    call.group = group
    call.position = position
    call.sequence = sequence
    call.code = frame.f_code
    call.instruction = frame.f_lasti
    return call
