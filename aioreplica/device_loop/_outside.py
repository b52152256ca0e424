"""Leaving a device program on purpose: functions that run on the host while the device waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar, final

from .._functions import require_finished, require_no_yield
from ..autodiff import run_outside
from ..context import CLUSTER, LOOP, PLACE, TRACE, Place
from ..errors import ContextError
from ..replica import RunningReplica, add_note_once

T = TypeVar("T")


def outside_compilation(fn: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Run a function on the host, from inside a device program, and wait for its result.

    On the event loop things are possible that are not on a device thread: awaiting, logging,
    talking to other tasks. Outside a device program it just calls `fn`.

    Args:
        fn: A plain or an async function. It sees the context variables and the replica of the
            device program; `ar.device_op` and `ar.run_on_host` run on the host's threads there.
        *args: Passed on. Values that autograd or torch traces may be among them: then `fn` is
            traced on the host, and the gradient of the call runs there too.
        **kwargs: Passed on.

    Returns:
        What `fn` returns; for an async one inside a device program, what it gives when awaited.

    Raises:
        TypeError: If `fn` is not callable, or contains `yield`.
        ContextError: If called inside an outside function, or on another thread than the replica's.
        Exception: What `fn` raises: the same object, whose traceback shows the host's frames behind
            the device's.

    Cancellation:
        An async function is cancelled where it waits; the device thread goes on unwinding when it
        has ended.

    Source:
        tf.tpu.outside_compilation.

    Example:
        >>> outside_compilation(max, 2, 3)
        3
    """
    if not callable(fn):
        raise TypeError(f"outside_compilation needs a function, got {fn!r} ({type(fn).__name__}).")
    require_no_yield(fn, "outside_compilation")
    if (trace := TRACE.get()) is not None:
        raise trace.refusal("outside_compilation")
    replica = PLACE.get().replica
    if CLUSTER.get() is not None:
        raise ContextError(
            f"outside_compilation was called inside outside cluster {CLUSTER.get()!r}. The code is "
            "on the host already: call the function directly, or await it."
        )
    if not isinstance(replica, RunningReplica) or not replica.blocking.is_live:
        return fn(*args, **kwargs)
    replica.blocking.require_here("outside_compilation")
    leave = _Leave(replica, sys._getframe(1))
    clusters = replica.blocking.clusters
    return run_outside(leave, clusters.gradient_of, clusters.new_root(), fn, args, kwargs)


def current_cluster() -> str | None:
    """Return the name of the outside call that runs here, None elsewhere.

    Calls are named "0", "1" and so on in each step; the gradient of a call adds the uid of the pass
    backwards that it belongs to: "0.uid".

    Example:
        >>> current_cluster() is None
        True
    """
    return CLUSTER.get()


@final
class _Leave:
    """Runs functions on the host for one call of outside_compilation, and for its gradients."""

    __slots__ = ("_replica", "_site")

    def __init__(self, replica: RunningReplica, frame: FrameType) -> None:
        self._replica = replica
        self._site = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def __call__(self, name: str, fn: Callable[..., object], args: tuple[Any, ...]) -> object:
        """Run `fn(*args)` on the event loop in the cluster `name`."""
        replica = self._replica
        place = Place(replica.runtime, replica.outside(), is_outside=True)
        blocking = replica.blocking
        replica.runtime.events.add("outside", name, blocking.step, replica.replica_id_in_sync_group)
        call = partial(_in_cluster, name, fn)
        try:
            return blocking.call_on_host(call, args, place, f"outside cluster {name!r}")
        except Exception as error:
            add_note_once(
                error, f"Raised on the host in outside cluster {name!r}, called at {self._site}."
            )
            raise


def _in_cluster(name: str, fn: Callable[..., T], *args: object) -> T:
    CLUSTER.set(name)  # the context is a copy, made for this call
    LOOP.set(None)  # what is written here is not the step's update
    result = fn(*args)
    require_finished(result, fn, "outside_compilation")
    return result
