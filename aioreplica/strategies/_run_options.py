"""Options of one run."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import final

from ..replica import SEND_BOUND


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one `strategy.run`.

    Attributes:
        stall_timeout: Seconds without progress (a collective called or merged, a device op ended,
            a replica returned) after which the run ends with a StallError; None never.
        seed: Seed of `ctx.rng` and `ctx.shared_rng`; None means 0.
        send_bound: How many values that were not received are kept, for each tag between two
            replicas, before `ctx.send` waits.

    Raises:
        ValueError: If `stall_timeout` is not positive, `seed` no int or negative, or `send_bound`
            no int or below 1.
        TypeError: If `stall_timeout` is not a number.

    Example:
        >>> RunOptions(stall_timeout=30.0)
        RunOptions(stall_timeout=30.0, seed=None, send_bound=2)
    """

    stall_timeout: float | None = None
    seed: int | None = None
    send_bound: int = SEND_BOUND

    def __post_init__(self) -> None:
        if self.stall_timeout is not None and not isinstance(self.stall_timeout, Real):
            raise TypeError(
                f"stall_timeout must be seconds as a number or None, got {self.stall_timeout!r}."
            )
        if self.stall_timeout is not None and not self.stall_timeout > 0:
            raise ValueError(
                f"stall_timeout must be positive seconds or None, got {self.stall_timeout!r}."
            )
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed must be an int >= 0 or None, got {self.seed!r}.")
        if type(self.send_bound) is not int or self.send_bound < 1:
            raise ValueError(f"send_bound must be an int >= 1, got {self.send_bound!r}.")
