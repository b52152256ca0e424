"""Local SGD: workers train on their own for some steps, then exchange how far they have come."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..collectives import Compressed, Compression, reduce_leaves
from ..context import PLACE
from ..devices import OwnedTask, run_together
from ..errors import ContextError, MergeMismatchError
from ..replica import Once, RunningReplica
from ..tree import Array, Tree
from ..typing import ReduceOp
from ..values import IndexedSlices, Variable
from ._checks import learning_rate_at, require_cross_replica_context, require_outside_replicas
from ._elementwise import ElementwiseOptimizer
from ._optimizer import Optimizer
from ._slots import new_variable, working_dtype
from ._step import INLINE_STEP_BYTES

if TYPE_CHECKING:
    from ..cluster import Communicator

FIRST_MEETING = -1


@final
class LocalSGD:
    """Trains each worker by itself, and averages how far the workers have come, now and then.

    Every worker has a strategy of its own, such as a `MirroredStrategy`, whose replicas meet in
    each step as ever. After `every` steps the workers exchange the differences of their variables
    since the last exchange, once, and all go on from the same values. In between the variables of
    different workers differ, and so do the slots of `optimizer`, always. Variables of integers and
    booleans, such as a global step, take no part: `start` gives them to all, then they are each
    worker's own.

    Make it in `strategy.scope()`, behind the model; `start` it, then use it inside the step like
    the optimizer.

    Args:
        communicator: With the other workers; it stays yours to close.
        optimizer: Takes the steps in between.
        every: After how many steps to exchange.
        outer: Takes the mean difference for a gradient, in place of the plain average: DiLoCo has
            `SGD(0.7, momentum=0.9, nesterov=True)`. Its rule and learning rate are used, which
            have to be the same on all workers.
        compression: What is done to the differences on their way.

    Raises:
        TypeError: If an argument is of the wrong type, or a variable of half precision.
        ValueError: If `every` is below 1, or the strategy has no trainable variables of floats.
        ContextError: If made inside a replica, or for a strategy that has several workers itself.

    Example:
        >>> import asyncio
        >>> import aioreplica as ar
        >>> async def worker(communicator):
        ...     async with communicator, ar.OneDeviceStrategy("cpu:0") as strategy:
        ...         with strategy.scope():
        ...             w = ar.Variable(0.0)
        ...             local = LocalSGD(communicator, ar.optimizers.SGD(1.0), every=2)
        ...
        ...         async def step():
        ...             await local.apply_gradients([(-1.0 - communicator.rank, w)])
        ...
        ...         await local.start()
        ...         for _ in range(2):
        ...             await strategy.run(step)
        ...         return w.value
        >>> async def main():
        ...     group = ar.cluster.LocalCommunicator.group(2)
        ...     return await asyncio.gather(*map(worker, group))
        >>> print(*asyncio.run(main()))
        3.0 3.0

    Source:
        Stich, "Local SGD Converges Fast and Communicates Little" (2019); Douillard et al.,
        "DiLoCo: Distributed Low-Communication Training of Language Models" (2023).
    """

    def __init__(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        every: int,
        outer: ElementwiseOptimizer | None = None,
        *,
        compression: Compression | None = None,
    ) -> None:
        require_outside_replicas(type(self).__name__)
        _check(communicator, optimizer, every, outer, compression)
        self._communicator = communicator
        self._optimizer = optimizer
        self._every = every
        self._outer = outer
        self._compression = compression
        owner = optimizer.iterations.store.owner
        if owner is None or owner.workers is not None:
            raise ContextError(
                f"LocalSGD is for a strategy of one worker, such as ar.MirroredStrategy, and this "
                f"optimizer belongs to {owner!r}. Make both in the scope of one."
            )
        self._owner = owner
        trained, self._counts = _parted(owner.trainable_variables)
        self._anchors = {
            each: new_variable(owner, each.components[0], f"{each.name}/anchor") for each in trained
        }
        self._slots = {
            each: {
                name: new_variable(owner, outer.new_slot(name, each), f"{each.name}/outer_{name}")
                for name in outer.slot_names
            }
            if outer is not None
            else {}
            for each in trained
        }
        self._num_steps = new_variable(owner, np.int64(0), "local_steps")
        self._num_exchanges = new_variable(owner, np.int64(0), "local_exchanges")
        self._settings = _settings_of(self)
        self._has_met = False

    # ---- in the step -----------------------------------------------------------------------

    async def minimize(
        self,
        loss: Callable[[], object],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
        *,
        backend: str = "autograd",
        has_aux: bool = False,
    ) -> Tree:
        """Take a step of the optimizer, and exchange if it is time; a collective.

        Args:
            loss: As for `Optimizer.minimize`.
            var_list: As for `Optimizer.minimize`.
            global_step: As for `Optimizer.minimize`.
            backend: As for `Optimizer.minimize`.
            has_aux: As for `Optimizer.minimize`.

        Returns:
            As `Optimizer.minimize`.

        Raises:
            Exception: As `Optimizer.minimize`, and what ends the communicator.
            ContextError: If `start` was not called, or the step function is not async.
            MergeMismatchError: If workers are not at the same exchange, or have other variables or
                settings, such as a learning rate of `outer`.

        Cancellation:
            An exchange that has begun is completed: the other workers take part in it.
        """
        replica, frame = self._replica(), sys._getframe(1)
        result = await self._optimizer.minimize(
            loss, var_list, global_step, backend=backend, has_aux=has_aux
        )
        await replica.meet(LOCAL_STEP, self, (), frame)
        return result

    async def apply_gradients(
        self, grads_and_vars: Iterable[tuple[object, object]], global_step: Variable | None = None
    ) -> None:
        """Apply gradients by the optimizer, and exchange if it is time; a collective.

        Args:
            grads_and_vars: As for `Optimizer.apply_gradients`.
            global_step: As for `Optimizer.apply_gradients`.

        Raises:
            Exception: As `minimize`.

        Cancellation:
            As `minimize`.
        """
        replica, frame = self._replica(), sys._getframe(1)
        await self._optimizer.apply_gradients(grads_and_vars, global_step)
        await replica.meet(LOCAL_STEP, self, (), frame)

    def _replica(self) -> RunningReplica:
        """Return the replica that takes a step.

        Raises:
            ContextError: If there is none, or the other workers were not met.
        """
        replica = PLACE.get().replica
        if not isinstance(replica, RunningReplica):
            raise ContextError(
                "LocalSGD takes steps inside async step functions. Call it in one that "
                "strategy.run runs."
            )
        self._require_start()
        return replica

    def _require_start(self) -> None:
        if not self._has_met:
            raise ContextError(
                "LocalSGD has not met the other workers. Call `await local.start()` on every "
                "worker before the first step, and after restoring a checkpoint."
            )

    # ---- between steps ---------------------------------------------------------------------

    async def start(self) -> None:
        """Take the trainable variables of worker 0, and its place in the training, on all workers.

        Every worker calls it before the first step, and again after restoring a checkpoint, which
        worker 0 at least has to do.

        Raises:
            Exception: As `minimize`.
            ContextError: If called inside a replica, or trainable variables were made, or let go,
                since this object was made.

        Cancellation:
            As `minimize`.
        """
        require_cross_replica_context("LocalSGD.start")
        if {*self._owner.trainable_variables} != {*self._anchors, *self._counts}:
            raise ContextError(
                "Trainable variables were made, or let go, after LocalSGD was made. Make it behind "
                "the model, and keep the model."
            )
        self._owner.open()
        await self._completed(self._take_first_values())

    async def exchange(self) -> None:
        """Exchange now, before `every` steps are over; every worker has to call it.

        For the end of an epoch, before the model is evaluated or saved. Does nothing where the
        last step has just exchanged, which is so on all workers that have made as many steps.

        Raises:
            Exception: As `minimize`.

        Cancellation:
            As `minimize`.
        """
        require_cross_replica_context("LocalSGD.exchange")
        self._require_start()
        if not self.at_exchange:
            await self._completed(self._exchange())

    @property
    def at_exchange(self) -> bool:
        """True if no step was made since the last exchange: all workers have the same values.

        That is the time to save a checkpoint: in between it has the steps of one worker only.
        """
        return int(self._num_steps.components[0]) == 0

    @property
    def every(self) -> int:
        """Number of steps from one exchange to the next."""
        return self._every

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Everything that it remembers: values at the last exchange, outer slots, and counts.

        The optimizer's own variables are not among them.
        """
        slots = (slot for each in self._slots.values() for slot in each.values())
        return (*self._anchors.values(), *slots, self._num_steps, self._num_exchanges)

    def __repr__(self) -> str:
        steps, count = (int(v.components[0]) for v in (self._num_steps, self._num_exchanges))
        return f"<LocalSGD | {steps} of {self._every} steps, {count} exchanges>"

    # ---- what the collective does ----------------------------------------------------------

    def counted(self) -> Awaitable[None] | None:
        """Count a step, and return the exchange if it is time; for the library."""
        count = int(self._num_steps.components[0]) + 1
        _write({self._num_steps: np.array(count)})
        return self._completed(self._exchange()) if count >= self._every else None

    async def _completed(self, work: Any) -> None:
        """Do something with the other workers, to its end, even if the wait is cancelled."""
        task: OwnedTask[None] = OwnedTask(work, "aioreplica local SGD")
        if await task.ended():
            task.task.result()

    async def _take_first_values(self) -> None:
        """Take the values of worker 0, and all that it remembers."""
        ours = [*self._anchors, *self.variables, *self._counts]
        rate = None if self._outer is None else self._outer.learning_rate
        rate = None if callable(rate) else rate
        await self._agreed(_head(FIRST_MEETING, self._settings, rate), [])
        told = [await self._communicator.broadcast(each.components[0], 0) for each in ours]
        changes = dict(zip(ours, told, strict=True))
        if not changes[self._num_steps]:  # values may have been assigned since the last exchange
            changes |= {anchor: changes[each] for each, anchor in self._anchors.items()}
        _write(changes)
        self._has_met = True

    async def _exchange(self) -> None:
        """Take the mean of how far all workers have come since the last exchange."""
        trained, number = list(self._anchors), int(self._num_exchanges.components[0])
        outer, prepared, rate = self._outer, None, None
        if outer is not None:
            rate = learning_rate_at(outer.learning_rate, number)
            prepared = outer.prepare(rate, number)
        pairs = [(old.components[0], new.components[0]) for new, old in self._anchors.items()]
        is_large = sum(old.nbytes for old, _ in pairs) > INLINE_STEP_BYTES

        async def done(fn: Callable[[], object]) -> Any:
            return (await run_together([fn]))[0] if is_large else fn()

        differences = await done(lambda: [np.asarray(old - new) for old, new in pairs])
        means = await self._mean(_head(number, self._settings, rate), differences)
        changes = await done(lambda: self._moved(trained, means, prepared))
        changes[self._num_steps] = np.array(0)
        changes[self._num_exchanges] = np.array(number + 1)
        _write(changes)

    def _moved(
        self, trained: Sequence[Variable], means: Sequence[Array], prepared: Any
    ) -> dict[Variable, Array]:
        """Return new values, anchors and outer slots."""
        outer, changes = self._outer, {}
        for variable, mean in zip(trained, means, strict=True):
            anchor, slots = self._anchors[variable], self._slots[variable]
            old = anchor.components[0]
            if outer is None:
                new = np.asarray(old - mean)
            else:
                held = {name: slot.components[0] for name, slot in slots.items()}
                new, moved = outer.update(prepared, old, np.asarray(mean, old.dtype), held)
                changes.update({slots[name]: array for name, array in moved.items()})
            changes[variable] = changes[anchor] = new
        return changes

    async def _mean(self, head: Array, differences: list[Array]) -> Sequence[Array]:
        """Return the mean of all workers' differences, in rank order."""
        if self._compression is None:
            return await self._agreed(head, differences)
        rank = self._communicator.rank
        code = Compressed(self._compression, ReduceOp.MEAN, [differences], [rank])
        try:
            [coded] = code.encode()
            dense = [each for each in coded if not isinstance(each, IndexedSlices)]
            totals = iter(await self._agreed(head, dense))
            means = [
                await _mean_of_rows(self._communicator, each)
                if isinstance(each, IndexedSlices)
                else next(totals)
                for each in coded
            ]
            decoded: list[Array] = code.decode(means)
        except BaseException:
            code.roll_back()
            raise
        code.commit()
        return decoded

    async def _agreed(self, head: Array, arrays: list[Array]) -> list[Array]:
        """Average arrays over the workers, if all have this head.

        Raises:
            MergeMismatchError: If they have not.
        """
        rows, totals = await self._communicator.all_gather_then_reduce(
            head,
            lambda rows: bool((rows == rows[0]).all()),
            list(arrays),
            ReduceOp.MEAN,
        )
        if totals is None:
            raise MergeMismatchError(_reason(rows), step=None, reason=_reason(rows), rows=())
        return totals


