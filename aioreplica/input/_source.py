"""Source of items, which every stage of an input pipeline is; a pass is an async generator.

A pass is made for each epoch, and closed by its maker. Each item carries the offset of its
source behind it, through every stage that it passes. So the newest item delivered says where to go
on, however many others were read ahead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

from ..tree import Tree

VERSION = 2  # of states; with 1, small datasets too were shuffled without a list


@final
@dataclass(frozen=True, slots=True)
class Start:
    """Position at which a pass over a source begins.

    Attributes:
        epoch: Number of the pass, which shuffling depends on.
        offset: How much of the pass is done, in the source's own units (examples or items).
        own_state: The source's own state at that place, if it keeps one.
        may_be_over: Whether the pass may end before the offset: other sources were longer.
        version: That of the state which is resumed, and so of the shuffled orders.
    """

    epoch: int = 0
    offset: int = 0
    own_state: object = None
    may_be_over: bool = False
    version: int = VERSION


@final
class Item(NamedTuple):
    """One value of a pass.

    Attributes:
        value: What the source gave, or what was made of it.
        offset: The source's offset behind it.
        own_state: The source's own state behind it, if it keeps one.
    """

    value: Tree
    offset: int
    own_state: object = None


class Pass(Protocol):
    """One pass over a source: an async generator of items, or what can be used like one."""

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def __anext__(self) -> Awaitable[Item]: ...

    def aclose(self) -> Coroutine[object, None, None]: ...


async def _nothing_to_close() -> None:
    return


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Something that can be read in passes; a transform is a copy with another `read`.

    Attributes:
        label: What to call it in messages.
        read: Begins a pass. Checks where it begins; nothing is read before its first item.
        identity: Gives plain values that differ from those of another source, so far as one can
            tell.
        common_identity: Gives those that are the same for what other workers read, where each
            worker reads a dataset of its own: neither content nor length.
        num_items: Gives the number of items of a pass, None if that is not known.
        offset_after: Gives the offset behind the first so many items of a pass.
        like: Gives an item like the first one if that costs nothing, else None.
        aclose: Closes an iterator that was given but never used; idempotent.
        is_inline: Whether an item takes microseconds and no wait: reading ahead gains nothing.
        is_kept: Whether its items are the user's own objects, which every pass gives again.
        counts_examples: Whether offsets count examples; if not, they count items.
        check_start: Raises or warns if a pass cannot begin there rightly; called where a state is
            loaded.
        differs: Says why workers may be given different items by it; empty if they are not.
    """

    label: str
    read: Callable[[Start], Pass]
    identity: Callable[[], tuple[Any, ...]]
    common_identity: Callable[[], tuple[Any, ...]]
    num_items: Callable[[], int | None] = lambda: None
    offset_after: Callable[[int], int] = lambda num_items: num_items
    like: Callable[[], Tree] = lambda: None
    aclose: Callable[[], Awaitable[None]] = _nothing_to_close
    is_inline: bool = False
    is_kept: bool = False
    counts_examples: bool = False
    check_start: Callable[[Start], None] = lambda start: None
    differs: str = ""
