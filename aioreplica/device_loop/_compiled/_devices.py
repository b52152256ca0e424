"""The jax devices of a strategy: one for each replica, held together, one program at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, final

import jax

from ...context import REGISTRY
from ...devices import Gate, list_devices, new_gate
from ...devices.backends import ask_jax_for_cpus
from ...errors import DeviceError
from ...replica import BlockingContext

LOOK_S = 0.25
"""How often a thread that waits for another program looks whether its run has ended."""

CURE_OF_CPUS = (
    "Their number is fixed at jax's first operation: call ar.set_logical_devices('cpu', {0}) "
    "before it (or set JAX_NUM_CPU_DEVICES={0} in the environment)."
)
CURE = "Use devices of jax.devices('{0}'), install a jax that finds them, or leave out `compile`."


def jax_devices(names: Sequence[str]) -> list[Any]:
    """Return jax's device for each of some devices; "-" is its first CPU.

    Raises:
        DeviceError: If jax has fewer, or none of a kind, or two replicas are on one.
    """
    wanted = ["cpu:0" if name == "-" else name for name in names]
    indices = [int(name.partition(":")[2]) for name in wanted if name.startswith("cpu:")]
    if indices:
        ask_jax_for_cpus(max(len(list_devices("cpu")), 1 + max(indices)))
    found = []
    for name in wanted:
        kind, _, index = name.partition(":")
        available, cause = _available(kind)
        if int(index) >= len(available):
            is_cpu = kind == "cpu"
            cure = CURE_OF_CPUS.format(1 + max(indices)) if is_cpu else CURE.format(kind)
            count = len(available) or "no"
            raise DeviceError(
                f"jax has {count} {kind} devices, but the strategy uses {name}. {cure}",
                device=name,
            ) from cause
        found.append(available[int(index)])
    if len(set(wanted)) < len(wanted):
        raise DeviceError(
            f"A compiled step needs a jax device for each replica, but the strategy has replicas "
            f"on {', '.join(wanted)}. Give each replica a device of its own."
        )
    return found


def _available(kind: str) -> tuple[Sequence[Any], RuntimeError | None]:
    """Return jax's devices of a kind, and why it has none if it says so."""
    try:
        return jax.devices(kind), None
    except RuntimeError as error:
        return (), error


@final
class Gang:
    """Holds the lanes of all replicas until the one that leads is done.

    Args:
        size: How many replicas there are.
        loop: The event loop of the run.

    Invariants:
        * Each gate is opened once.
        * Once the run is aborted, the others wait only for one that leads and has come.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop | None) -> None:
        self._lock = Lock()
        self._missing = size - 1
        self._is_ready = size == 1
        self._is_led = self._is_over = False
        self._all_here = new_gate(loop)
        self._gates: list[Gate] = [new_gate(loop) for _ in range(size - 1)]
        if self._is_ready:
            self._all_here.open()

    def follow(self, replica_id: int, blocking: BlockingContext) -> None:
        """Hold the lane of a replica that does not lead; on its thread."""
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._let_lead()
        with blocking.waiting("the compiled steps"):
            self._gates[replica_id - 1].wait()
        blocking.check_running()

    def wait_for_all(self, blocking: BlockingContext) -> None:
        """Wait until all other threads are here, or the run has ended."""
        with self._lock:
            self._is_led = True
        blocking.check_running()  # behind the line above: an abort is seen here, or sees that
        with blocking.waiting("the other devices"):
            self._all_here.wait()
        blocking.check_running()

    def end(self) -> None:
        """Let the others go; idempotent."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            for gate in self._gates:
                gate.open()

    def abort(self) -> None:
        """Wake who waits, as the run has ended; from any thread, idempotent.

        The others go, too, unless one that leads has come: its op may have been taken back from
        the queue of a busy device, and never comes then.
        """
        with self._lock:
            is_led = self._is_led
        self._let_lead()
        if not is_led:
            self.end()

    def _let_lead(self) -> None:
        with self._lock:
            is_first, self._is_ready = not self._is_ready, True
        if is_first:
            self._all_here.open()


@contextmanager
def only_one(
    blocking: BlockingContext, before_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run what is in the `with` block while no other compiled program of the process runs.

    Several that wait for each other's devices inside XLA would end the process.

    Args:
        blocking: Shows that the thread waits.
        before_wait: Called first if it has to wait for its turn.

    Cancellation:
        CancelledError once the run is aborted, while it waits for its turn.
    """
    lock = REGISTRY.once("compiled_execution", Lock)
    if not lock.acquire(blocking=False):
        if before_wait is not None:
            before_wait()
        with blocking.waiting("another compiled program"):
            while not lock.acquire(timeout=LOOK_S):
                blocking.check_running()
    try:
        yield
    finally:
        lock.release()
