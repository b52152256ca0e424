"""outside_compilation: what ends the event loop ends it from the host function too."""

import asyncio
import contextlib

import pytest

import aioreplica as ar


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exit_on_the_host_ends_the_event_loop(is_async: bool) -> None:
    async def exit_later() -> None:
        await asyncio.sleep(0)
        raise SystemExit(7)

    def exit_now() -> None:
        raise SystemExit(7)

    def step() -> None:
        with contextlib.suppress(SystemExit):  # which does not keep the program alive
            ar.outside_compilation(exit_later if is_async else exit_now)

    async def main() -> None:
        async with ar.OneDeviceStrategy("cpu:0") as strategy:
            await strategy.run(step)

    with pytest.raises(SystemExit, match="7"):
        asyncio.run(main())
