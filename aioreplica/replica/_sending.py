"""Sends and receives as replicas call them: what is checked, and how a value is handed over."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from types import FrameType
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj

from ..devices.backends import untraced
from ..tree import unflatten
from ._meeting import SyncGroup
from ._messages import Transfer
from ._reductions import payload_of
from ._waiter import Waiter


def send(
    waiter: Waiter, everyone: SyncGroup, value: Any, to: int, tag: Hashable, frame: FrameType
) -> Any:
    """Hand a value to another replica; return what the waiter gives for it.

    Raises:
        TypeError: If `to` is no int, or the tag cannot be hashed.
        ValueError: If `to` is no other replica of this worker.
        ContextError: If called elsewhere than in the replica.
    """
    own = waiter.replica.replica_id
    destination = _other(to, own, everyone, "send", "to")
    _require_tag(tag, "send")
    leaves, spec, _ = payload_of(value, "send", waiter.home)
    handed = unflatten(spec, [_handed_over(leaf) for leaf in leaves])
    return waiter.exchange(Transfer(everyone, own, destination, tag, handed, frame, is_send=True))


def receive(
    waiter: Waiter, everyone: SyncGroup, from_: int, tag: Hashable, frame: FrameType
) -> Any:
    """Take the next value of another replica; return what the waiter gives for it.

    Raises:
        TypeError: If `from_` is no int, or the tag cannot be hashed.
        ValueError: If `from_` is no other replica of this worker.
        ContextError: If called elsewhere than in the replica.
    """
    own = waiter.replica.replica_id
    source = _other(from_, own, everyone, "receive", "from_")
    _require_tag(tag, "receive")
    return waiter.exchange(Transfer(everyone, source, own, tag, None, frame, is_send=False))


def _other(given: int, own: int, everyone: SyncGroup, what: str, argument: str) -> int:
    """Return the index of another replica among those of this process."""
    try:
        asked = operator.index(given)
    except TypeError:
        raise TypeError(f"{what} needs a replica id as {argument}, got {given!r}.") from None
    across, here = everyone.across, len(everyone.members)
    first, total = (0, here) if across is None else (across.first_replica, across.num_replicas)
    if not 0 <= asked < total:
        raise ValueError(f"{what} got {argument}={asked}, but replicas are 0 to {total - 1}.")
    if asked == first + own:
        raise ValueError(
            f"{what} got {argument}={asked}, the replica that calls it. Keep the value in a "
            "variable of the function."
        )
    if not first <= asked < first + here:
        raise ValueError(
            f"{what} got {argument}={asked}, a replica of another worker: this one has replicas "
            f"{first} to {first + here - 1}, and values are handed over in memory. Use a "
            "collective, such as broadcast, between workers."
        )
    return asked - first


def _require_tag(tag: Hashable, what: str) -> None:
    try:
        hash(tag)
    except TypeError:
        raise TypeError(
            f"{what} needs a tag that can be hashed, such as a text, got {tag!r}."
        ) from None


def _handed_over(leaf: Any) -> Any:
    """Return a leaf as the receiver gets it: the same memory, read-only where that can be said."""
    if isinstance(leaf, np.ndarray):
        view = leaf.view()
        view.flags.writeable = False
        return view
    if isinstance(leaf, np.generic) or not is_array_api_obj(leaf):
        return leaf
    return untraced(leaf)
