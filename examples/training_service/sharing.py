"""Which job may use which devices, and whose step is next."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Share:
    """What a job has of the devices.

    `used` grows by the time of its steps. A job that is new, or was away, begins where the job that
    was served last did: time cannot be saved up.
    """

    devices: tuple[str, ...]
    used: float = 0.0
    turn: asyncio.Future[None] | None = field(default=None, repr=False)


class DeviceSharing:
    """Lets jobs onto the devices a step at a time; of those that wait, the one that has used least.

    A job with long steps so gets as much time as one with short steps, not as many steps. Jobs on
    different devices do not wait for each other.

    Source:
        Goyal, Vin, Cheng: Start-time Fair Queuing, SIGCOMM 1996.
    """

    def __init__(
        self, devices: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.devices = tuple(devices)
        self._clock = clock
        self._shares: list[Share] = []
        self._waiting: list[Share] = []
        self._busy: set[str] = set()
        self._now = 0.0  # what the job served last had used when its turn began

    def join(self, num_devices: int) -> Share:
        """Give a job the devices that the fewest others have.

        Raises:
            ValueError: If there are not as many.
        """
        if num_devices > len(self.devices):
            raise ValueError(
                f"It has {num_devices} replicas, and the service has {len(self.devices)} devices "
                f"now. Start it with --devices {num_devices}, then resume the job."
            )
        load = dict.fromkeys(self.devices, 0)
        for share in self._shares:
            for device in share.devices:
                load[device] += 1
        lightest = sorted(self.devices, key=lambda device: load[device])[:num_devices]
        share = Share(tuple(device for device in self.devices if device in lightest))
        self._shares.append(share)
        return share

    def leave(self, share: Share) -> None:
        self._shares.remove(share)

    @asynccontextmanager
    async def turn(self, share: Share) -> AsyncIterator[None]:
        """Wait for the devices of a share, and hold them for a block."""
        share.used = max(share.used, self._now)
        share.turn = turn = asyncio.get_running_loop().create_future()
        self._waiting.append(share)
        self._serve()
        try:
            await turn
            start = self._clock()
            try:
                yield
            finally:
                share.used += self._clock() - start
        finally:
            if share in self._waiting:  # cancelled before its turn came
                self._waiting.remove(share)
            else:
                self._busy.difference_update(share.devices)
            asyncio.get_running_loop().call_soon(self._serve)  # it may be back for its next turn

    def _serve(self) -> None:
        """Start turns in order; a device that one waits for is not given to a later one."""
        taken = set(self._busy)
        for share in sorted(self._waiting, key=lambda share: share.used):
            if taken.isdisjoint(share.devices) and share.turn is not None:
                self._waiting.remove(share)
                self._busy.update(share.devices)
                self._now = max(self._now, share.used)
                if not share.turn.done():
                    share.turn.set_result(None)
            taken.update(share.devices)
