"""The methods of a strategy that run device loops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..device_loop import KeptIterators, MultiStepContext, Topology
from ..errors import ContextError
from ..telemetry import EventLog
from ._lifecycle import Lifecycle
from ._replica_set import Runner
from ._run_options import RunOptions
from ._run_steps import checked_plan, run_steps


class DeviceLoops(ABC):
    """The device loop methods of a strategy; only `Strategy` inherits them."""

    _lifecycle: Lifecycle
    _events: EventLog
    _iterators: KeptIterators
    _steps_per_run: int
    _topology: Topology | None

    @property
    @abstractmethod
    def num_local_replicas(self) -> int:
        """Number of replicas of a run."""

    @abstractmethod
    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where this strategy may be in charge."""

    async def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int | None = None,
        initial_loop_values: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> MultiStepContext:
        """Run many steps on the device threads, in one hop there and back.

        Args:
            fn: A plain function, called as `fn(ctx, *inputs)` for each step; `ctx` is the replica's
                own `MultiStepContext`. Collectives are those of
                `ar.get_replica_context().blocking`.
            iterator: Where the inputs come from, one element per step: a plain or async iterator
                or iterable. A tuple is spread over the inputs, anything else is one; distributed
                values are replaced by the replica's component. The next call on the same iterator
                goes on behind the last step that was complete on all replicas, also if this one
                fails or is cancelled.
            iterations: How many steps; None takes the strategy's `steps_per_run`.
            initial_loop_values: What `ctx.last_step_outputs` holds in the first step.
            options: Stall timeout and seed.

        Returns:
            The outputs of the last step, and how many steps were run: fewer than asked for if the
            iterator was exhausted, but never half a one.

        Raises:
            TypeError: If `fn` is `async def`, or `iterator` yields nothing.
            ValueError: If `iterations` is below 1, or an element has another structure, shape or
                dtype than the first one.
            ContextError: If the strategy has several workers.
            MergeMismatchError: If the replicas do not meet in the same collectives, or do not set
                the same outputs.
            StallError: If `options.stall_timeout` seconds pass without progress.
            Exception: What a step or the iterator raises; steps before the element that failed
                were run.

        Cancellation:
            Wakes every thread that waits, in a collective, for its infeed or for the host, and
            waits until all have ended. A plain iterator that blocks its thread is left behind.

        Determinism:
            The same numbers for any split of the steps into calls.

        Source:
            tf.distribute's run_steps_on_iterator, and the host training loop of TPUStrategy.
        """
        self.require_cross_replica("run_steps", None)
        strategy = self._as_strategy()
        if strategy.workers is not None and strategy.workers.has_others:
            raise ContextError(
                f"run_steps does not go over several workers, which {strategy!r} has. Call run "
                "for each step; plain functions may use ctx.blocking there."
            )
        plan = checked_plan(
            fn, iterator, iterations, initial_loop_values, options, self.steps_per_run
        )
        return await run_steps(strategy, self._lifecycle, self._iterators, plan)

    @property
    def events(self) -> EventLog:
        """Events that device loops reported, newest last."""
        return self._events

    @property
    def needs_static_shapes(self) -> bool:
        """True if programs are made for one set of shapes (a TPU's are)."""
        return self._topology is not None

    @property
    def steps_per_run(self) -> int:
        """Default number of steps of `run_steps`."""
        return self._steps_per_run

    @property
    def host_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica ids of each host; every host has an infeed of its own."""
        if self._topology is None:
            return (tuple(range(self.num_local_replicas)),)
        return self._topology.host_replicas

    @abstractmethod
    def _as_strategy(self) -> Runner:
        """Return the strategy that this is a part of."""
