"""Arrays dealt out among workers."""

import numpy as np
import pytest

from aioreplica.collectives import BufferPool, Dealt
from aioreplica.collectives._scattered import LARGE_BYTES

pytestmark = pytest.mark.asyncio

SIZE = LARGE_BYTES // 4


@pytest.mark.parametrize("are_lent", [True, False])
async def test_large_arrays_are_copied_only_where_somebody_else_may_write_them(
    are_lent: bool,
) -> None:
    flat = [np.arange(size, dtype=np.float32) for size in (3, SIZE, 5)]
    forms = [(each.dtype, [(0, 2), (2, each.size)]) for each in flat]

    sent = await Dealt(forms, 0).packed(flat, BufferPool(), are_lent=are_lent)

    assert len(sent) == 2  # the large one, and both small ones in one buffer
    assert np.shares_memory(sent[0], flat[1]) is not are_lent
    assert (sent[0] == flat[1]).all()
    assert sent[1].tolist() == [[0, 1, 0, 1], [2, 2, 3, 4]]
