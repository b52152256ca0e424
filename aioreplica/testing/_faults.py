"""Faults: ops that fail, hang or take long, workers that are lost, tasks that are cancelled.

All of it as the schedule decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, final

from ..errors import DeviceError, WorkerLostError
from ._pools import LATENCY_S
from ._strategies import mix

if TYPE_CHECKING:
    from ._pools import PoolOp

FAIL, SLOW, HANG, LOSE, CANCEL, POINT = range(6)
SLOW_LINK, SPLIT, RESET, HALF_OPEN = range(8, 12)
WORDS: Final = {
    FAIL: "fail_op",
    SLOW: "slow_device",
    HANG: "hang_op",
    LOSE: "lose_worker",
    CANCEL: "cancel_task",
    POINT: "fail_point",
    SLOW_LINK: "slow_connection",
    SPLIT: "split_data",
    RESET: "reset_connection",
    HALF_OPEN: "half_open",
}
NUM_LISTED: Final = 12
CHANCE: Final = 0.25
"""How likely a fault without a fixed place strikes at each op that it could strike at."""


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that may go wrong.

    Attributes:
        kind: FAIL, SLOW, HANG, LOSE, CANCEL or POINT; SLOW_LINK, SPLIT, RESET or HALF_OPEN of
            connections.
        device: Device, pool or address that it strikes; None for any.
        fn: Name of the function, task or point that it strikes; None for any.
        at: Which matching op, task or visit, from 0; None leaves that to the schedule.
        times: How many of them it strikes at most.
        error: An exception, or its class; None for the usual one.
        factor: How much longer ops take.
    """

    kind: int
    device: str | None = None
    fn: str | None = None
    at: int | None = None
    times: int = 1
    error: Any = None
    factor: float = 1.0

    def matches(self, op: PoolOp) -> bool:
        """Tell whether it may strike this op."""
        if self.device is not None and not same_name(self.device, op.pool.name):
            return False
        if self.fn is None:
            return True
        name = op.describe()
        return same_name(self.fn, name) or same_name(self.fn, name.rpartition(".")[2])

    def describe(self) -> str:
        """Return it as a call, with the names that it looks for."""
        named = self.fn if self.kind in {CANCEL, POINT} else self.device
        shown = [] if named is None else [repr(named)]
        if self.fn is not None and self.kind not in {CANCEL, POINT}:
            shown.append(f"fn={self.fn!r}")
        return f"{WORDS[self.kind]}({', '.join(shown)})"


def name_number(name: str) -> int:
    """Return the 16 bits by which a token knows a name."""
    return mix(*name.encode()) & 0xFFFF


def same_name(wanted: str, name: str) -> bool:
    """Compare names; one read from a token is known by its number only."""
    if wanted.startswith("#"):
        return int(wanted[1:]) == name_number(name)
    return wanted == name


