"""The cluster resolver: the tasks of a cluster, and which of them this process is."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
TASK_TYPES = (CHIEF, WORKER, PS, EVALUATOR)


@final
@dataclass(frozen=True, slots=True)
class ClusterResolver:
    """Says how many workers there are, where they are, and which one this process is.

    `ar.cluster.resolve()` makes one from what the launcher of the process has set.

    Args:
        cluster_spec: The addresses (`host:port`) of the tasks of each type: "chief" (at most one),
            "worker", "ps" or "evaluator". Empty if the launcher does not tell them.
        task_type: What this process is.
        task_id: Its index among the tasks of its type.
        num_workers: How many workers there are, the chief included. None counts them in
            `cluster_spec`, or is 1 without one.
        coordinator_address: Where workers find each other; None takes the first one's address, or
            leaves that to the launcher.
        source: Who said so, for messages.

    Raises:
        TypeError: If something is of the wrong type.
        ValueError: If this process is not in the cluster, an address is malformed or given twice,
            or numbers do not agree.

    Example:
        >>> spec = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
        >>> resolver = ClusterResolver(spec, task_type="worker", task_id=1)
        >>> resolver.num_workers, resolver.rank, resolver.is_chief, resolver.coordinator_address
        (3, 2, False, 'a:2222')

    Source:
        tf.distribute.cluster_resolver.ClusterResolver; ranks count the chief first, as there.
    """

    cluster_spec: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    task_type: str = WORKER
    task_id: int = 0
    num_workers: int = None  # type: ignore[assignment]  # None is replaced at once
    coordinator_address: str | None = None
    source: str = "arguments"

    def __post_init__(self) -> None:
        spec = _checked_spec(self.cluster_spec, self.source)
        _require_task(self, spec)
        counted = len(spec.get(CHIEF, ())) + len(spec.get(WORKER, ()))
        given = self.num_workers
        count = (counted or 1) if given is None else _int("num_workers", given, 1, self.source)
        if counted and count != counted:
            raise ValueError(
                f"num_workers is {count}, but the cluster has {counted}: {_shown(spec)}. "
                f"({self.source})"
            )
        object.__setattr__(self, "cluster_spec", spec)
        object.__setattr__(self, "num_workers", count)
        if self.task_type == WORKER and not spec and self.task_id >= count:
            raise ValueError(
                f"task_id is {self.task_id}, but there are {count} workers, counted from 0. "
                f"({self.source})"
            )
        address = self.coordinator_address
        if address is not None:
            _require_address(address, "coordinator_address", self.source)
        elif self.workers:
            object.__setattr__(self, "coordinator_address", self.workers[0])

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of all workers by rank, the chief first; empty if they are not known."""
        return (*self.cluster_spec.get(CHIEF, ()), *self.cluster_spec.get(WORKER, ()))

    @property
    def rank(self) -> int | None:
        """The number of this process among the workers, from 0; None if it is not one of them."""
        if self.task_type == CHIEF:
            return 0
        if self.task_type != WORKER:
            return None
        return self.task_id + len(self.cluster_spec.get(CHIEF, ()))

    @property
    def is_chief(self) -> bool:
        """True if this process does what is done once, such as writing checkpoints."""
        return self.rank == 0


def _checked_spec(given: object, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"A cluster is a mapping of task types to lists of addresses, got {given!r} "
            f"({type(given).__name__}). ({source})"
        )
    spec: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for kind, addresses in given.items():
        if kind not in TASK_TYPES:
            known = ", ".join(map(repr, TASK_TYPES))
            raise ValueError(f"Unknown task type {kind!r} in the cluster; use {known}. ({source})")
        no_order = str, Mapping, set, frozenset
        if isinstance(addresses, no_order) or not isinstance(addresses, Iterable):
            raise TypeError(
                f"The tasks of type {kind!r} are a list of addresses such as ['host:2222'], got "
                f"{addresses!r}. ({source})"
            )
        spec[kind] = tuple(addresses)
        for index, address in enumerate(spec[kind]):
            label = f"{kind} {index}"
            _require_address(address, label, source)
            if address in seen:
                raise ValueError(
                    f"{seen[address]} and {label} have the same address {address!r}. ({source})"
                )
            seen[address] = label
    if len(spec.get(CHIEF, ())) > 1:
        raise ValueError(f"A cluster has at most one chief, got {list(spec[CHIEF])}. ({source})")
    return {kind: addresses for kind, addresses in spec.items() if addresses}


def _require_task(resolver: ClusterResolver, spec: Mapping[str, tuple[str, ...]]) -> None:
    kind, source = resolver.task_type, resolver.source
    if kind not in TASK_TYPES:
        known = ", ".join(map(repr, TASK_TYPES))
        raise ValueError(f"Unknown task type {kind!r}; use {known}. ({source})")
    index = _int("task_id", resolver.task_id, 0, source)
    if kind == CHIEF and index:
        raise ValueError(f"There is one chief, so its task_id is 0, not {index}. ({source})")
    if kind == EVALUATOR or not spec:  # an evaluator need not be in the cluster
        return
    count = len(spec.get(kind, ()))
    if index >= count:
        raise ValueError(
            f"This process is {kind} {index}, but the cluster has {count} of that type: "
            f"{_shown(spec)}. ({source})"
        )


def _require_address(address: object, label: str, source: str) -> None:
    if not isinstance(address, str):
        raise TypeError(f"The address of {label} is text, got {address!r}. ({source})")
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if not (host and colon and is_port) or any(letter.isspace() for letter in address):
        raise ValueError(
            f"The address of {label} is 'host:port' with a port from 1 to 65535, got {address!r}. "
            f"({source})"
        )


def _int(name: str, value: Any, lowest: int, source: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an int, got {value!r}. ({source})") from None
    if number < lowest or isinstance(value, bool):
        raise ValueError(f"{name} is {lowest} or more, got {value!r}. ({source})")
    return number


def _shown(spec: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{kind}: {list(addresses)}" for kind, addresses in spec.items())
