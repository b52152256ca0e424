"""Several pieces of array work at once, on threads that nothing else can hold up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..context import PLACE
from ._completion import CompletionPort
from ._lane_table import COLLECTIVES, lane_table
from ._op import Op

T = TypeVar("T")


async def run_together(pieces: Sequence[Callable[[], T]]) -> list[T]:
    """Run plain functions on the lane of the collectives; wait for all.

    That lane is the library's own: no function of a user is ever put there, so a reduction never
    queues behind something that waits for the reduction.

    Raises:
        Exception: What the first piece that failed raises.

    Cancellation:
        Pieces that have not started are taken back; the others are waited for.
    """
    replica = PLACE.get().replica
    tracker = None
    if replica is not None:
        replica.check_running()
        tracker = replica.op_tracker
    lane, port = lane_table().lane(COLLECTIVES), CompletionPort.of_running_loop()
    ops: list[Op[T]] = [Op(port, piece, (), {}, lane, tracker) for piece in pieces]
    for op in ops:
        op.put()
    results, failure = [], None
    for op in ops:
        try:
            results.append(await op)
        except BaseException as error:  # noqa: BLE001 - raised below, when the others have ended
            failure = failure or error
            for other in ops:
                other.cancel()
    if failure is not None:
        raise failure
    return results


def num_collective_streams() -> int:
    """Return how many threads the lane of the collectives can have."""
    return lane_table().num_collective_streams
