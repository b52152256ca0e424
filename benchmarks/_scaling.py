"""How long reductions among many workers take, from the time of one message.

A message of m bytes takes alpha + beta * m (Hockney's model), and a worker sends and receives one
at a time; to add m bytes takes gamma * m. Algorithms are simulated in rounds: every worker has the
time at which it is ready, and a round makes new ones from those of the workers it hears from. So a
worker that starts late, or whose messages are slow, delays exactly those that depend on it.

A worker that sends many messages in one round does not wait for one after the other: only the first
costs alpha, and each an overhead of the processor and its bytes (LogGP).

Source:
    R. Hockney, "The communication challenge for MPP" (1994); R. Thakur, R. Rabenseifner, W. Gropp,
    "Optimization of collective communication operations in MPICH" (2005), for the algorithms;
    A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP" (1995), for many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from aioreplica.cluster._engine import SMALL_BYTES
from aioreplica.cluster._frame import FRAME_BYTES

MAX_SIMULATED_RING = 2048  # workers; beyond, the same result from a formula (see `_ring`)

Times = Any  # an array with one time per worker, in seconds
Algorithm = Callable[["Cluster", int, Times], Times]


@final
@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
    """

    alpha: float
    beta: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.alpha + self.beta * num_bytes


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts with the same number of workers each.

    Attributes:
        inside: Between workers of one host.
        between: Between hosts.
        gamma: Seconds per byte that is added up.
        per_host: Workers of a host.
        ports: Links of a host to others, which its workers share.
        slow: Factor of the messages of each worker; None if all are alike.
        overhead: Seconds of the processor per message, where many are on their way.
        look: Seconds per frame that a worker of aioreplica looks at.
        software: Seconds of a reduction of aioreplica that are no message and no sum.
    """

    inside: Link
    between: Link
    gamma: float
    per_host: int = 8
    ports: int = 1
    slow: Any = None
    overhead: float = 0.0
    look: float = 0.0
    software: float = 0.0

    def link(self, size: int, num_senders: int = 1) -> Link:
        """Return the slowest link that so many workers, host by host, have among them.

        `num_senders` workers of each host use it at the same time.
        """
        if size <= self.per_host:
            return self.inside
        share = max(1.0, num_senders / self.ports)
        return Link(self.between.alpha, self.between.beta * share)

    def factors(self, size: int) -> Any:
        """Return by how much the messages of each worker take longer."""
        return np.ones(size) if self.slow is None else self.slow[:size]


def fit(points: Sequence[tuple[int, float]]) -> Link:
    """Fit a link to measured pairs of bytes and seconds, all with the same relative weight.

    Raises:
        ValueError: If fewer than two sizes were measured.

    Example:
        >>> link = fit([(1_000, 3e-6), (10_000, 12e-6), (100_000, 102e-6)])
        >>> round(link.alpha * 1e6, 3), round(1e-9 / link.beta, 3)
        (2.0, 1.0)
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"A line needs two sizes, got {list(points)}.")
    sizes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return Link(max(float(alpha), 0.0), max(float(beta), 0.0))


def tree(cluster: Cluster, num_bytes: int, start: Times) -> Times:
    """Reduce along a binomial tree to worker 0, and broadcast back along it."""
    ready, size = start.copy(), len(start)
    factors = cluster.factors(size)
    spans = [1 << level for level in range((size - 1).bit_length())]
    for span in spans:
        parents = np.arange(0, size - span, 2 * span)
        cost = cluster.link(2 * span).seconds(num_bytes) * factors[parents + span]
        heard = np.maximum(ready[parents], ready[parents + span]) + cost
        ready[parents] = heard + cluster.gamma * num_bytes
    for span in reversed(spans):
        parents = np.arange(0, size - span, 2 * span)
        cost = cluster.link(2 * span).seconds(num_bytes) * factors[parents]
        ready[parents] += cost
        ready[parents + span] = ready[parents]
    return ready


def ring(cluster: Cluster, num_bytes: int, start: Times) -> Times:
    """Pass parts around a ring: one round to add them up, one to hand out the sums."""
    size = len(start)
    if size == 1:
        return start.copy()
    part = num_bytes / size
    costs = cluster.link(size).seconds(part) * cluster.factors(size)
    ready = _ring(start, costs + cluster.gamma * part, size - 1)
    return _ring(ready, costs, size - 1)


