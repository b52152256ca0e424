"""From what a user iterates over to the parts that go into the infeed, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from ..values import DistributedValues, PerReplica, split_per_replica
from ._infeed import Infeed
from ._static_shapes import StaticShapes


@final
class Elements:
    """Cuts the elements of one loop into parts, checks them, and counts.

    Args:
        infeed: Where they go.
        num_replicas: How many parts each has.
        num_wanted: How many steps the loop has: not one element more is taken.

    Attributes:
        error: Why no more elements come, if the source failed or gave one that does not fit.
    """

    __slots__ = ("_infeed", "_num_replicas", "_shapes", "error", "num_wanted")

    def __init__(self, infeed: Infeed, num_replicas: int, num_wanted: int) -> None:
        self._infeed = infeed
        self._num_replicas = num_replicas
        self.num_wanted = num_wanted
        self._shapes = StaticShapes(num_replicas)
        self.error: BaseException | None = None

    @property
    def are_complete(self) -> bool:
        """Whether the loop has all it wants, or wants nothing any more."""
        return self._infeed.num_put >= self.num_wanted or self._infeed.is_aborted

    def add(self, element: Any) -> None:
        """Put one element; a tuple is spread over the inputs of the step function.

        Raises:
            ValueError: If it does not look like the first one.
        """
        if type(element) is not tuple:
            element = (element,)
        parts = _parts(element, self._num_replicas)
        self._shapes.check(self._infeed.num_put, parts)
        self._infeed.put(parts)

    def end(self, error: BaseException | None = None) -> None:
        """Let the loop end after the elements that are there."""
        self.error = error
        if self._infeed.num_put < self.num_wanted:
            self._infeed.end()


def _parts(element: tuple[Any, ...], num_replicas: int) -> Sequence[tuple[Any, ...]]:
    if all(type(leaf) is PerReplica and len(leaf) == num_replicas for leaf in element):
        return list(zip(*(leaf.values for leaf in element), strict=True)) or [()] * num_replicas
    return split_per_replica(element, num_replicas, "an element of the iterator")


def open_source(source: Any) -> Iterator[Any] | AsyncIterator[Any]:
    """Return the iterator of what run_steps was given; an iterator is its own.

    Raises:
        TypeError: If it is nothing that yields elements.
    """
    if isinstance(source, (Mapping, DistributedValues, str, bytes)) or hasattr(source, "__array__"):
        raise TypeError(
            f"run_steps takes an iterator of elements, one per step, but a "
            f"{type(source).__name__} is data of one piece. Pass an iterator over batches, such as "
            "aiter(strategy.distribute_dataset(...))."
        )
    if isinstance(source, Iterable):
        return iter(source)
    if isinstance(source, AsyncIterable):
        return aiter(source)
    raise TypeError(
        f"run_steps takes an iterator of elements, one per step, got {source!r} "
        f"({type(source).__name__})."
    )
