"""Gates: which steps are kept, and which version of the model is served.

A gate is any function of a `Candidate`; it lets that through with None, True or "", and refuses it
with False or with a text that says why.

Invariants:
    * `served` is a version that the gate let through, one that was restored or pinned, or the
      first one; while nothing is held back or pinned it is `newest`.
    * What is served instead of the newest version is in each checkpoint, so that a restart does
      not let through what was held back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from statistics import median
from typing import Any, final

import numpy as np

from ..devices import run_on_host
from ..tree import Array, Tree
from ..values import Snapshot, Variable
from ._failures import described
from ._step import StepCheck

INLINE_GATE_BYTES = 256 * 1024
"""Models up to this size are compared on the event loop, larger ones on a thread."""

MIN_WINDOW = 10
"""A loss is not judged before so many were seen."""


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that has ended, for a gate to judge.

    Attributes:
        before: The snapshot before the step; for `publish_if` the one that is served.
        after: The snapshot behind it.
        scalars: What the step function returned, averaged over the examples. A loss is that of the
            version before the step, on examples which that has not learned.
        num_examples: How many the step has learned.
    """

    before: Snapshot
    after: Snapshot
    scalars: Mapping[str, float]
    num_examples: int

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return sum(parts[0].nbytes for parts in self.after.components.values())

    def change(self) -> tuple[float, float]:
        """Return the norm of what has changed, and that of all values before."""
        changed, total = [0.0], [0.0]
        for variable in self.after:
            old, new = self.before[variable], self.after[variable]
            if new.dtype.kind not in "fcV":  # counters and tables of integers are no weights
                continue
            wide = np.complex128 if new.dtype.kind == "c" else np.float64
            total.append(_norm(old.astype(wide)))
            if new is not old:
                with np.errstate(over="ignore"):
                    changed.append(_norm(new.astype(wide) - old.astype(wide)))
        return math.hypot(*changed), math.hypot(*total)


