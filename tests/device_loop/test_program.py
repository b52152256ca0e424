"""Outputs of all replicas put together at the end of a device loop."""

import numpy as np
import pytest

import aioreplica as ar
from tests.replica.gated import my_id

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


async def test_a_reduction_that_fails_names_its_output(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.set_last_step_output("good", x, "sum")
        ctx.set_last_step_output("bad", np.ones(2 + my_id()), "mean")

    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\) differ") as caught:
        await pair.run_steps(step, iter([1]))

    assert "reduction of output 'bad'" in caught.value.__notes__[-1]
    assert __file__ in caught.value.__notes__[-1]
