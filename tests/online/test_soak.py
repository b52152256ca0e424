"""A mixed run leaves nothing behind: memory, threads and files stay flat."""

from pathlib import Path

import pytest

from .soak import soak


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_twenty_seconds_of_mixed_load_leave_nothing_behind(folder: Path) -> None:
    found = await soak(20.0, folder)
    assert found.num_learned > 500
    assert found.num_dead > 5
    # Pools grow to their sizes when calls happen to overlap; a leak grows with every round.
    assert max(each.num_threads for each in found.samples) <= 24
    assert found.growth(lambda each: each.num_files) <= 2
    assert found.growth(lambda each: each.num_tasks) <= 3
    assert found.growth(lambda each: each.memory_mib) < 8