def _norm(array: Array) -> float:
    """Return the Euclidean norm; squares of large values do not overflow."""
    sizes = np.abs(array)
    largest = float(sizes.max(initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    return largest * float(np.linalg.norm((sizes / largest).ravel()))


GateFunction = Callable[[Candidate], Awaitable[bool | str | None] | bool | str | None]


@final
class StepLimits:
    """A gate: refuses a step that changes too much, or whose loss is far above what it was.

    Give it to a learner as `step_check`, which undoes such a step and finds the example to blame,
    or as `publish_if`, which holds its version back. Each gets one of its own. That values are
    finite is always checked.

    Args:
        change: Largest norm of the change of all floating-point values together.
        relative_change: The same, as a share of the norm of the values before.
        loss: Largest loss, as a multiple of the median of the newest ones.
        window: How many losses the median is that of; the first 10 are not judged. It holds those
            of refused steps too, so a level that stays higher is let through in the end.
        name: The scalar of the step that is its loss.

    Raises:
        ValueError: If a limit is not above 0, or there is none.

    Example:
        >>> limits = StepLimits(change=100.0, loss=20.0)
        >>> limits
        <StepLimits | change 100, loss 20 of 0>
    """

    __slots__ = ("_change", "_loss", "_losses", "_name", "_relative", "_window")

    def __init__(
        self,
        *,
        change: float | None = None,
        relative_change: float | None = None,
        loss: float | None = None,
        window: int = 100,
        name: str = "loss",
    ) -> None:
        limits = {"change": change, "relative_change": relative_change, "loss": loss}
        for what, limit in limits.items():
            if limit is not None and not limit > 0:
                raise ValueError(f"{what} must be above 0, got {limit!r}.")
        if all(limit is None for limit in limits.values()):
            raise ValueError("Give at least one of change, relative_change and loss.")
        if window < MIN_WINDOW:
            raise ValueError(f"window must be at least {MIN_WINDOW}, got {window!r}.")
        self._change = math.inf if change is None else change
        self._relative = math.inf if relative_change is None else relative_change
        self._loss = math.inf if loss is None else loss
        self._name = name
        self._window = window
        self._losses: deque[float] = deque(maxlen=window)

    async def __call__(self, candidate: Candidate) -> str:
        """Judge a step; return why it is refused, "" if it is not."""
        return self._judge_loss(candidate.scalars) or await self._judge_change(candidate)

    async def _judge_change(self, candidate: Candidate) -> str:
        if self._change == self._relative == math.inf:
            return ""
        on_host = candidate.nbytes > INLINE_GATE_BYTES
        changed, total = await run_on_host(candidate.change) if on_host else candidate.change()
        if not changed <= self._change:
            return f"the change has the norm {changed:.4g}, more than {self._change:g}"
        if 0 < total * self._relative < changed:
            return (
                f"the change has the norm {changed:.4g}, more than {self._relative:g} of the "
                f"{total:.4g} of all values"
            )
        return ""

    def _judge_loss(self, scalars: Mapping[str, float]) -> str:
        if self._loss == math.inf:
            return ""
        if self._name not in scalars:
            known = ", ".join(map(repr, scalars)) or "nothing"
            raise ValueError(
                f"StepLimits(loss=...) needs the step to return {self._name!r}, it returns {known}."
            )
        loss = scalars[self._name]
        if not math.isfinite(loss):
            return f"{self._name} is {loss}"
        usual = median(self._losses) if len(self._losses) >= MIN_WINDOW else 0.0
        self._losses.append(loss)
        if 0 < usual * self._loss < loss:
            return f"{self._name} is {loss:.4g}, more than {self._loss:g} times {usual:.4g}"
        return ""

    def __repr__(self) -> str:
        limits = {"change": self._change, "relative change": self._relative, "loss": self._loss}
        told = ", ".join(f"{what} {limit:g}" for what, limit in limits.items() if limit < math.inf)
        return f"<StepLimits | {told} of {len(self._losses)}>"


async def refusal_of(gate: GateFunction, candidate: Candidate) -> str:
    """Return why a gate refuses a candidate, "" if it does not.

    Raises:
        TypeError: If it returns something else.
        Exception: What it raises.
    """
    found: object = gate(candidate)
    if isawaitable(found):
        found = await found
    if found is None or found is True:
        return ""
    if found is False:
        return f"{getattr(gate, '__qualname__', repr(gate))} has refused it"
    if isinstance(found, str):
        return found
    raise TypeError(f"A gate returns None, a bool or a text, {gate!r} has returned {found!r}.")


async def _verdict(gate: GateFunction, candidate: Candidate, limit_s: float | None) -> str:
    """Return why a version is held back, "" if it is not."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await refusal_of(gate, candidate)
    except Exception as error:  # noqa: BLE001 - it is the user's, and learning goes on
        is_late = limit.expired()
        why = f"it took longer than {limit_s:g} s" if is_late else described(error)
        return f"publish_if has failed: {why}"


@final
class Serving:
    """Keeps the newest snapshot, and the one that is served.

    Args:
        step_check: Judges steps before they are kept; None for not at all.
        publish_if: Judges versions that were kept; None lets all through.

    Attributes:
        newest: The snapshot after the last step that was kept.
        served: The one that readers get.
        held: Why the newest one is held back by the gate; "" if it is not.
        is_pinned: Whether `served` stays whatever comes.
    """

    def __init__(self, step_check: GateFunction | None, publish_if: GateFunction | None) -> None:
        self.newest = self.served = Snapshot(0, {})
        self.held = ""
        self.is_pinned = False
        self._is_judging = False  # the newest one, at this moment
        self._step_check = step_check
        self._publish_if = publish_if
        self._model: Mapping[str, Variable] = {}

    def open(self, model: Mapping[str, Variable], version: int, kept: Mapping[str, Tree]) -> None:
        """Begin with the variables of a model as they are.

        Args:
            model: The variables by key.
            version: That of their values.
            kept: What a checkpoint says of what was served instead; see `kept`.
        """
        self._model = model
        self.newest = self.served = self.look(version)
        if kept:
            self.held, self.is_pinned = kept["held"], kept["is_pinned"]
            self.served = Snapshot(
                kept["version"],
                {
                    variable: _as_now(variable, kept["arrays"].get(key, [*variable.components]))
                    for key, variable in model.items()
                },
                model,
            )

    def take_over(self, before: Serving) -> None:
        """Serve what an earlier opening of the same learner has served."""
        if before.served is not before.newest:
            self.served, self.held, self.is_pinned = before.served, before.held, before.is_pinned

    def look(self, version: int) -> Snapshot:
        """Return a snapshot of the variables as they are now."""
        components = {variable: variable.components for variable in self._model.values()}
        return Snapshot(version, components, self._model)

    def judge_as(self, version: int) -> StepCheck | None:
        """Return what checks a step that may become a version, before it is kept."""
        gate = self._step_check
        if gate is None:
            return None

        async def judge(scalars: Mapping[str, float], num_examples: int) -> None:
            after = self.look(version)
            why = await refusal_of(gate, Candidate(self.newest, after, scalars, num_examples))
            if why:
                raise ValueError(f"step_check has refused the step: {why}")

        return judge

    async def offer(
        self,
        version: int,
        scalars: Mapping[str, float],
        num_examples: int,
        limit_s: float | None,
    ) -> None:
        """Take a new version, and serve it if the gate lets it through and none is pinned.

        A gate that raises, or takes longer than `limit_s`, holds it back.

        Cancellation:
            Holds it back, as it is not judged.
        """
        self.newest = self.look(version)
        if self._publish_if is not None:
            candidate = Candidate(self.served, self.newest, scalars, num_examples)
            self._is_judging = True
            try:
                self.held = await _verdict(self._publish_if, candidate, limit_s)
            except BaseException:
                self.held = "publish_if was ended before it has judged it"
                raise
            finally:
                self._is_judging = False
        if not self.held and not self.is_pinned:
            self.served = self.newest  # it may have got another number meanwhile

    def renumber(self, version: int) -> int:
        """Serve what is served under another version; return that of the newest one."""
        is_newest = self.served is self.newest
        self.served = Snapshot(version, dict(self.served.components), self._model)
        after = Snapshot(version + 1, dict(self.newest.components), self._model)
        self.newest = self.served if is_newest else after
        return self.newest.version

    def begin_again(self, version: int) -> None:
        """Serve the variables as they are now, which were put back; a pin stays."""
        self.newest, self.held = self.look(version), ""
        if not self.is_pinned:
            self.served = self.newest

    def pin(self, version: int | None) -> None:
        """Serve one version until `unpin`.

        Raises:
            ValueError: If it is neither served nor the newest one.
        """
        known = {each.version: each for each in (self.newest, self.served)}
        if version is not None and version not in known:
            listed = " and ".join(map(str, known))
            raise ValueError(
                f"Version {version} cannot be pinned, as its values are gone: there are {listed}. "
                "rollback(to=...) goes back further."
            )
        self.served = self.served if version is None else known[version]
        self.is_pinned = True

    def unpin(self) -> None:
        """Serve the newest version again, unless the gate holds that back, or judges it still."""
        self.is_pinned = False
        if not self.held and not self._is_judging:
            self.served = self.newest

    @property
    def kept(self) -> Mapping[str, Tree]:
        """Facts for a checkpoint; none as long as the newest version is served."""
        if self.served is self.newest and not self.is_pinned:
            return {}
        components = self.served.components
        return {
            "version": self.served.version,
            "held": self.held,
            "is_pinned": self.is_pinned,
            "arrays": {
                key: [*components[variable][: 1 if variable.is_mirrored else None]]
                for key, variable in self._model.items()
            },
        }


def _as_now(variable: Variable, arrays: list[Any]) -> tuple[Any, ...]:
    """Return components for arrays of a checkpoint, one for all replicas if they are equal."""
    for array in arrays:
        array.flags.writeable = False
    return (arrays[0],) * len(variable.components) if variable.is_mirrored else tuple(arrays)
