"""The metrics of strategies, as every exporter gives them: names, labels, values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self, final
from weakref import WeakKeyDictionary

from ..context import REGISTRY
from ..devices import ProcessStatistics
from ..strategies import CoordinatorStatistics, ParameterServerStrategy, Strategy
from ..telemetry import Totals, printable, usage


@final
@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric.

    Attributes:
        name: After "aioreplica_", without the "_total" of counters.
        help: What it is.
        is_counter: Whether it only grows.
        labels: Names of its labels, after "strategy".
    """

    name: str
    help: str
    is_counter: bool
    labels: tuple[str, ...] = ()


class Measurement(NamedTuple):
    """One value of a metric."""

    metric: MetricFamily
    labels: tuple[str, ...]
    value: float


def _counter(name: str, help_text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, help_text, is_counter=True, labels=("strategy", *labels))


def _gauge(name: str, help_text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, help_text, is_counter=False, labels=("strategy", *labels))


REPLICAS = _gauge("replicas", "Replicas of the strategy.", "kind")
STEPS = _counter("steps", "Steps started.")
ACTIVE = _gauge("active_runs", "Runs in progress.")
RUNS = _counter("runs", "Runs that have ended.")
RUN_SECONDS = _counter("run_seconds", "Seconds from begin to end of runs.")
FAULTS = _counter("faults", "Runs that ended with an error.", "error")
MERGES = _counter("collectives", "Meetings of replicas.", "collective")
FAILED = _counter("failed_collectives", "Meetings that failed.", "collective")
BYTES = _counter("collective_bytes", "Bytes brought to meetings.", "collective")
WAITED = _counter("collective_wait_seconds", "Seconds replicas waited to meet.", "collective")
LATE = _gauge("replica_late_seconds", "Lateness in the newest merges, summed.", "replica")
OPS = _counter("device_ops", "Ops that have ended.", "device")
BUSY = _counter("device_busy_seconds", "Seconds spent in ops.", "device")
QUEUED = _gauge("device_ops_queued", "Ops that wait for the device.", "device")
RUNNING = _gauge("device_ops_running", "Ops that run.", "device")
SENT = _counter("device_sent_bytes", "Bytes sent to the device's process.", "device")
SEND_S = _counter("device_send_seconds", "Seconds spent sending to it.", "device")
DEATHS = _counter("device_worker_deaths", "Device processes that died.", "device")
MEMORY = _gauge("device_worker_memory_bytes", "Resident memory of the device process.", "device")
LAG = _gauge("event_loop_lag_seconds", "Time the loop took to answer a device thread.")
MAX_LAG = _gauge("event_loop_lag_seconds_max", "The longest time it took.")
SCALAR = _gauge("scalar", "Newest value of a number that steps record.", "name")
WAITING = _gauge("closures_queued", "Closures that wait for a process.")
UNDER_WAY = _gauge("closures_running", "Closures under way.")
CLOSURES = _counter("closures", "Closures that are over.", "result")
RETRIES = _counter("closure_retries", "Runs of closures that had pushed in another run.")
PULLS = _counter("parameter_server_pulls", "Shards that were asked for.")
PUSHES = _counter("parameter_server_pushes", "Writes and gradients.", "result")
PS_BYTES = _counter("parameter_server_bytes", "Bytes of them.", "direction")
STALENESS = _gauge("gradient_staleness_versions_mean", "How old gradients were.")
MAX_STALENESS = _gauge("gradient_staleness_versions_max", "How old one was at most.")
MADE = MetricFamily(
    "strategies", "Strategies made by the process.", is_counter=True, labels=("kind",)
)
INPUT = MetricFamily(
    "input_calls", "Calls that distribute input.", is_counter=True, labels=("method",)
)

METRICS = (
    REPLICAS, STEPS, ACTIVE, RUNS, RUN_SECONDS, FAULTS, MERGES, FAILED, BYTES, WAITED, LATE, OPS,
    BUSY, QUEUED, RUNNING, SENT, SEND_S, DEATHS, MEMORY, LAG, MAX_LAG, SCALAR, MADE, INPUT,
    WAITING, UNDER_WAY, CLOSURES, RETRIES, PULLS, PUSHES, PS_BYTES, STALENESS,
    MAX_STALENESS,
)  # fmt: skip


@final
class MeteredStrategies:
    """The strategies whose metrics go to one place, each under a name of its own."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._metered: dict[str, tuple[Strategy, Totals]] = {}

    def add(self, strategy: Strategy, name: str | None) -> Export:
        """Count what a strategy does from now on.

        Raises:
            TypeError: If it is not a strategy, or the name not a str.
            ValueError: If another strategy has that name.
        """
        if not isinstance(strategy, Strategy):
            raise TypeError(f"Metrics are those of a strategy, got {strategy!r}.")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"The name of a strategy must be a str, got {name!r}.")
        totals = Totals()
        with self._lock:
            chosen = self._free_name(type(strategy).__name__) if name is None else printable(name)
            if chosen in self._metered:
                raise ValueError(
                    f"Metrics of a strategy named {chosen!r} go there already. Give name=..., or "
                    "close the other export first."
                )
            self._metered[chosen] = strategy, totals
        strategy.observers.add(totals.observer)
        return Export(self, chosen, strategy, totals)

    def remove(self, name: str, totals: Totals) -> None:
        """Forget a strategy, unless the name is another one's by now; idempotent."""
        with self._lock:
            if name in self._metered and self._metered[name][1] is totals:
                del self._metered[name]

    def measure(self) -> Iterator[Measurement]:
        """Yield all values now, from any thread."""
        with self._lock:
            metered = tuple(self._metered.items())
        for name, (strategy, totals) in metered:
            yield from _of_strategy(name, strategy)
            yield from _of_totals(name, totals)
        if metered:
            used = usage()
            yield from (Measurement(MADE, (kind,), n) for kind, n in used.strategies.items())
            yield from (Measurement(INPUT, (api,), n) for api, n in used.input_calls.items())

    def _free_name(self, kind: str) -> str:
        number, name = 1, kind
        while name in self._metered:
            number += 1
            name = f"{kind} {number}"
        return name


