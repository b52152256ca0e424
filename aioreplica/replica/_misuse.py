"""Errors of a replica context that was used where it does not belong."""

from __future__ import annotations

import asyncio

from ..context import PLACE, Place
from ..errors import ContextError
from ._replica import Replica

_TWINS = {
    "all_reduce": "strategy.reduce(op, value)",
    "all_gather": "strategy.gather(value, axis)",
    "run_on_device": "ar.run_on_host(fn) or an @ar.device_op",
    "merge_call": "a direct call, merge_fn(strategy, ...),",
    "update": "strategy.extended.update(var, fn, args)",
    "variable": "ar.Variable(initial_value)",
}
_OWNERS = {
    "assign": "variable",
    "assign_add": "variable",
    "assign_sub": "variable",
    "apply_gradients": "optimizer",
    "minimize": "optimizer",
    "add": "accumulator",
    "apply": "accumulator",
}


def misuse_error(what: str, replica: Replica, step: int, live: Place | None) -> ContextError:
    """Build the error of calling `what` on a context.

    Args:
        what: Name of the method.
        replica: The context's replica.
        step: Its run.
        live: The one place where the context may be used; None after the run.
    """
    place = PLACE.get()
    me = f"the context of replica {replica.replica_id} (step {step})"
    if live is None:
        if place.replica is not None and replica.op is not None:
            return _awaitable_in_thread_error(what, place)
        return ContextError(
            f"{what} was called on {me} after its run. Get a new one with "
            "ar.get_replica_context() inside each step."
        )
    if (place is live or place.replica is None) and not is_loop_running():
        return _off_the_loop_error(what, me)
    twin = _TWINS.get(what)
    advice = f" Use {twin} there." if place.replica is None and twin else ""
    return ContextError(
        f"{what} was called on {me} from {place.describe()}. A context belongs "
        f"to its own replica: call ar.get_replica_context() where you need one.{advice}"
    )


def held_by_op_error(what: str, fn_name: str) -> ContextError:
    """Build the error of a collective on the loop while an op of the replica starts others."""
    return ContextError(
        f"{what} was called while {fn_name}, an op of the same replica, starts collectives from "
        "its thread: their order would be chance. Await the op before."
    )


def outlived_op_error(what: str, fn_name: str) -> ContextError:
    """Build the error of a collective started from a thread whose op had ended."""
    return ContextError(
        f"{what} was called on a thread that outlived {fn_name}, the op it belongs to: its order "
        "would be chance. Join the thread, or wait for its work, before the op returns."
    )


def _off_the_loop_error(what: str, me: str) -> ContextError:
    """Build the error of a collective on a thread that does not run the event loop."""
    if what == "start_all_reduce":
        return ContextError(
            f"{what} was called on {me} from a thread while no op of the replica runs. It can be "
            "started from any thread as long as a function of ctx.run_on_device runs."
        )
    return ContextError(
        f"{what} was called on {me} from another thread than the event loop's. Await it in the "
        f"step; in a function of ctx.run_on_device use {_blocking_name(what)}, which waits on the "
        "thread, or ctx.start_all_reduce."
    )


def is_loop_running() -> bool:
    """Tell whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _awaitable_in_thread_error(what: str, place: Place) -> ContextError:
    """Build the error of an awaitable method in a plain step function, or in its host calls."""
    if place.is_outside and what == "run_on_device":
        return ContextError(
            "run_on_device was called in outside_compilation, while the device is busy with the "
            "program that waits for that. Use `await ar.run_on_host(fn)`, or call the function in "
            "the device program."
        )
    if place.is_outside:
        return ContextError(
            f"{what} was called in outside_compilation, while the device program waits for that. "
            f"Return the value from the outside function, and call {_blocking_name(what)} in the "
            "device program."
        )
    if what == "run_on_device":
        return ContextError(
            "run_on_device was called in a plain function, on the device thread of its replica. "
            "Call the function directly: it runs on the device already."
        )
    return ContextError(
        f"{what} was called in a plain function, on the device thread of its replica, where "
        f"nothing can be awaited. Use {_blocking_name(what)}(...), which waits on the thread; or "
        "make the step function `async def`."
    )


def blocking_misuse_error(
    what: str, replica: Replica, step: int, live: Place | None, is_async: bool
) -> ContextError:
    """Build the error of a blocking call that was made elsewhere than on its device thread.

    Args:
        what: Name of the method.
        replica: The context's replica.
        step: Its run.
        live: The place of the device program; None where none runs.
        is_async: Whether the replica is a coroutine.
    """
    name, place = _blocking_name(what), PLACE.get()
    if is_async:
        twin = name.replace(".blocking", "")
        return ContextError(
            f"{name} was called under an `async def` step or outside every step, on a thread that "
            f"others need. Use `await {twin}(...)`; blocking calls are for device threads: plain "
            "step functions, run_steps, and functions that ctx.run_on_device runs."
        )
    if live is None:
        return ContextError(
            f"{name} was called after the step of replica {replica.replica_id} (step {step}). Get "
            "a new context with ar.get_replica_context() inside each step."
        )
    if place is live:
        return ContextError(
            f"{name} was called on another thread than the replica's device thread. Call it in the "
            "step function itself."
        )
    where = "outside_compilation" if place.is_outside else place.describe()
    return ContextError(
        f"{name} was called in {where}, but it belongs to the device thread of its replica. Call "
        "it in the step function itself."
    )


def no_blocking_handle_error() -> ContextError:
    """Build the error of starting a collective that a thread would have to come back to."""
    return ContextError(
        "start_all_reduce has no blocking twin: nothing goes on for a thread that does not wait. "
        "Use ctx.blocking.all_reduce, or an `async def` step."
    )


def _blocking_name(what: str) -> str:
    if what == "outside_compilation":
        return f"ar.{what}"
    what = {"start_all_reduce": "all_reduce", "apply_accumulated": "apply"}.get(what, what)
    return f"{_OWNERS.get(what, 'ctx')}.blocking.{what}"