def _ring(start: Times, costs: Any, num_rounds: int) -> Times:
    """Make rounds in which each worker hears from the one before it.

    A worker is ready after the slowest chain of messages that ends at it. In a whole turn every
    chain is open to each worker, so the slowest one stays at the slowest worker as long as it can;
    that is the formula, which is exact for one slow worker up to a round (tested).
    """
    if len(start) <= MAX_SIMULATED_RING:
        ready = start.copy()
        for _ in range(num_rounds):
            ready = np.maximum(ready, np.roll(ready, 1)) + costs
        return ready
    return np.full(len(start), start.max() + num_rounds * costs.max())


def to_all(cluster: Cluster, num_bytes: float, start: Times) -> Times:
    """Have every worker send so many bytes to each of the others, all of which it needs."""
    size = len(start)
    if size == 1:
        return start.copy()
    inside = min(size, cluster.per_host) - 1
    outside = size - 1 - inside
    shared = cluster.link(size, cluster.per_host)
    cost = shared.alpha + (size - 1) * cluster.overhead
    cost += (inside * cluster.inside.beta + outside * shared.beta) * num_bytes
    return np.full(size, (start + cost * cluster.factors(size)).max())


def exchange(cluster: Cluster, num_bytes: int, start: Times) -> Times:
    """Reduce as aioreplica does: frames to all, then parts to all, sums to all.

    Frames carry arrays that are small enough with them; two workers send each other everything.
    """
    size = len(start)
    looked = cluster.software + size * cluster.look
    if num_bytes <= SMALL_BYTES // size:
        ready = to_all(cluster, FRAME_BYTES + num_bytes, start)
        return ready + looked + size * num_bytes * cluster.gamma
    ready = to_all(cluster, FRAME_BYTES, start) + looked
    if size > 2:
        ready = to_all(cluster, num_bytes / size, ready) + num_bytes * cluster.gamma
        return to_all(cluster, num_bytes / size, ready)
    return to_all(cluster, num_bytes, ready) + size * num_bytes * cluster.gamma


def hierarchical(cluster: Cluster, num_bytes: int, start: Times) -> Times:
    """Ring in each host, ring or tree over hosts for each part, and a ring in each host again.

    The workers of a host send their parts at once, and share its links. Ring or tree is chosen by
    what they would take if all were alike.
    """
    size, per_host = len(start), cluster.per_host
    if size <= per_host:
        return ring(cluster, num_bytes, start)
    num_hosts, part = size // per_host, num_bytes // per_host
    hosts = start.reshape(num_hosts, per_host)
    slow = cluster.factors(size).reshape(num_hosts, per_host).max(axis=1)
    inside = cluster.inside.seconds(part) * slow
    ready = hosts.max(axis=1) + (per_host - 1) * (inside + cluster.gamma * part)
    shared = cluster.link(size, per_host)
    alike = Cluster(shared, shared, cluster.gamma, 1)
    even = np.zeros(num_hosts)
    over = min((tree, ring), key=lambda each: float(each(alike, part, even).max()))
    done = over(replace(alike, slow=slow), part, ready) + (per_host - 1) * inside
    return np.repeat(done, per_host)


ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "aioreplica": exchange,
}


def seconds_of(
    algorithm: Algorithm, cluster: Cluster, num_bytes: int, num_workers: int, start: Times = None
) -> float:
    """Return the time from the first worker's start until the last one has the result."""
    begin = np.zeros(num_workers) if start is None else start
    return float(algorithm(cluster, num_bytes, begin).max() - begin.min())


def step_starts(num_workers: int, step_s: float, rng: np.random.Generator) -> Times:
    """Return when each worker comes to the reduction: after a step of about `step_s`.

    Log-normal with 3 % of spread, and one worker in a thousand takes half as long again.
    """
    times = step_s * rng.lognormal(0.0, 0.03, num_workers)
    times[rng.random(num_workers) < 1e-3] *= 1.5
    return times