@final
class Faults:
    """Faults to inject into the pools, devices and tasks of a program.

    Every fault is a decision of the schedule: it strikes in some schedules and not in others, at
    an op or a task that the schedule picks, and strikes alike when the schedule is replayed. With
    `at` it strikes in every schedule; a task at a moment that the schedule picks, unless it has
    ended by then.

    Example:
        >>> Faults().fail_op("cpu:1").slow_device("cpu:0", factor=20)
        <Faults | fail_op cpu:1, slow_device cpu:0>
    """

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()

    @property
    def entries(self) -> tuple[Fault, ...]:
        """The faults, in the order they were added."""
        return self._faults

    def fail_op(
        self,
        device: object = None,
        *,
        fn: object = None,
        at: int | None = None,
        times: int = 1,
        error: BaseException | type[BaseException] | None = None,
    ) -> Faults:
        """Let an op raise instead of running.

        Args:
            device: A device, its name or the index of a CPU, or the name of a pool; None for any.
            fn: The function that the op runs, or its name; None for any.
            at: Which of the ops that match, from 0; None leaves it to the schedule.
            times: How many ops may fail.
            error: What they raise; a `DeviceError` if not given.

        Returns:
            The same object, so that calls can be chained.
        """
        _check_error(error)
        _check_count("times", times, 1)
        return self._add(Fault(FAIL, _name(device), _fn_name(fn), _at(at), times, error))

    def slow_device(self, device: object = None, *, factor: float = 10.0) -> Faults:
        """Let every op of a device take `factor` times as long, or none.

        Args:
            device: A device, or the name of a pool; None for any.
            factor: How much longer; an op takes a millisecond of virtual time by itself.

        Returns:
            The same object.
        """
        if not (isinstance(factor, (int, float)) and 1.0 < factor < math.inf):
            raise ValueError(f"factor must be a finite number above 1, got {factor!r}.")
        return self._add(Fault(SLOW, _name(device), factor=float(factor)))

    def hang_op(
        self, device: object = None, *, fn: object = None, at: int | None = None, times: int = 1
    ) -> Faults:
        """Let an op start and never end.

        Args:
            device: A device, or the name of a pool; None for any.
            fn: The function that the op runs, or its name; None for any.
            at: Which of the ops that match, from 0; None leaves it to the schedule.
            times: How many ops may hang.

        Returns:
            The same object.
        """
        _check_count("times", times, 1)
        return self._add(Fault(HANG, _name(device), _fn_name(fn), _at(at), times))

    def lose_worker(self, device: object = None, *, at: int | None = None) -> Faults:
        """Let a device or pool be lost: from some op on, all of its ops raise `WorkerLostError`.

        Args:
            device: A device, or the name of a pool; None for whichever comes first.
            at: With which of its ops, from 0; None leaves it to the schedule.

        Returns:
            The same object.
        """
        return self._add(Fault(LOSE, _name(device), at=_at(at)))

    def cancel_task(self, task: object = None, *, at: int | None = None, times: int = 1) -> Faults:
        """Let a task be cancelled, at any of its awaits, as if whoever wanted its result had gone.

        The main task is left alone (`art.cancel_everywhere` cancels that). If the cancellation
        comes through to it, and nothing is left behind, the schedule has passed.

        Args:
            task: The name of a task or of its function, with wildcards as in file names; or the
                function; None for any task.
            at: Which of the tasks that match, in the order of their making, from 0; None leaves it
                to the schedule.
            times: How many tasks may be cancelled.

        Returns:
            The same object.

        Example:
            >>> Faults().cancel_task("request*", times=2)
            <Faults | cancel_task request*>
        """
        _check_count("times", times, 1)
        return self._add(Fault(CANCEL, fn=_fn_name(task), at=_at(at), times=times))

    def fail_point(
        self,
        name: str,
        *,
        at: int | None = None,
        times: int = 1,
        error: BaseException | type[BaseException] | None = None,
    ) -> Faults:
        """Let `art.fault_point(name)` raise where the program visits it.

        Args:
            name: The point.
            at: Which of the visits, from 0; None leaves it to the schedule.
            times: How many of them may fail.
            error: What they raise; an `OSError` if not given.

        Returns:
            The same object.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"A point has a name, such as 'before commit'; got {name!r}.")
        _check_error(error)
        _check_count("times", times, 1)
        return self._add(Fault(POINT, fn=name, at=_at(at), times=times, error=error))

    def slow_connection(self, address: object = None, *, factor: float = 10.0) -> Faults:
        """Let everything that a connection carries take `factor` times as long, or none of it.

        Args:
            address: Of the server: a port, "host:port" or a path; None for any connection.
            factor: How much longer; it takes a millisecond of virtual time by itself.

        Returns:
            The same object.
        """
        if not (isinstance(factor, (int, float)) and 1.0 < factor < math.inf):
            raise ValueError(f"factor must be a finite number above 1, got {factor!r}.")
        return self._add(Fault(SLOW_LINK, _address(address), factor=float(factor)))

    def split_data(self, address: object = None) -> Faults:
        """Let what is sent together arrive in parts, of sizes that the schedule picks.

        Args:
            address: Of the server, as for `slow_connection`.

        Returns:
            The same object.
        """
        return self._add(Fault(SPLIT, _address(address)))

    def reset_connection(
        self, address: object = None, *, at: int | None = None, times: int = 1
    ) -> Faults:
        """Let a connection be reset when one of its ends sends something, which is lost.

        Args:
            address: Of the server, as for `slow_connection`.
            at: Which of the sends that match, from 0; None leaves it to the schedule.
            times: How many connections may be reset.

        Returns:
            The same object.
        """
        _check_count("times", times, 1)
        return self._add(Fault(RESET, _address(address), at=_at(at), times=times))

    def half_open(self, address: object = None, *, at: int | None = None, times: int = 1) -> Faults:
        """Let a connection become half-open: from some send on nothing arrives, and nobody is told.

        Args:
            address: Of the server, as for `slow_connection`.
            at: With which of the sends that match, from 0; None leaves it to the schedule.
            times: How many connections may.

        Returns:
            The same object.
        """
        _check_count("times", times, 1)
        return self._add(Fault(HALF_OPEN, _address(address), at=_at(at), times=times))

    def for_run(self, seed: int, targets: Targets) -> FaultRun:
        """Return the decisions of one schedule, which notes what came by."""
        return FaultRun(self._faults, seed, targets)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{WORDS[each.kind]} {each.device or each.fn or 'any'}" for each in self._faults
        )
        return f"<Faults | {shown or 'none'}>"

    def _add(self, fault: Fault) -> Faults:
        self._faults = (*self._faults, fault)
        return self


@final
class Targets:
    """Names that came by in the runs of an exploration, for faults to strike, or not.

    A fault that nothing came by for is a mistake in a name: it tests nothing.
    """

    __slots__ = ("_found", "_passed")

    def __init__(self) -> None:
        self._found: set[int] = set()  # identities of faults, which are kept by who asks
        self._passed: dict[int, dict[str, None]] = {}

    def note(self, fault: Fault, names: Sequence[str], *, is_one: bool) -> bool:
        """Note something that a fault may strike or not; return `is_one`, which says that."""
        if is_one:
            self._found.add(id(fault))
        elif id(fault) not in self._found:
            passed = self._passed.setdefault(id(fault), {})
            if len(passed) <= NUM_LISTED:
                passed.update(dict.fromkeys(names))
        return is_one

    def warnings(self, faults: Faults | None, num_run: int) -> tuple[str, ...]:
        """Say which faults found nothing in so many schedules."""
        said = []
        for each in faults.entries if faults is not None else ():
            if id(each) not in self._found:
                names = [*self._passed.get(id(each), ())]
                known = ", ".join(names[:NUM_LISTED]) + ", ..." * (len(names) > NUM_LISTED)
                said.append(
                    f"{each.describe()} found nothing to strike in any of {num_run} schedules, so "
                    f"nothing was tested with it. What came by: {known or 'nothing'}."
                )
        return tuple(said)


@final
class FaultRun:
    """The faults of one schedule, decided op by op.

    Args:
        faults: What may go wrong.
        seed: The schedule's.
        targets: Takes notes.
    """

    __slots__ = ("_faults", "_rng", "_seen", "_slow", "_struck", "has_cancelled", "lost", "targets")

    def __init__(self, faults: tuple[Fault, ...], seed: int, targets: Targets) -> None:
        self._faults = faults
        self.targets = targets
        self._rng = Random(mix(seed, 4711)).random
        self._seen = [0] * len(faults)
        self._struck = [0] * len(faults)
        self._slow = [self._rng() < 0.5 for _ in faults]
        self.lost: dict[int, str] = {}
        self.has_cancelled = False

    def extra_latency_s(self, op: PoolOp) -> float:
        """Decide, at an op's start, how much longer it takes; infinity if it never ends."""
        extra = 0.0
        for i, fault in self._those_for(op, SLOW, HANG):
            if fault.kind == SLOW:
                extra += (fault.factor - 1.0) * LATENCY_S if self._slow[i] else 0.0
            elif self._strikes(i, fault):
                return math.inf
        return extra

    def error_of(self, op: PoolOp) -> BaseException | None:
        """Decide, at an op's end, whether it fails, and how."""
        pool = op.pool.name
        for i, fault in self._those_for(op, LOSE, FAIL):
            if fault.kind == LOSE:
                if self.lost.get(i) == pool or (i not in self.lost and self._strikes(i, fault)):
                    self.lost[i] = pool
                    return WorkerLostError(
                        f"The worker of {pool} is gone: a fault of this schedule."
                    )
            elif self._strikes(i, fault):
                return _error(fault, op)
        return None

    def _those_for(self, op: PoolOp, *kinds: int) -> list[tuple[int, Fault]]:
        """Return the faults of some kinds that could strike an op: all, whichever strikes first."""
        return [
            (i, fault)
            for i, fault in enumerate(self._faults)
            if fault.kind in kinds and (self._is_for(fault, op) or self._has_lost(i, op))
        ]

    def _has_lost(self, i: int, op: PoolOp) -> bool:
        return self.lost.get(i) == op.pool.name

    def visit(self, name: str) -> None:
        """Decide whether a visit of a point fails; raise what it then raises."""
        for i, fault in enumerate(self._faults):
            if fault.kind != POINT:
                continue
            is_one = self.targets.note(fault, [name], is_one=same_name(fault.fn or "", name))
            if is_one and self._strikes(i, fault):
                raise _as_error(fault.error, OSError, f"Point {name!r} failed")

    # ---- connections, which a fault knows by one of several names ------------------------------

    def is_reset(self, names: Sequence[str]) -> bool:
        """Decide, when something is sent, whether the connection is reset."""
        return self._any_strikes(RESET, names)

    def is_silenced(self, names: Sequence[str]) -> bool:
        """Decide whether nothing arrives any more from now on."""
        return self._any_strikes(HALF_OPEN, names)

    def link_latency_s(self, names: Sequence[str]) -> float:
        """Return how much longer everything takes to arrive."""
        factors = (fault.factor for i, fault in self._of(SLOW_LINK, names) if self._slow[i])
        return sum((factor - 1.0) * LATENCY_S for factor in factors)

    def cut(self, names: Sequence[str], size: int) -> int:
        """Decide how many of the bytes in flight arrive together."""
        for _ in self._of(SPLIT, names):
            if self._rng() < 0.5:
                size = 1 + int(self._rng() * (size - 1))
        return size

    def _any_strikes(self, kind: int, names: Sequence[str]) -> bool:
        struck = [self._strikes(i, fault) for i, fault in self._of(kind, names)]
        return any(struck)

    def _of(self, kind: int, names: Sequence[str]) -> Iterator[tuple[int, Fault]]:
        for i, fault in enumerate(self._faults):
            if fault.kind != kind:
                continue
            is_one = fault.device is None or any(same_name(fault.device, each) for each in names)
            if self.targets.note(fault, names, is_one=is_one):
                yield i, fault

    def _is_for(self, fault: Fault, op: PoolOp) -> bool:
        if fault.matches(op):
            return self.targets.note(fault, (), is_one=True)
        name = f"{op.describe()} on {op.pool.name}"
        return self.targets.note(fault, [name], is_one=False)

    def _strikes(self, i: int, fault: Fault) -> bool:
        seen = self._seen[i]
        self._seen[i] = seen + 1
        if self._struck[i] >= fault.times:
            return False
        if fault.at is None:
            strikes = self._rng() < CHANCE
        else:
            strikes = fault.at <= seen
        self._struck[i] += strikes
        return strikes