LOCAL_STEP = Once("local_sgd_step", lambda local, _: local.counted())


async def _mean_of_rows(communicator: Communicator, rows: IndexedSlices) -> IndexedSlices:
    """Return the mean of rows, of which every worker has as many."""
    every = await communicator.all_gather(np.asarray(rows.indices))
    values = await communicator.all_gather(np.asarray(rows.values))
    parts = [IndexedSlices(values[i], every[i], rows.dense_shape) for i in range(len(every))]
    mean: IndexedSlices = reduce_leaves(ReduceOp.MEAN, parts)
    return mean


def _parted(
    variables: Sequence[Variable],
) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """Return what is averaged, and what counts: integers and booleans have no gradients.

    Raises:
        ValueError: If nothing is averaged.
        TypeError: If something of that is of half precision.
    """
    counts = tuple(each for each in variables if each.dtype.kind in "biu")
    trained = tuple(each for each in variables if each.dtype.kind not in "biu")
    if not trained:
        raise ValueError(
            "LocalSGD found no trainable variables of floats. Make it behind the model."
        )
    for each in trained:
        if working_dtype(each.dtype) != each.dtype:
            raise TypeError(
                f"LocalSGD takes no variables of half precision, and {each.name!r} is "
                f"{each.dtype}. Keep it in float32."
            )
    return trained, counts


