"""Several workers in one process: a strategy and a task for each, over a LocalCommunicator."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import aioreplica as ar
from aioreplica.cluster import LocalCommunicator
from aioreplica.devices import list_devices
from aioreplica.strategies import MultiWorkerMirroredStrategy

T = TypeVar("T")
Program = Callable[[MultiWorkerMirroredStrategy], Awaitable[T]]


def strategies(
    num_workers: int,
    num_replicas: int,
    *,
    timeout: float | None = None,
    options: ar.CommunicationOptions | None = None,
) -> list[MultiWorkerMirroredStrategy]:
    """Make the strategies of workers of so many replicas each."""
    group = LocalCommunicator.group(num_workers, timeout=timeout)
    with only(num_workers * num_replicas):
        return [MultiWorkerMirroredStrategy(each, options=options) for each in group]


def communicator_of(strategy: ar.Strategy) -> Any:
    """Return the communicator that a strategy was given."""
    workers = strategy._runtime.workers
    assert workers is not None
    return workers.connected or workers._given


@contextmanager
def only(num_devices: int) -> Iterator[None]:
    """Let strategies find only so many devices."""
    devices = list_devices("cpu")[:num_devices]
    with mock.patch("aioreplica.strategies._multi_worker.chosen_devices", return_value=devices):
        yield


async def on_workers(
    num_workers: int,
    num_replicas: int,
    program: Program[T],
    *,
    timeout: float | None = None,
    options: ar.CommunicationOptions | None = None,
) -> list[T]:
    """Run one program on every worker; return its results, or raise what one of them raises."""
    results = await outcomes(
        strategies(num_workers, num_replicas, timeout=timeout, options=options),
        [program] * num_workers,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def outcomes(
    made: Sequence[MultiWorkerMirroredStrategy], programs: Sequence[Program[Any]]
) -> list[Any]:
    """Run a program on each worker; return what each gives or raises."""

    async def worker(strategy: MultiWorkerMirroredStrategy, program: Program[Any]) -> Any:
        async with strategy:
            return await program(strategy)

    pairs = zip(made, programs, strict=True)
    return await asyncio.gather(*(worker(*pair) for pair in pairs), return_exceptions=True)
