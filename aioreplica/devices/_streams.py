"""Streams of a device's lane: an op has ended when what it has enqueued on the device has.

A function that has returned has only enqueued its work. An array that another thread, another lane
or NumPy then read would hold whatever was in its memory before; and memory that is given back
while an op still reads it is written by the next. So the lane's thread waits for its own stream at
the end of an op, before anyone learns that the op is done, and before it brings something to other
threads from within an op. What the event loop computes lies on the device's default stream, which
an op and whatever follows a meeting within one comes behind.

Devices of libraries that wait by themselves (jax), or end before they return (NumPy), have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

from ..tree import leaves
from ._logical import KINDS
from ._op import AnyOp
from .backends import Backend, find_backends


@final
class DeviceStreams:
    """The streams of the libraries that serve a device, one of each per thread of its lane.

    Args:
        device: Its name.
        backends: Those with streams.
    """

    __slots__ = ("_backends", "_device")

    def __init__(self, device: str, backends: Sequence[Backend]) -> None:
        self._device = device
        self._backends = backends

    def call(
        self,
        op: AnyOp,
        fn: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        /,
    ) -> Any:
        """Run an op's call on the streams of the calling thread, and wait for their end."""
        with ExitStack() as scopes:
            for backend in self._backends:
                scopes.enter_context(backend.scope(self._device))
            try:
                result = op.context.run(fn, *args, **kwargs)
                self._keep(result)
                return result
            finally:  # what has failed has enqueued something, too
                self.synchronise()

    def synchronise(self, made: object = None) -> None:
        """Wait for what the calling thread has enqueued: others read it, or its memory, next.

        They may still read what the thread has `made` for them when it has let go of that.
        """
        for backend in self._backends:
            backend.synchronise(self._device)
        self._keep(made)

    def follow(self, value: object) -> None:
        """Go on behind the default stream, with something that another thread has made."""
        for backend in self._backends:
            with backend.scope(self._device):  # entered once more: behind what is there by now
                pass
        self._keep(value)

    def _keep(self, value: object) -> None:
        for leaf in leaves(value):
            for backend in self._backends:
                if backend.owns(leaf):
                    backend.keep(leaf)

    def __repr__(self) -> str:
        return f"<DeviceStreams {self._device} of {', '.join(b.name for b in self._backends)}>"


def find_streams(device: str) -> DeviceStreams | None:
    """Return the streams of a device; None if it has none, as CPUs and lanes of the library."""
    kind, _, _ = device.partition(":")
    if kind not in KINDS or kind == "cpu":  # without a look for backends, which takes a while
        return None
    backends = [each for each in find_backends() if each.has_streams and each.num_devices(kind)]
    return DeviceStreams(device, backends) if backends else None
