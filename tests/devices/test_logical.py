"""Which devices there are, splitting the host before their first use, and the current one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.devices._logical import LogicalDevices
from aioreplica.errors import DeviceError

RunScript = Callable[[str], str]


def test_the_host_was_split_for_these_tests() -> None:
    assert ar.list_devices("cpu") == tuple(ar.Device(f"cpu:{i}") for i in range(8))
    assert ar.list_devices()[:8] == ar.list_devices("CPU")


@pytest.mark.parametrize("kind", ["cuda", "gpu", "tpu"])
def test_other_kinds_are_devices_of_their_kind(kind: str) -> None:
    assert all(device.kind == kind for device in ar.list_devices(kind))


@pytest.mark.parametrize("kind", ["quantum", "", "cpu:0"])
def test_an_unknown_kind_is_a_value_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"kind.*cpu"):
        ar.list_devices(kind)


def test_splitting_after_the_first_use_is_a_device_error() -> None:
    before = ar.list_devices()

    with pytest.raises(DeviceError, match=r"in use, with 8.*'cpu', 4\) at program start"):
        ar.set_logical_devices("cpu", 4)
    with pytest.raises(DeviceError, match=r"'cpu', 2, processes=\[True, False\]\)"):
        ar.set_logical_devices("cpu", 2, processes=[True, False])
    assert ar.list_devices() == before


def test_setting_the_same_devices_again_is_allowed() -> None:
    """A cell of a notebook is run again."""
    ar.set_logical_devices("cpu", 8)
    ar.set_logical_devices("CPU", 8, processes=[False] * 8)
    with pytest.raises(DeviceError, match="0 of them in device processes"):
        ar.set_logical_devices("cpu", 8, processes=[True] * 8)

    devices = LogicalDevices()
    devices.split("cpu", 2, [False, True])
    devices.devices(None)
    devices.split("cpu", 2, [False, True])
    for processes in ([], [True, False], [True, True]):
        with pytest.raises(DeviceError, match="with 2, 1 of them in device processes"):
            devices.split("cpu", 2, processes)
    assert devices.process_names == {"cpu:1"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ar.MirroredStrategy([f"cpu:{i}" for i in range(12)]),
        lambda: ar.MirroredStrategy(["cpu:0", "cpu:11"]),
        lambda: ar.MirroredStrategy(["cpu:9", ar.Device("cpu:11"), "cuda:99"]),
        lambda: ar.CentralStorageStrategy(["cpu:11", "cpu:8"]),
        lambda: ar.OneDeviceStrategy("cpu:11"),
    ],
)
def test_the_error_names_the_count_that_all_devices_need(make: Callable[[], Any]) -> None:
    with pytest.raises(DeviceError, match=r"ar\.set_logical_devices\('cpu', 12\)"):
        make()


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, None])
def test_a_count_is_a_positive_int(count: Any) -> None:
    with pytest.raises(ValueError, match="logical devices"):
        ar.set_logical_devices("cpu", count)


@pytest.mark.parametrize("kind", ["cuda", "tpu", "", None])
def test_only_the_host_can_be_split(kind: Any) -> None:
    with pytest.raises(ValueError, match="cpu"):
        ar.set_logical_devices(kind, 2)


def test_the_list_is_open_until_it_is_read() -> None:
    devices = LogicalDevices()
    devices.split("cpu", 3)
    devices.split("cpu", 2)

    assert devices.devices("cpu") == (ar.Device("cpu:0"), ar.Device("cpu:1"))
    with pytest.raises(DeviceError) as caught:
        devices.split("cpu", 4)
    assert caught.value.device == "cpu"


@pytest.mark.slow
def test_there_is_a_device_per_core_but_at_least_two(run_script: RunScript) -> None:
    output = run_script("""
        import os
        import aioreplica as ar

        print(len(ar.list_devices("cpu")) == max(2, len(os.sched_getaffinity(0))))
    """)

    assert output == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "ar.MirroredStrategy()",
        *(
            pytest.param(use, marks=pytest.mark.xslow)
            for use in ("ar.list_devices()", "ar.OneDeviceStrategy('cpu:0')", "ar.current_device()")
        ),
    ],
)
def test_every_use_fixes_the_list(run_script: RunScript, use: str) -> None:
    output = run_script(f"""
        import aioreplica as ar

        ar.set_logical_devices("cpu", 3)
        ar.set_logical_devices("cpu", 4)
        {use}
        try:
            ar.set_logical_devices("cpu", 5)
        except ar.errors.DeviceError:
            print(len(ar.list_devices("cpu")))
    """)

    assert output == "4\n"


# --- the current device -----------------------------------------------------------------------


def test_the_first_cpu_is_current_by_default() -> None:
    assert ar.current_device() == ar.Device("cpu:0")


def test_device_is_current_inside_its_block() -> None:
    with ar.device("cpu:1") as chosen:
        assert chosen == ar.Device("cpu:1")
        assert ar.current_device() == chosen
    assert ar.current_device() == ar.Device("cpu:0")


@pytest.mark.parametrize("name", ["CPU:2", ar.Device("cpu:2"), "/device:CPU:2"])
def test_device_takes_every_form_of_a_name(name: ar.Device | str) -> None:
    with ar.device(name):
        assert str(ar.current_device()) == "cpu:2"


def test_blocks_nest_and_end_with_an_error() -> None:
    def fail_inside() -> None:
        with ar.device("cpu:2"):
            assert str(ar.current_device()) == "cpu:2"
            raise ValueError("inside")

    with ar.device("cpu:1"):
        with pytest.raises(ValueError, match="inside"):
            fail_inside()
        assert str(ar.current_device()) == "cpu:1"


def test_an_unknown_device_names_those_there_are() -> None:
    with pytest.raises(DeviceError, match=r"cpu:99.*cpu:0") as caught, ar.device("cpu:99"):
        pass

    assert caught.value.device == "cpu:99"
    assert "set_logical_devices" in str(caught.value)
    assert ar.current_device() == ar.Device("cpu:0")


@pytest.mark.parametrize("name", ["cuda:7", "tpu:0"])
def test_a_device_of_a_kind_that_is_not_there(name: str) -> None:
    with pytest.raises(DeviceError, match=name), ar.device(name):
        pass


@pytest.mark.parametrize("name", ["", "not a device", "cpu:x", "cpu:-1"])
def test_an_invalid_device_name_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="device"), ar.device(name):
        pass


@pytest.mark.asyncio
async def test_tasks_have_a_current_device_each() -> None:
    both_inside = asyncio.Event()

    async def use(name: str, *, is_last: bool) -> str:
        with ar.device(name):
            if is_last:
                both_inside.set()
            await both_inside.wait()
            return str(ar.current_device())

    names = await asyncio.gather(use("cpu:1", is_last=False), use("cpu:2", is_last=True))

    assert names == ["cpu:1", "cpu:2"]
    assert str(ar.current_device()) == "cpu:0"


@pytest.mark.asyncio
async def test_ops_see_the_block_of_their_caller() -> None:
    with ar.device("cpu:3"):
        assert str(await ar.run_on_host(ar.current_device)) == "cpu:3"


@pytest.mark.asyncio
async def test_in_a_replica_its_own_device_is_current(pair: ar.MirroredStrategy) -> None:
    async def step() -> tuple[str, str]:
        on_thread = await ar.get_replica_context().run_on_device(ar.current_device)
        return str(ar.current_device()), str(on_thread)

    with ar.device("cpu:5"):
        on_loop, on_thread = await pair.run(step)

    assert on_loop.values == on_thread.values == ("cpu:0", "cpu:1")


@pytest.mark.asyncio
async def test_a_merge_function_sees_replica_zeros_block(pair: ar.MirroredStrategy) -> None:
    def merge(_strategy: ar.Strategy) -> str:
        return str(ar.current_device())

    async def step() -> str:
        return await ar.get_replica_context().merge_call(merge)

    with ar.device("cpu:5"):
        assert (await pair.run(step)).values == ("cpu:5", "cpu:5")
