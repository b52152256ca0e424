"""The metrics of strategies, as every exporter gives them: names, labels, values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self, final
from weakref import WeakKeyDictionary

from ..checkpoint import SAVE_BOUNDS_S, CheckpointManager, CheckpointStatistics
from ..context import REGISTRY
from ..devices import ProcessStatistics
from ..strategies import CoordinatorStatistics, ParameterServerStrategy, Strategy
from ..telemetry import BOUNDS_S, Observer, Totals, printable, usage


@final
@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric.

    Attributes:
        name: After "aioreplica_", without the "_total" of counters.
        help: What it is.
        is_counter: Whether it only grows.
        labels: Names of its labels.
        bounds: Of a histogram, whose value is the sum, and grows; empty of what is none.
    """

    name: str
    help: str
    is_counter: bool
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def is_histogram(self) -> bool:
        """True if it has counts below bounds."""
        return bool(self.bounds)


class Measurement(NamedTuple):
    """One value of a metric; of a histogram with the counts at most each bound, and of all."""

    metric: MetricFamily
    labels: tuple[str, ...]
    value: float
    buckets: tuple[tuple[str, int], ...] = ()


def _counter(name: str, help_text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, help_text, is_counter=True, labels=("strategy", *labels))


def _gauge(name: str, help_text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, help_text, is_counter=False, labels=("strategy", *labels))


def _histogram(name: str, help_text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, help_text, True, ("strategy", *labels), BOUNDS_S)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple(zip((*map(str, bounds), "+Inf"), counts, strict=True))


REPLICAS = _gauge("replicas", "Replicas of the strategy.", "kind")
STEPS = _counter("steps", "Steps started.")
ACTIVE = _gauge("active_runs", "Runs in progress.")
RUNS = _counter("runs", "Runs that have ended.")
RUN_SECONDS = _histogram("run_seconds", "Seconds from begin to end of runs.")
FAULTS = _counter("faults", "Runs that ended with an error.", "error")
MERGES = _counter("collectives", "Meetings of replicas.", "collective")
FAILED = _counter("failed_collectives", "Meetings that failed.", "collective")
BYTES = _counter("collective_bytes", "Bytes brought to meetings.", "collective")
WAITED = _histogram("collective_wait_seconds", "Seconds replicas waited to meet.", "collective")
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


def _of_saves(name: str, help_text: str, *, is_counter: bool = False) -> MetricFamily:
    return MetricFamily(f"checkpoint_{name}", help_text, is_counter, ("checkpoints",))


SAVES = _of_saves("saves", "Steps saved.", is_counter=True)
FAILED_SAVES = _of_saves("failed_saves", "Saves that failed.", is_counter=True)
SAVED_BYTES = _of_saves("saved_bytes", "Length of the data files.", is_counter=True)
RETRIED = _of_saves("retried_calls", "Failed calls made again.", is_counter=True)
SAVE_SECONDS = MetricFamily(
    "checkpoint_save_seconds", "Seconds that saves took.", True, ("checkpoints",), SAVE_BOUNDS_S
)
SAVING = _of_saves("saving", "1 while a save is going on.")
LAST_STEP = _of_saves("last_step", "The step saved last.")
LAST_SAVE = _of_saves("last_save_seconds", "Seconds that took.")
LAST_AT = _of_saves("last_success_timestamp_seconds", "When it ended, by the clock on the wall.")
AGE = _of_saves("age_seconds", "Seconds since then.")

METRICS = (
    SAVES, FAILED_SAVES, SAVED_BYTES, RETRIED, SAVE_SECONDS, SAVING, LAST_STEP, LAST_SAVE, LAST_AT,
    AGE,
    REPLICAS, STEPS, ACTIVE, RUNS, RUN_SECONDS, FAULTS, MERGES, FAILED, BYTES, WAITED, LATE, OPS,
    BUSY, QUEUED, RUNNING, SENT, SEND_S, DEATHS, MEMORY, LAG, MAX_LAG, SCALAR, MADE, INPUT,
    WAITING, UNDER_WAY, CLOSURES, RETRIES, PULLS, PUSHES, PS_BYTES, STALENESS,
    MAX_STALENESS,
)  # fmt: skip


