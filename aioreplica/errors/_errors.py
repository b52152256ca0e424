"""The error classes, with fields that are strings and numbers only.

Invariants:
    * Every class can be rebuilt from its message alone, so a pickle carries the message in
      `args` and everything else (fields, PEP 678 notes) in `__dict__`.
    * No field holds an array, a frame or a task: an error may outlive its run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """State of one replica when a run was judged.

    Attributes:
        replica_id: Index of the replica in its sync group.
        device: Name of its device, or "-" for a replica without one.
        state: "waiting", "running", "returned", "failed", "withdrew" or "merging".
        collective: The collective it is in, or the last one it finished, with sequence number.
        site: `file:line` of the call, or "-".
    """

    replica_id: int
    device: str
    state: str
    collective: str
    site: str


class AioReplicaError(Exception):
    """Root of every error that aioreplica raises on its own account."""


@final
class ContextError(AioReplicaError, RuntimeError):
    """Raised when something is used where it does not belong.

    For example a collective outside its replica, a scope inside a step, or a closed strategy.
    """


@final
class LoopMismatchError(AioReplicaError, RuntimeError):
    """Raised when a strategy bound to one event loop is used from another one."""


@final
class DeviceError(AioReplicaError, RuntimeError):
    """Raised when a device does not exist, or cannot be used any more.

    Attributes:
        device: Name of the device, or None when no single device is to blame.
    """

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


@final
class OutOfSyncError(AioReplicaError, RuntimeError):
    """Raised when the components of a mirrored variable differ between replicas.

    Attributes:
        variable: Name of the variable.
        replica_id: The first replica whose component differs from that of replica 0.
        index: The first element that differs; empty for a scalar, or if shapes or dtypes differ.
        max_difference: Largest distance of two elements; infinity where a NaN or infinity meets
            something else, or if shapes or dtypes differ.
    """

    def __init__(
        self,
        message: str,
        *,
        variable: str = "",
        replica_id: int | None = None,
        index: tuple[int, ...] = (),
        max_difference: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.variable = variable
        self.replica_id = replica_id
        self.index = index
        self.max_difference = max_difference


@final
class NonFiniteError(AioReplicaError, ArithmeticError):
    """Raised when a gradient holds NaN or infinity and the update was refused.

    Attributes:
        variable: Name of the variable.
        replica_id: The first replica that brought such a number; None if only the sum over the
            replicas is not finite.
        index: The first element that is not finite; empty for a scalar.
    """

    def __init__(
        self,
        message: str,
        *,
        variable: str = "",
        replica_id: int | None = None,
        index: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.variable = variable
        self.replica_id = replica_id
        self.index = index


@final
class WorkerLostError(AioReplicaError, ConnectionError):
    """Raised on every surviving worker when another one is gone, or has ended the group.

    And by a `ClusterCoordinator`, when a parameter server is gone.

    Attributes:
        ranks: The workers to blame, in ascending order, or the parameter servers; empty if that is
            not known.
        variables: Names of the variables that were lost with parameter servers.
    """

    def __init__(
        self, message: str, *, ranks: tuple[int, ...] = (), variables: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.variables = variables


@final
class ClosureCancelledError(AioReplicaError, RuntimeError):
    """Raised for the result of a closure that was cancelled because another one had failed."""


class CheckpointError(AioReplicaError, OSError):
    """Raised when a checkpoint cannot be written, or none can be read back."""


@final
class CheckpointNotCommittedError(CheckpointError):
    """Raised when a checkpoint was not saved: what was there before is unchanged."""


@final
class CheckpointUncertainError(CheckpointError):
    """Raised when a checkpoint was saved, but may not survive a crash; or may have been saved.

    The text says which. Nothing was removed.
    """


@final
class JournalError(AioReplicaError, OSError):
    """Raised when a journal of examples cannot be opened, read or written.

    An example whose submission raised it was not acknowledged.
    """


@final
class KeyReusedError(AioReplicaError, ValueError):
    """Raised when an idempotency key comes again with another body.

    Attributes:
        key: The key.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


@final
class PoisonedExampleError(AioReplicaError, ValueError):
    """Raised by the ticket of an example that a learner set aside, with what it had raised.

    Attributes:
        number: The number of the example.
    """

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


@final
class MergeMismatchError(AioReplicaError, RuntimeError):
    """Raised at once when replicas do not meet in the same collective.

    Attributes:
        step: Number of the run in its strategy, from 0.
        reason: One sentence naming who did what.
        rows: One row per replica, in replica order.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        reason: str = "",
        rows: tuple[ReplicaRow, ...] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.reason = reason
        self.rows = rows


@final
class ReplicaCancelledError(AioReplicaError, RuntimeError):
    """Raised when a replica ended with a CancelledError that its run had not sent.

    It awaited a cancelled future, say. A bare CancelledError would be swallowed by task groups, as
    if the step had been cancelled on purpose; it is the `__cause__`.

    Attributes:
        step: Number of the run in its strategy, from 0.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


@final
class StallError(AioReplicaError, TimeoutError):
    """Raised when a run makes no progress for as long as its stall timeout allows.

    Attributes:
        step: Number of the run in its strategy, from 0.
        timeout_s: The stall timeout, in seconds.
        rows: One row per replica, in replica order.
        stacks: One formatted stack per replica, innermost call last.
        ranks: The workers that did not come, where workers waited for each other; empty if that is
            not known.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        timeout_s: float | None = None,
        rows: tuple[ReplicaRow, ...] = (),
        stacks: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.timeout_s = timeout_s
        self.rows = rows
        self.stacks = stacks
        self.ranks = ranks
