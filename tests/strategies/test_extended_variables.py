"""extended: reading, finding and placing variables; running; and what it says of the process."""

from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def new_variable(strategy: ar.Strategy, value: Any = 0.0) -> ar.Variable:
    with strategy.scope():
        return ar.Variable(value)


# ---- read_var -----------------------------------------------------------------------------------


async def test_read_var_gives_the_value(strategy: ar.Strategy) -> None:
    variable = new_variable(strategy, [1.0, 2.0])

    value = await strategy.extended.read_var(variable)

    assert value.tolist() == [1.0, 2.0]
    assert not value.flags.writeable


async def test_read_var_checks_its_argument(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    with pytest.raises(TypeError, match="needs a variable"):
        await gang.extended.read_var(1.0)  # type: ignore[arg-type]
    with pytest.raises(ContextError, match="its own strategy"):
        await gang.extended.read_var(new_variable(solo))


# ---- value_container ----------------------------------------------------------------------------


async def test_a_variable_contains_itself(strategy: ar.Strategy) -> None:
    variable = new_variable(strategy)

    assert strategy.extended.value_container(variable) is variable


async def test_components_lead_to_their_variable(gang: ar.MirroredStrategy) -> None:
    variables = [new_variable(gang, 1.0) for _ in range(3)]
    await gang.extended.update(variables[2], lambda v: v.assign(ar.get_update_replica_id()))

    for variable in variables:
        for part in variable.components:
            assert gang.extended.value_container(part) is variable
        view = ar.Mirrored(variable.components)
        assert gang.extended.value_container(view) is variable


async def test_in_a_replica_the_value_leads_to_its_variable(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang, 1.0)

    async def step() -> ar.Variable:
        found: ar.Variable = gang.extended.value_container(variable.value)
        return found

    assert await gang.run(step) is variable


async def test_an_array_of_no_variable_is_its_own_container(
    strategy: ar.Strategy, triple: ar.MirroredStrategy
) -> None:
    variable = new_variable(strategy, 1.0)
    old = variable.value
    await variable.assign(2.0)

    for value in (old, 3, "text", None, [1], ar.PerReplica([1]), new_variable(triple).value):
        assert strategy.extended.value_container(value) is value


# ---- colocate_vars_with -------------------------------------------------------------------------


async def test_variables_made_inside_belong_to_the_same_strategy(strategy: ar.Strategy) -> None:
    first = new_variable(strategy)

    with strategy.extended.colocate_vars_with(first):
        second = ar.Variable(1.0)

    assert type(second) is type(first)
    assert second.strategy is first.strategy
    assert len(second.components) == len(first.components)
    assert strategy.extended.variable_created_in_scope(second)
    assert not ar.in_cross_replica_context()


async def test_colocating_with_a_foreign_variable_is_refused(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    for foreign in (new_variable(solo), ar.Variable(0.0)):
        with pytest.raises(ContextError, match="its own strategy"):
            gang.extended.colocate_vars_with(foreign)
    with pytest.raises(TypeError, match="needs a variable"):
        gang.extended.colocate_vars_with("w")  # type: ignore[arg-type]
    mine = new_variable(gang)
    with solo.scope(), pytest.raises(ContextError, match="Leave that scope"):
        gang.extended.colocate_vars_with(mine)


# ---- running ------------------------------------------------------------------------------------


async def test_call_for_each_replica_is_run(strategy: ar.Strategy) -> None:
    async def step(x: float, *, y: float) -> float:
        ctx = ar.get_replica_context()
        return x + y + ctx.replica_id_in_sync_group

    args = (ar.Mirrored([1.0] * strategy.num_replicas_in_sync),)
    result = await strategy.extended.call_for_each_replica(step, args, {"y": 10.0})

    assert repr(result) == repr(await strategy.run(step, args, {"y": 10.0}))
    assert strategy.statistics().num_steps == 2


async def test_the_properties_that_describe_the_process(strategy: ar.Strategy) -> None:
    extended = strategy.extended

    assert extended.should_checkpoint is True
    assert extended.should_save_summary is True
    assert extended.require_static_shapes is isinstance(strategy, ar.TPUStrategy)


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("read_var", r"variable\.value"),
        ("colocate_vars_with", "outside the step"),
        ("call_for_each_replica", "outside the step"),
    ],
)
async def test_in_a_replica_the_error_names_the_other_method(
    strategy: ar.Strategy, method: str, advice: str
) -> None:
    variable = new_variable(strategy)

    async def step() -> None:
        extended = strategy.extended
        if method == "read_var":
            await extended.read_var(variable)
        elif method == "colocate_vars_with":
            extended.colocate_vars_with(variable)
        else:
            await extended.call_for_each_replica(step)

    with pytest.raises(ContextError, match=rf"extended\.{method}.*{advice}"):
        await strategy.run(step)


async def test_variables_live_with_the_devices_of_others(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        first = ar.Variable(1.0)
    with pair.extended.colocate_vars_with(pair.extended.non_slot_devices([first])):
        second = ar.Variable(2.0)
    assert pair.extended.variable_created_in_scope(second)
    with ar.get_strategy().extended.colocate_vars_with(()):
        assert ar.Variable(1.0).value == 1.0

    for wrong, names in ((ar.list_devices("cpu")[:1], "cpu:0"), ((), "no device")):
        with pytest.raises(
            ValueError, match=f"colocate_vars_with got {names}, but .* cpu:0, cpu:1"
        ):
            pair.extended.colocate_vars_with(wrong)
    with pytest.raises(TypeError, match="colocate_vars_with"):
        pair.extended.colocate_vars_with(3)  # type: ignore[arg-type]


async def test_the_device_of_ordinary_code_on_a_host(pair: ar.MirroredStrategy) -> None:
    assert pair.extended.get_host_cpu_device() == ar.Device("cpu:0")
    hosts = ar.TPUStrategy(ar.TPUClusterResolver(num_hosts=2, cores_per_host=1))
    assert hosts.extended.get_host_cpu_device(1) == ar.Device("cpu:0")
    for strategy, host_id, last in ((pair, 1, 0), (hosts, 2, 1), (hosts, -1, 1)):
        with pytest.raises(ValueError, match=f"no host {host_id}: ids are 0 to {last}"):
            strategy.extended.get_host_cpu_device(host_id)
