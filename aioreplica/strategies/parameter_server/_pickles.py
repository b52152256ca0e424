"""Pickles of closures and their results: named objects, and large buffers apart.

cloudpickle is imported at use: programs without parameter servers need not have it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from ...context import CARRIER

Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]

SEPARATE_BYTES = 64 * 1024  # smaller buffers go with the pickle


@final
class Packed(NamedTuple):
    """A pickled object and its large buffers.

    Attributes:
        data: The pickle.
        buffers: Its buffers, in order.
    """

    data: bytes
    buffers: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes to send."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


def pack(thing: Any, side: Any) -> Packed:
    """Pickle an object; its large buffers stay apart.

    Raises:
        Exception: Whatever pickling raises.
    """
    from ...devices.processes import dumps

    buffers: list[Any] = []

    def put(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SEPARATE_BYTES:
            return True
        buffers.append(np.frombuffer(raw, np.uint8))
        return False

    return Packed(dumps(thing, side, put), tuple(buffers))


def unpack(packed: Packed, side: Any) -> Any:
    """Build an object anew."""
    token = CARRIER.set(side)
    try:
        return pickle.loads(packed.data, buffers=packed.buffers)
    finally:
        CARRIER.reset(token)


def obstacle(things: Mapping[str, Any], side: Any, error: Exception) -> tuple[str, Exception]:
    """Say what among some objects cannot be pickled, and return what pickling it raised.

    Args:
        things: The objects, by what they are called.
        side: Names objects, as it did when they were pickled.
        error: What was raised then.
    """
    from ...devices.processes import find_obstacle, kind_of

    found = find_obstacle(things, side)
    if found is None:
        return f"it cannot be pickled: {error}", error
    where, thing, reason = found
    return f"{where} (a {kind_of(thing)}) cannot be pickled: {reason}", reason