def _error(fault: Fault, op: PoolOp) -> BaseException:
    make = partial(DeviceError, device=op.pool.name)
    return _as_error(fault.error, make, f"Op {op.describe()} on {op.pool.name} failed")


def _as_error(wanted: Any, usual: Callable[[str], BaseException], what: str) -> BaseException:
    text = f"{what}: a fault of this schedule."
    if isinstance(wanted, BaseException):
        return wanted.with_traceback(None)
    make: Callable[[str], BaseException] = usual if wanted is None else wanted
    return make(text)


def fault_point(name: str) -> None:
    """Mark a place that `art.Faults().fail_point(name)` can make fail.

    Outside the kit, and without such a fault, it does nothing, in less than 100 ns.

    Args:
        name: Says what the place is, such as "before commit".

    Raises:
        OSError: If the schedule lets it fail here; or what the fault says.

    Example:
        >>> fault_point("before commit")
    """
    visit(name)


def visit(name: str) -> None:
    """Do nothing; a sandbox puts something else in this place while it is open."""


def _name(device: object) -> str | None:
    if isinstance(device, int):
        return f"cpu:{device}"
    return None if device is None else str(device)


def _address(address: object) -> str | None:
    if address is None or isinstance(address, str):
        return address and address.replace("localhost:", "127.0.0.1:")
    if isinstance(address, int) and not isinstance(address, bool):
        return f":{address}"
    if isinstance(address, tuple) and len(address) >= 2:
        return _address(f"{address[0]}:{address[1]}")
    raise TypeError(
        f"address must be a port, 'host:port', a path or None, got {address!r} "
        f"({type(address).__name__})."
    )


def _fn_name(fn: object) -> str | None:
    if fn is None or isinstance(fn, str):
        return fn
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _at(at: int | None) -> int | None:
    if at is not None:
        _check_count("at", at, 0)
    return at


def _check_error(error: object) -> None:
    if error is not None and not (
        isinstance(error, BaseException)
        or (isinstance(error, type) and issubclass(error, BaseException))
    ):
        raise TypeError(f"error must be an exception or its class, got {error!r}.")


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
