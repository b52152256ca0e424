"""Optimizers with state of their own, on servers that are other processes."""

from __future__ import annotations

import numpy as np
import pytest

import aioreplica as ar
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.conftest import coordinating

pytestmark = pytest.mark.asyncio


async def test_a_loss_scale_and_an_optimizer_of_torch_live_on_the_servers() -> None:
    torch = pytest.importorskip("torch")
    async with coordinating(num_ps=2, num_workers=1) as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(np.ones(3), name="w")
            scaling = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            adam = ar.optimizers.from_torch(torch.optim.Adam, lr=0.5, loss_scale=scaling)
        scales = []
        for gradient in (1.0, np.inf, 1.0, 1.0, 1.0):
            remote = await coordinator.schedule(closures.scaled_step, (w, adam, gradient))
            scales.append(await remote.fetch())
        assert scales == [8.0, 8.0, 4.0, 4.0, 8.0]
        assert int(await adam.skipped_steps.read()) == 1
        np.testing.assert_allclose(await w.read(), np.full(3, -1.0), rtol=1e-6)  # of torch's Adam