@final
class MeteredStrategies:
    """The strategies and managers whose metrics go to one place, each under a name of its own.

    Attributes:
        observe: Set by an exporter that is told of each run, wait and save: makes an observer for
            what has the name that it is given.
    """

    def __init__(self) -> None:
        self.observe: Callable[[str], Observer] | None = None
        self._lock = Lock()
        self._metered: dict[str, tuple[Strategy, Totals]] = {}
        self._managers: dict[str, CheckpointManager] = {}

    def add(self, strategy: Strategy | CheckpointManager, name: str | None) -> Export:
        """Count what a strategy does from now on, or show what a manager has done.

        Raises:
            TypeError: If it is neither, or the name not a str.
            ValueError: If another one of its kind has that name.
        """
        if not isinstance(strategy, (Strategy, CheckpointManager)):
            raise TypeError(
                f"Metrics are those of a strategy or a CheckpointManager, got {strategy!r}."
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"The name of a strategy must be a str, got {name!r}.")
        if isinstance(strategy, CheckpointManager):
            return self._add_manager(strategy, name)
        totals = Totals()
        with self._lock:
            chosen = self._name(self._metered, type(strategy).__name__, name)
            self._metered[chosen] = strategy, totals
        remove = strategy.observers.add(totals.observer)
        remove_told = self._told(strategy, chosen)

        def close() -> None:
            remove()
            remove_told()
            with self._lock:
                if self._metered.get(chosen, (None, None))[1] is totals:
                    del self._metered[chosen]

        return Export(chosen, close)

    def _add_manager(self, manager: CheckpointManager, name: str | None) -> Export:
        with self._lock:
            chosen = self._name(self._managers, "CheckpointManager", name)
            self._managers[chosen] = manager
        remove = self._told(manager, chosen)

        def close() -> None:
            remove()
            with self._lock:
                if self._managers.get(chosen) is manager:
                    del self._managers[chosen]

        return Export(chosen, close)

    def _told(self, watched: Strategy | CheckpointManager, name: str) -> Callable[[], None]:
        if self.observe is None:
            return lambda: None
        return watched.observers.add(self.observe(name))

    def measure(self) -> Iterator[Measurement]:
        """Yield all values now, from any thread."""
        with self._lock:
            metered, managers = tuple(self._metered.items()), tuple(self._managers.items())
        for name, manager in managers:
            yield from _of_manager(name, manager.statistics())
        for name, (strategy, totals) in metered:
            yield from _of_strategy(name, strategy)
            yield from _of_totals(name, totals)
        if metered:
            used = usage()
            yield from (Measurement(MADE, (kind,), n) for kind, n in used.strategies.items())
            yield from (Measurement(INPUT, (api,), n) for api, n in used.input_calls.items())

    def _name(self, taken: Container[str], kind: str, given: str | None) -> str:
        if given is not None:
            chosen = printable(given)
            if chosen in taken:
                what = "checkpoints" if taken is self._managers else "a strategy"
                raise ValueError(
                    f"Metrics of {what} named {chosen!r} go there already. Give name=..., or close "
                    "the other export first."
                )
            return chosen
        number, name = 1, kind
        while name in taken:
            number += 1
            name = f"{kind} {number}"
        return name


@final
class Export:
    """An export that goes on until it is closed, or the `with` block is left."""

    __slots__ = ("_close", "_name")

    def __init__(self, name: str, close: Callable[[], None]) -> None:
        self._name = name
        self._close = close

    @property
    def name(self) -> str:
        """Its label."""
        return self._name

    def close(self) -> None:
        """Stop counting and exporting; idempotent."""
        self._close()

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


def _of_manager(name: str, now: CheckpointStatistics) -> Iterator[Measurement]:
    label = (name,)
    yield Measurement(SAVES, label, now.num_saved)
    yield Measurement(FAILED_SAVES, label, now.num_failed)
    yield Measurement(SAVED_BYTES, label, now.num_bytes)
    yield Measurement(RETRIED, label, now.num_retried)
    buckets = _buckets(SAVE_BOUNDS_S, (*now.save_counts, now.num_saved))
    yield Measurement(SAVE_SECONDS, label, now.save_s, buckets)
    yield Measurement(SAVING, label, now.is_saving)
    last = (now.last_step, now.last_save_s, now.last_saved_at, now.age_s)
    for metric, value in zip((LAST_STEP, LAST_SAVE, LAST_AT, AGE), last, strict=True):
        if value is not None:
            yield Measurement(metric, label, value)


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
    yield Measurement(RUN_SECONDS, (name,), run_s, _buckets(BOUNDS_S, totals.run_counts()))
    for error, count in totals.faults().items():
        yield Measurement(FAULTS, (name, printable(error)), count)
    for collective, total in totals.collectives().items():
        labels = (name, collective)
        yield Measurement(MERGES, labels, total.num_merges)
        yield Measurement(FAILED, labels, total.num_failed)
        yield Measurement(BYTES, labels, total.num_bytes)
        counts = totals.wait_counts(collective)
        yield Measurement(WAITED, labels, total.waited_s, _buckets(BOUNDS_S, counts))
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
