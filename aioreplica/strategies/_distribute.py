"""The methods of a strategy that make distributed datasets and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from .._functions import is_async, require_finished, require_no_yield
from ..cluster import Workers
from ..input import (
    DistributedDataset,
    InputContext,
    InputOptions,
    InputTarget,
    OpenLoops,
    distribute_dataset,
    distribute_from_function,
)
from ..telemetry import UsageCounters
from ..values import PerReplica
from ._across import agreed_batches
from ._lifecycle import Lifecycle


@final
@dataclass(frozen=True, slots=True)
class ValueContext:
    """Given to the function of `distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The replica that the value is for.
        num_replicas_in_sync: How many replicas there are.

    Source:
        tf.distribute.experimental.ValueContext.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class Distribution(ABC):
    """The dataset methods of a strategy; only `Strategy` inherits them."""

    _lifecycle: Lifecycle
    _open_loops: OpenLoops

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of a run."""

    @property
    @abstractmethod
    def workers(self) -> Workers | None:
        """The same strategy on other workers; None if there are none."""

    @property
    @abstractmethod
    def device_names(self) -> tuple[str, ...]:
        """One device name per local replica."""

    @property
    @abstractmethod
    def has_plain_values(self) -> bool:
        """True if values stay plain instead of becoming PerReplica."""

    @abstractmethod
    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where this strategy may be in charge."""

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each global batch of a dataset over the replicas.

        Args:
            dataset: Anything that yields pytrees of arrays whose leading axis counts the examples:
                an `ar.ArrayDataset`, an `ar.Dataset`, a torch DataLoader, any other iterable or
                async iterable, or a function that returns one, called for each epoch.
            options: Reading ahead, what becomes of examples left over, sharding over workers.

        Returns:
            An async iterable of batches whose leaves are PerReplica, each component a contiguous
            part of the global batch; parts differ by one example at most, and may be empty. Use
            it in `async with`, which closes the source.

        Raises:
            TypeError: If `dataset` yields no batches, or `options` are not `ar.InputOptions`.
            ValueError: If the options cannot be met.
            ContextError: If called inside a replica.

        Source:
            tf.distribute.Strategy.experimental_distribute_dataset.
        """
        self.require_cross_replica("distribute_dataset", None)
        UsageCounters.of_process().count_input("distribute_dataset")
        return distribute_dataset(self._input_target(), dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Feed the replicas from datasets of batches that are already of one replica's size.

        Args:
            dataset_fn: Returns a dataset. Called once per worker, and each replica takes one of its
                batches per step; or, with PER_REPLICA, once for each replica. If it returns an
                iterator, it is called again for each further epoch.
            options: As for `distribute_dataset`.

        Returns:
            An async iterable of PerReplica batches. Where batches run out before every replica has
            got one, the others get empty ones; the loop ends for all replicas together.

        Raises:
            TypeError: If `dataset_fn` is not a function, or returns no dataset.
            ValueError: If the options cannot be met.
            ContextError: If called inside a replica.

        Source:
            tf.distribute.Strategy.distribute_datasets_from_function.
        """
        self.require_cross_replica("distribute_datasets_from_function", None)
        UsageCounters.of_process().count_input("distribute_datasets_from_function")
        return distribute_from_function(self._input_target(), dataset_fn, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Call `value_fn(ValueContext)` once per replica, in order; return a PerReplica.

        Under the default strategy, the one value itself.

        Raises:
            TypeError: If `value_fn` is not a plain function.
            ContextError: If called inside a replica.
        """
        self.require_cross_replica("distribute_values_from_function", None)
        UsageCounters.of_process().count_input("distribute_values_from_function")
        if not callable(value_fn):
            raise TypeError(f"value_fn must be a function of an ar.ValueContext, got {value_fn!r}.")
        if is_async(value_fn):
            raise TypeError(
                f"value_fn returns a value, but {value_fn!r} is a coroutine function. Make it a "
                "plain function, and await what it needs before."
            )
        require_no_yield(value_fn, "distribute_values_from_function")
        count, here = self.num_replicas_in_sync, len(self.device_names)
        first = 0 if self.workers is None else self.workers.first_replica
        values = [value_fn(ValueContext(first + i, count)) for i in range(here)]
        require_finished(values[0], value_fn, "distribute_values_from_function")
        if self.has_plain_values:
            return values[0]
        return PerReplica(values, devices=self.device_names)

    def _input_context(self) -> InputContext:
        workers = self.workers
        if workers is None:
            return InputContext(1, 0, self.num_replicas_in_sync)
        return InputContext(workers.num_workers, workers.rank, self.num_replicas_in_sync)

    def _input_target(self) -> InputTarget:
        return InputTarget(
            self.device_names,
            self.has_plain_values,
            self._input_context,
            self._open_loops,
            self._lifecycle.open,
            None if self.workers is None else partial(agreed_batches, self.workers),
        )
