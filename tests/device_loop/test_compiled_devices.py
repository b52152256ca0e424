"""Devices of compiled steps; most in processes of their own, as jax fixes them at its start."""

import subprocess
import sys
from unittest import mock

import pytest

from aioreplica.errors import DeviceError

jax = pytest.importorskip("jax")
from aioreplica.device_loop._compiled._devices import jax_devices  # noqa: E402 - it needs jax

pytestmark = pytest.mark.slow

PREAMBLE = """
import asyncio, os, sys
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
import numpy as np
import aioreplica as ar

def step(ctx, x):
    import jax.numpy as jnp
    replica = ar.get_replica_context().blocking
    ctx.set_last_step_output("sum", replica.all_reduce("sum", jnp.sum(x)))

async def run(num_replicas, count=1, compile="jax"):
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) as strategy:
        element = ar.PerReplica([np.ones(3, np.float32)] * num_replicas)
        result = await strategy.run_steps(step, iter([element] * count), count, compile=compile)
        return float(result.last_step_outputs["sum"].values[0])
"""


def run(program: str, timeout_s: float = 120) -> str:
    """Run a program and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + program],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_jax_is_asked_for_as_many_cpus_and_not_imported() -> None:
    program = """
ar.set_logical_devices("cpu", 5)
assert "jax" not in sys.modules
import jax
assert len(jax.devices("cpu")) == 5
print(asyncio.run(run(5)))
"""
    assert run(program) == "15.0"


def test_a_jax_that_is_imported_is_asked_too() -> None:
    program = """
import jax
ar.set_logical_devices("cpu", 3)
print(len(jax.devices("cpu")))
"""
    assert run(program) == "3"


def test_the_default_devices_need_no_setting() -> None:
    assert run("print(asyncio.run(run(2)))") == "6.0"


def test_after_the_first_operation_the_setting_is_named() -> None:
    program = """
import jax
jax.numpy.zeros(1)
ar.set_logical_devices("cpu", 4)
try:
    asyncio.run(run(4))
except ar.errors.DeviceError as error:
    print(error)
"""
    printed = run(program)
    assert "jax has 1 cpu devices, but the strategy uses cpu:1" in printed
    assert "call ar.set_logical_devices('cpu', 4) before it" in printed


def test_more_devices_that_were_asked_for_otherwise_are_kept() -> None:
    program = """
os.environ["JAX_NUM_CPU_DEVICES"] = "6"
ar.set_logical_devices("cpu", 2)
import jax
print(len(jax.devices("cpu")))
"""
    assert run(program) == "6"


def test_many_runs_at_once_take_their_turns() -> None:
    """XLA ends the process if several programs wait for each other's devices."""
    program = """
ar.set_logical_devices("cpu", 4)

async def main():
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(2 + i % 3, 70)) for i in range(24)]
    print(sorted({task.result() for task in tasks}))

asyncio.run(main())
"""
    assert run(program, 300) == "[6.0, 9.0, 12.0]"


def test_eager_ops_of_a_device_wait_for_its_compiled_steps() -> None:
    program = """
ar.set_logical_devices("cpu", 2)
order = []

async def main():
    devices = ["cpu:0", "cpu:1"]
    async with ar.MirroredStrategy(devices) as one, ar.MirroredStrategy(devices) as other:
        element = ar.PerReplica([np.ones(3, np.float32)] * 2)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def stream():
            yield element
            started.set()
            await goes_on.wait()
            order.append("compiled")
            yield element

        async def eager():
            ctx = ar.get_replica_context()
            await ctx.run_on_device(order.append, "eager")

        goes_on = asyncio.Event()
        loops = asyncio.ensure_future(one.run_steps(step, stream(), 2, compile="jax"))
        await started.wait()
        eagers = asyncio.ensure_future(other.run(eager))
        while sum(lane.queued for lane in other.statistics().lanes.values()) < 2:
            await asyncio.sleep(0)
        assert order == []
        goes_on.set()
        await loops
        await eagers
        print(order)

asyncio.run(main())
"""
    assert run(program) == "['compiled', 'eager', 'eager']"


def test_a_kind_of_device_that_jax_does_not_have() -> None:
    missing = RuntimeError("Unknown backend cuda")
    with (
        mock.patch.object(jax, "devices", side_effect=missing),
        pytest.raises(DeviceError, match="jax has no cuda devices, but the strategy") as caught,
    ):
        jax_devices(["cuda:0"])

    assert caught.value.__cause__ is missing
    assert "install a jax that finds them, or leave out `compile`" in str(caught.value)
    assert "set_logical_devices" not in str(caught.value)


def test_more_devices_of_a_kind_than_jax_has() -> None:
    with (
        mock.patch.object(jax, "devices", return_value=["the first"]),
        pytest.raises(DeviceError, match="jax has 1 cuda devices, but the strategy uses cuda:1"),
    ):
        jax_devices(["cuda:0", "cuda:1"])
