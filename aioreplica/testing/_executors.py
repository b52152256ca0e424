"""`concurrent.futures` inside a simulated run: futures that a lane completes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, final

from ._forbidden import refuse
from ._pools import PoolOp, SimPool

if TYPE_CHECKING:
    from ._simulation import Simulation


@final
class SubmittedOp(PoolOp):
    """A call that was given to an executor itself, so its future is a concurrent one."""

    __slots__ = ()

    def claim(self) -> bool:
        """Take the call, unless it was cancelled."""
        return bool(self.future.set_running_or_notify_cancel())


@final
class SubmittedFuture(futures.Future[Any]):
    """The future of a simulated call: blocking on it lets its pool go on until it is done."""

    pool: SimPool | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the result; runs the pool's calls up to this one if it is not there yet."""
        self._catch_up()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, in the same way."""
        self._catch_up()
        return super().exception(timeout)

    def _catch_up(self) -> None:
        if self.pool is not None:
            run_until(self.pool, self.done)


def run_until(pool: SimPool, is_done: Callable[[], bool]) -> None:
    """Take the steps of one pool, while everything else is blocked."""
    loop = pool.loop
    while not is_done():
        for at, op in enumerate(loop.external):
            if getattr(op, "pool", None) is pool:
                pool.table.take_step(at)
                break
        else:
            when = loop.next_when()
            if when is None:
                if pool.table.current_op is not None:
                    return  # another participant may go on meanwhile
                refuse("A blocking wait for a pool that is stuck", "Await the call instead.")
            loop.jump(when)


def executor_patches(simulation: Simulation) -> list[tuple[Any, str, Any]]:
    """Return what to replace in the executors of `concurrent.futures`."""
    executor = futures.ThreadPoolExecutor
    real_submit, real_shutdown = executor.submit, executor.shutdown

    def submit(self: Any, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if not simulation.is_here():
            return real_submit(self, fn, *args, **kwargs)
        if self._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SubmittedFuture()
        future.pool = pool = simulation.pools.pool_of(self)
        call = (lambda: fn(*args, **kwargs)) if kwargs else fn
        pool.put(SubmittedOp(pool, call, () if kwargs else args, future))
        return future

    def shutdown(self: Any, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if simulation.is_here():
            pool = simulation.pools.pool_of(self)
            if cancel_futures:
                for op in pool.queue:
                    op.future.cancel()
            if wait:
                run_until(pool, lambda: not (pool.queue or pool.num_running or pool.offered))
        real_shutdown(self, wait, cancel_futures=cancel_futures)

    return [
        (executor, "submit", submit),
        (executor, "shutdown", shutdown),
    ]