def _head(number: int, settings: str, rate: float | None) -> Array:
    """Return what has to be the same on all workers: the exchange, and a hash."""
    at = "" if rate is None else f"{rate:.6g}"  # other machines may round a schedule otherwise
    data = f"{settings} {at}".encode()
    return np.array([number, int.from_bytes(blake2b(data, digest_size=7).digest(), "little")])


def _settings_of(local: LocalSGD) -> str:
    """Describe what has to be the same on all workers, besides the learning rate of `outer`."""
    outer, ours = local._outer, (*local._anchors, *local._counts)
    kinds = [f"{each.name} {each.dtype}{list(each.shape)}" for each in ours]
    rule = ""
    if outer is not None:
        numbers = {
            name: value if isinstance(value, int) else float(value)
            for name, value in sorted(vars(outer).items())
            if isinstance(value, (int, float))
        }
        rule = f"{type(outer).__qualname__} {outer.slot_names} {numbers}"
    return f"{local._every} {local._compression!r} {rule} {kinds}"


def _write(arrays: dict[Variable, Array]) -> None:
    changes = {}
    for variable, array in arrays.items():
        own = np.asarray(array, variable.dtype).reshape(variable.shape)
        own.flags.writeable = False
        changes[variable] = (own,) * len(variable.components)
    next(iter(changes)).store.write(changes)