@final
class Export:
    """An export that goes on until it is closed, or the `with` block is left."""

    __slots__ = ("_metered", "_name", "_strategy", "_totals")

    def __init__(
        self, metered: MeteredStrategies, name: str, strategy: Strategy, totals: Totals
    ) -> None:
        self._metered = metered
        self._name = name
        self._strategy = strategy
        self._totals = totals

    @property
    def name(self) -> str:
        """The strategy's label."""
        return self._name

    def close(self) -> None:
        """Stop counting and exporting; idempotent."""
        self._strategy.observers.remove(self._totals.observer)
        self._metered.remove(self._name, self._totals)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Export of {self._name}>"


def metered_of(
    exporter: str, target: object, connect: Callable[[MeteredStrategies], object]
) -> MeteredStrategies:
    """Return the strategies that go to a registry or provider; connect them to it the first time.

    A registry that is no longer used is forgotten.
    """
    targets = REGISTRY.once(exporter, WeakKeyDictionary[object, MeteredStrategies])
    with REGISTRY.once("metered", Lock):
        metered = targets.get(target)
        if metered is None:
            metered = MeteredStrategies()
            connect(metered)
            targets[target] = metered
        return metered


def _of_strategy(name: str, strategy: Strategy) -> Iterator[Measurement]:
    now = strategy.statistics()
    kind = type(strategy).__name__
    yield Measurement(REPLICAS, (name, kind), strategy.num_replicas_in_sync)
    yield Measurement(STEPS, (name,), now.num_steps)
    yield Measurement(ACTIVE, (name,), now.num_active)
    for each in now.skew:
        yield Measurement(LATE, (name, str(each.replica_id)), each.late_s)
    for device, lane in now.lanes.items():
        yield Measurement(OPS, (name, device), lane.done)
        yield Measurement(BUSY, (name, device), lane.busy_s)
        yield Measurement(QUEUED, (name, device), lane.queued)
        yield Measurement(RUNNING, (name, device), lane.running)
        if lane.process is not None:
            yield from _of_process((name, device), lane.process)
    if now.loop_lag_s is not None:
        yield Measurement(LAG, (name,), now.loop_lag_s)
        yield Measurement(MAX_LAG, (name,), now.max_loop_lag_s)
    if isinstance(strategy, ParameterServerStrategy) and strategy.coordinator is not None:
        yield from _of_coordinator(name, strategy.coordinator.statistics())


def _of_coordinator(name: str, now: CoordinatorStatistics) -> Iterator[Measurement]:
    yield Measurement(WAITING, (name,), now.queue_depth)
    yield Measurement(UNDER_WAY, (name,), now.num_running)
    yield Measurement(CLOSURES, (name, "finished"), now.num_finished)
    yield Measurement(CLOSURES, (name, "failed"), now.num_failed)
    yield Measurement(CLOSURES, (name, "cancelled"), now.num_cancelled)
    yield Measurement(RETRIES, (name,), now.num_retries)
    yield Measurement(PULLS, (name,), now.pulls)
    yield Measurement(PUSHES, (name, "applied"), now.pushes)
    yield Measurement(PUSHES, (name, "seen before"), now.pushes_dropped)
    yield Measurement(PUSHES, (name, "stale"), now.pushes_stale)
    yield Measurement(PS_BYTES, (name, "pulled"), now.bytes_pulled)
    yield Measurement(PS_BYTES, (name, "pushed"), now.bytes_pushed)
    yield Measurement(STALENESS, (name,), now.mean_staleness)
    yield Measurement(MAX_STALENESS, (name,), now.max_staleness)


def _of_process(labels: tuple[str, str], process: ProcessStatistics) -> Iterator[Measurement]:
    yield Measurement(SENT, labels, process.bytes_sent)
    yield Measurement(SEND_S, labels, process.send_s)
    yield Measurement(DEATHS, labels, process.deaths)
    if process.memory_bytes is not None:
        yield Measurement(MEMORY, labels, process.memory_bytes)


def _of_totals(name: str, totals: Totals) -> Iterator[Measurement]:
    num_runs, run_s = totals.runs()
    yield Measurement(RUNS, (name,), num_runs)
    yield Measurement(RUN_SECONDS, (name,), run_s)
    for error, count in totals.faults().items():
        yield Measurement(FAULTS, (name, printable(error)), count)
    for collective, total in totals.collectives().items():
        labels = (name, collective)
        yield Measurement(MERGES, labels, total.num_merges)
        yield Measurement(FAILED, labels, total.num_failed)
        yield Measurement(BYTES, labels, total.num_bytes)
        yield Measurement(WAITED, labels, total.waited_s)
    for scalar, value in totals.scalars().items():
        yield Measurement(SCALAR, (name, printable(scalar)), value)


def missing(package: str, error: ImportError) -> ImportError:
    """Return the error of an exporter whose package is not installed."""
    found = ImportError(
        f"This exporter needs {package}, which is not installed. Run: "
        'pip install "aioreplica[telemetry]"'
    )
    found.__cause__ = error
    return found
