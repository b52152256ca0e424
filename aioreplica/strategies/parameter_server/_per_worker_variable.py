"""Variables of which each worker has one for itself: made there, read by the program."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, NoReturn, final

import numpy as np

from ..._functions import require_finished
from ...cluster import Submission
from ...errors import ContextError, WorkerLostError
from ...typing import VariableAggregation
from ...values import Done, Variable, VariableOptions, VariableStore, combined, fitting
from ._closure import ClosureFailedError
from ._messages import Array
from ._packing import HomeSide, PerWorkerResource, pack_call, unpack
from ._queue import ScheduledClosure
from ._remote_value import error_of
from ._runner import ClosureRunner


@final
class PerWorkerVariable(PerWorkerResource):
    """A variable of which each worker has one for itself, with a value of its own.

    `ClusterCoordinator.create_per_worker_variable` gives it. In a closure it is the worker's
    variable: `v.value` is what closures on that worker have written, and a write takes effect at
    the call. Nothing of it is on parameter servers, in checkpoints, or known by the name of a
    push: a closure that runs again writes again.

    Source:
        tf.distribute's PerWorkerVariable.
    """

    runner: Callable[[], ClosureRunner]
    num_gone = 0

    async def read_all(self) -> list[Array]:
        """Return the values of the workers that there are, in the order of their indices.

        It is read behind the closures that are with a worker. A worker that has run no closure with
        the variable has the initial value, and so has one that came in the place of a lost one.

        Raises:
            ContextError: If the coordinator is closed.
            WorkerLostError: If a parameter server is lost.
            Exception: What makes the initial value raises.

        Warns:
            RuntimeWarning: If workers were lost since it was made or read last, and their values
                with them; names them.

        Cancellation:
            Changes nothing.
        """
        found = await self._read_all()
        queue = self.runner().queue
        num_lost, self.num_gone = queue.num_gone - self.num_gone, queue.num_gone
        if num_lost:
            names = ", ".join([*queue.last_gone][-num_lost:])
            warnings.warn(
                f"{num_lost} workers were lost since {self!r} was read last, and what they had of "
                f"it with them (the last ones: {names}). Workers in their place begin with the "
                "initial value.",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    async def _read_all(self) -> list[Array]:
        """Run one closure on each worker; a worker that is lost meanwhile gives nothing."""
        strategy, runner, name = self._strategy, self.runner(), f"read_all() of {self!r}"
        if not runner.is_open:
            raise ContextError(f"{name} was called, but its coordinator is closed.")
        side = HomeSide(strategy)
        call = pack_call(_value_of, (self,), {}, side, name)
        await strategy.servers.ready()
        number, settled = strategy.new_step(), asyncio.get_running_loop().create_future()
        sent: list[tuple[ScheduledClosure, Submission]] = []
        for worker in runner.queue.workers:
            closure = ScheduledClosure(number, name, False, call, {}, None, settled, worker=worker)
            submissions = strategy.engine.submit(worker, [runner.task_of(closure)])
            sent.append((closure, submissions[0]))
        found: list[Array] = []
        try:
            for closure, submission in sent:
                try:
                    found.append(unpack(await submission.result(), side))
                except ClosureFailedError as failure:
                    raise error_of(failure, closure, side) from failure
                except WorkerLostError:
                    continue  # the queue has counted it
        finally:
            await strategy.engine.cancel([submission for _, submission in sent])
        return found


@final
class VariableOf:
    """Makes the variable of one worker, there.

    Args:
        initial_value: An array, or a function that returns one.
        name: Of the variable.
    """

    def __init__(self, initial_value: Any, name: str) -> None:
        self._initial_value = initial_value
        self._name = name

    def __call__(self) -> WorkerVariable:
        """Make it."""
        value = self._initial_value
        value = value() if callable(value) else value
        require_finished(value, self._initial_value, "create_per_worker_variable")
        return WorkerVariable(np.array(value), self._name)


def _value_of(variable: Variable) -> Array:
    return variable.value


@final
class WorkerVariable(Variable):
    """The variable that one worker has for itself, in its closures.

    Args:
        value: What it begins with.
        name: As the program calls it.
    """

    __slots__ = ()

    def __init__(self, value: Array, name: str) -> None:
        value.flags.writeable = False
        self._set_up(
            (value,), VariableOptions(name, False, VariableAggregation.NONE), VariableStore()
        )

    @property
    def is_mirrored(self) -> bool:
        """True: there is one value."""
        return True

    def _write(self, verb: str, value: Any, frame: FrameType) -> Awaitable[Array]:
        """Write now; closures of other threads of the worker may write, too."""
        array = fitting(self, value)
        while True:
            old = self.components
            new = combined(self, verb, old[0], array)
            if self.store.write({self: (new,)}, {self: old}):
                return Done(new)

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> NoReturn:
        """Refuse: a closure has no replicas.

        Raises:
            ContextError: Always.
        """
        raise ContextError(f"{verb} of variable {self.name!r} was called in a replica.")