def _check(
    communicator: object, optimizer: object, every: object, outer: object, compression: object
) -> None:
    from ..cluster import Communicator

    if not isinstance(communicator, Communicator):
        raise TypeError(f"LocalSGD takes an ar.cluster.Communicator, got {communicator!r}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"LocalSGD takes an optimizer of ar.optimizers, got {optimizer!r}.")
    if outer is not None and not isinstance(outer, ElementwiseOptimizer):
        raise TypeError(
            f"outer is None or an optimizer such as ar.optimizers.SGD(0.7, momentum=0.9, "
            f"nesterov=True), got {outer!r}."
        )
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression is None or such as ar.collectives.Float16(), got {compression!r}."
        )
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"every is a number of steps, got {every!r}.")
    if every < 1:
        raise ValueError(f"every is a number of steps, at least 1, got {every}.")


def _reason(rows: Any) -> str:
    numbers = [int(number) for number in rows[:, 0]]
    if len(set(numbers)) == 1:
        return (
            "The workers' LocalSGD differ in `every`, `compression`, `outer` (its class, numbers "
            "or learning rate), or in the names, dtypes or shapes of variables. Run the same "
            "program on all of them."
        )
    at = ", ".join(
        f"worker {rank} at {'its start' if n == FIRST_MEETING else f'exchange {n}'}"
        for rank, n in enumerate(numbers)
    )
    return f"The workers are not in the same exchange of LocalSGD: {at}. Start all of them again."
