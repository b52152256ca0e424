"""ctx.variable and ctx.update: making and updating variables from inside a step."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError, OutOfSyncError


def me() -> Any:
    return ar.get_replica_context()


def my_id() -> int:
    return ar.get_replica_context().replica_id_in_sync_group


def new(strategy: ar.Strategy, value: Any = 0.0, **options: Any) -> Any:
    with strategy.scope():
        return ar.Variable(value, **options)


def components(variable: Any) -> list[Any]:
    return [part.tolist() for part in variable.components]


# --- ctx.variable -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_every_replica_gets_the_same_variable(strategy: ar.Strategy) -> None:
    got: list[ar.Variable] = []

    async def step() -> ar.Variable:
        got.append(await me().variable([1.0, 2.0], name="w", aggregation="sum"))
        return got[-1]

    result = await strategy.run(step)

    assert len(got) == strategy.num_replicas_in_sync
    assert set(got) == {result}
    assert strategy.extended.variable_created_in_scope(result)
    assert result.aggregation is ar.VariableAggregation.SUM
    assert result.name == "w"
    assert components(result) == [[1.0, 2.0]] * strategy.num_replicas_in_sync


@pytest.mark.asyncio
async def test_the_default_strategy_makes_a_plain_one() -> None:
    async def step() -> ar.Variable:
        return await me().variable(3.0)

    variable = await ar.get_strategy().run(step)

    assert type(variable) is type(ar.Variable(0.0))
    assert (variable.value, variable.strategy) == (3.0, None)


@pytest.mark.asyncio
async def test_a_sync_on_read_one_can_be_made_and_used_at_once(gang: ar.MirroredStrategy) -> None:
    async def step() -> ar.Variable:
        total = await me().variable(0, synchronization="on_read", aggregation="sum")
        await total.assign_add(my_id())
        return total

    total = await gang.run(step)

    assert isinstance(total, ar.SyncOnReadVariable)
    assert total.value == sum(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_the_value_of_replica_0_is_taken(gang: ar.MirroredStrategy) -> None:
    """Shapes and dtypes may differ too: the others' values are ignored."""

    async def step() -> ar.Variable:
        dtype = np.float32 if my_id() == 0 else np.int64
        return await me().variable(np.full(my_id() + 2, my_id() + 7, dtype))

    variable = await gang.run(step)

    assert components(variable) == [[7.0, 7.0]] * gang.num_replicas_in_sync
    assert variable.dtype == np.float32


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [3, [3, 3], (3.0, 4.0), np.float32(3), np.ones((2, 0))])
async def test_the_value_may_be_what_a_variable_takes(
    pair: ar.MirroredStrategy, value: Any
) -> None:
    async def step() -> ar.Variable:
        return await me().variable(value)

    variable = await pair.run(step)

    assert components(variable) == [np.asarray(value).tolist()] * 2
    assert variable.dtype == np.asarray(value).dtype


@pytest.mark.asyncio
async def test_the_value_is_copied(pair: ar.MirroredStrategy) -> None:
    source = np.zeros(2)

    async def step() -> ar.Variable:
        return await me().variable(source)

    variable = await pair.run(step)
    source[:] = 5.0

    assert variable.value.tolist() == [0.0, 0.0]
    assert source.flags.writeable


@pytest.mark.asyncio
async def test_a_callable_is_called_once_for_all(strategy: ar.Strategy) -> None:
    calls: list[bool] = []

    async def step() -> ar.Variable:
        def initial() -> np.ndarray:
            calls.append(ar.in_cross_replica_context())
            return np.full(2, 4.0)

        return await me().variable(initial, dtype=np.float32)

    variable = await strategy.run(step)

    assert calls == [True]
    assert variable.dtype == np.float32
    assert variable.value.tolist() == [4.0, 4.0]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [
        [{"aggregation": "sum"}, {"aggregation": "mean"}],
        [{"trainable": True}, {"trainable": False}],
        [{"name": "a"}, {"name": "b"}],
        [{}, {"dtype": np.float32}],
        [{"synchronization": "auto"}, {"synchronization": "on_read"}],
    ],
    ids=["aggregation", "trainable", "name", "dtype", "synchronization"],
)
async def test_options_have_to_be_equal(
    pair: ar.MirroredStrategy, options: list[dict[str, Any]]
) -> None:
    async def step() -> None:
        await me().variable(0.0, **options[my_id()])

    with pytest.raises(MergeMismatchError, match=r"Replicas 0 and 1 disagree in variable #1"):
        await pair.run(step)
    assert len(pair._runtime.variable_table) == 0


@pytest.mark.asyncio
async def test_the_order_of_options_does_not_matter(pair: ar.MirroredStrategy) -> None:
    orders = [{"name": "w", "trainable": False}, {"trainable": False, "name": "w"}]

    async def step() -> ar.Variable:
        return await me().variable(0.0, **orders[my_id()])

    assert not (await pair.run(step)).trainable


@pytest.mark.asyncio
async def test_variables_are_matched_by_the_order_of_the_calls(gang: ar.MirroredStrategy) -> None:
    async def step() -> list[ar.Variable]:
        for _ in range(my_id()):
            await asyncio.sleep(0)
        return [await me().variable(float(10 * i + my_id())) for i in range(3)]

    made = await gang.run(step)

    assert [v.name for v in made] == ["variable", "variable_1", "variable_2"]
    assert [v.value for v in made] == [0.0, 10.0, 20.0]
    assert gang.trainable_variables == tuple(made)


@pytest.mark.asyncio
async def test_another_collective_there_is_a_mismatch(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await me().variable(0.0)
        else:
            await me().barrier()

    with pytest.raises(MergeMismatchError, match=r"variable #1.*barrier #1"):
        await pair.run(step)
    assert len(pair._runtime.variable_table) == 0


@pytest.mark.asyncio
async def test_a_name_that_is_taken_is_an_error_on_every_replica(
    gang: ar.MirroredStrategy,
) -> None:
    taken = new(gang, 1.0, name="w")
    texts: list[str] = []

    async def step() -> None:
        try:
            await me().variable(2.0, name="w")
        except ValueError as error:
            texts.append(str(error))
        await me().barrier()

    await gang.run(step)

    assert len(texts) == gang.num_replicas_in_sync
    assert len(set(texts)) == 1
    assert "named 'w'" in texts[0]
    assert components(taken) == [1.0] * gang.num_replicas_in_sync
    with pytest.raises(ValueError, match="named 'w'"):
        await gang.run(_make_w)


async def _make_w() -> None:
    await me().variable(2.0, name="w")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "options", "error"),
    [
        ("text", {}, TypeError),
        (0.0, {"aggregation": "median"}, ValueError),
        (0.0, {"synchronization": "none"}, ValueError),
        (0.0, {"colour": "red"}, TypeError),
        (ar.PerReplica([1.0, 2.0]), {}, TypeError),
    ],
)
async def test_values_that_a_variable_refuses_are_refused_alike(
    pair: ar.MirroredStrategy, value: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    async def step() -> None:
        await me().variable(value, **options)

    with pytest.raises(error):  # not an ExceptionGroup: the texts are equal
        await pair.run(step)
    assert len(pair._runtime.variable_table) == 0


@pytest.mark.asyncio
async def test_a_callable_that_fails_is_one_error(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        def initial() -> np.ndarray:
            raise LookupError("no file")

        await me().variable(initial)

    with pytest.raises(LookupError, match="no file"):
        await pair.run(step)


# --- a context in the wrong place -------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["variable", "update"])
async def test_after_its_run_a_context_is_of_no_use(pair: ar.MirroredStrategy, method: str) -> None:
    contexts: list[Any] = []

    async def step() -> None:
        contexts.append(me())

    await pair.run(step)

    with pytest.raises(ContextError, match=rf"{method} was called .* after its run"):
        _call(contexts[0], method, new(pair))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "twin"), [("variable", r"ar\.Variable"), ("update", r"extended\.update")]
)
async def test_a_merge_function_is_told_the_twin(
    pair: ar.MirroredStrategy, method: str, twin: str
) -> None:
    variable = new(pair)

    async def step() -> None:
        context = me()
        await context.merge_call(lambda _s: _call(context, method, variable))

    with pytest.raises(ContextError, match=rf"{method} was called.*merge function.*{twin}"):
        await pair.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["variable", "update"])
async def test_the_context_of_another_replica_is_refused(
    pair: ar.MirroredStrategy, method: str
) -> None:
    variable = new(pair)
    contexts: list[Any] = []

    async def step() -> None:
        contexts.append(me())
        await me().barrier()
        _call(contexts[0] if contexts[0] is not me() else contexts[1], method, variable)

    with pytest.raises((ContextError, ExceptionGroup)) as caught:
        await pair.run(step)
    errors = getattr(caught.value, "exceptions", [caught.value])
    assert all(isinstance(error, ContextError) for error in errors)
    assert components(variable) == [0.0, 0.0]


def _call(context: Any, method: str, variable: Any) -> Any:
    args = (0.0,) if method == "variable" else (variable, lambda _v: None)
    return getattr(context, method)(*args)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["variable", "update"])
async def test_a_call_that_is_never_awaited_is_an_error(
    pair: ar.MirroredStrategy, method: str
) -> None:
    variable = new(pair)

    async def step() -> None:
        _call(me(), method, variable)

    with pytest.raises(ContextError, match=rf"never awaited.*replica 0: {method} #1"):
        await pair.run(step)
    assert len(pair._runtime.variable_table) == 1
    assert variable.version == 0


# --- ctx.update -------------------------------------------------------------------------------


async def by_context(_strategy: ar.Strategy, *args: Any, **options: Any) -> Any:
    return await me().update(*args, **options)


async def by_extended(strategy: ar.Strategy, *args: Any, **options: Any) -> Any:
    return await strategy.extended.update(*args, **options)


@pytest.fixture(params=[by_context, by_extended])
def update(request: pytest.FixtureRequest) -> Any:
    """The two ways to say it in a replica, which are one."""
    return request.param


@pytest.mark.asyncio
async def test_equal_arguments_keep_a_variable_in_sync(strategy: ar.Strategy, update: Any) -> None:
    variable = new(strategy, 10.0)
    count = strategy.num_replicas_in_sync

    async def step() -> None:
        await update(strategy, variable, lambda v, x, *, y: v.assign_add(x * y), (2.0,), {"y": 3.0})

    await strategy.run(step)

    assert components(variable) == [16.0] * count
    assert variable.version == 1
    await strategy.check_in_sync([variable])


@pytest.mark.asyncio
async def test_each_component_gets_its_own_replicas_arguments(
    gang: ar.MirroredStrategy, update: Any
) -> None:
    variable = new(gang, 0.0, name="w")
    count = gang.num_replicas_in_sync

    async def step() -> Any:
        mine = {"x": np.float64(my_id()), "more": [np.float64(my_id() * 10)]}
        return await update(
            gang,
            variable,
            lambda v, tree, *, y: v.assign(tree["x"] + tree["more"][0] + y),
            (mine,),
            {"y": np.float64(my_id() * 100)},
        )

    await gang.run(step)

    assert components(variable) == [111.0 * i for i in range(count)]
    with pytest.raises(OutOfSyncError) as caught:
        await gang.check_in_sync([variable])
    assert (caught.value.variable, caught.value.replica_id) == ("w", 1)
    assert caught.value.max_difference == 111.0


@pytest.mark.asyncio
async def test_every_replica_gets_its_own_result(gang: ar.MirroredStrategy, update: Any) -> None:
    variable = new(gang)

    async def step() -> Any:
        def fn(_v: Any, x: int) -> tuple[int | None, int]:
            return ar.get_update_replica_id(), x

        return await update(gang, variable, fn, (my_id() * 5,))

    results = gang.local_results(await gang.run(step))

    assert list(results) == [(i, 5 * i) for i in range(gang.num_replicas_in_sync)]


@pytest.mark.asyncio
async def test_group_false_gives_the_list_of_all_results(
    strategy: ar.Strategy, update: Any
) -> None:
    variable = new(strategy)
    got: list[Any] = []

    async def step() -> None:
        got.append(await update(strategy, variable, lambda _v, x: x, (my_id(),), group=False))

    await strategy.run(step)

    each = list(range(variable.num_copies))
    assert got == [each] * strategy.num_replicas_in_sync


@pytest.mark.asyncio
async def test_an_async_function_is_awaited(strategy: ar.Strategy, update: Any) -> None:
    variable = new(strategy, 1.0)

    async def fn(v: Any, x: float) -> float:
        await v.assign_add(x)
        await asyncio.sleep(0)
        await v.assign_add(v.value)
        return float(v.value)

    async def step() -> float:
        return await update(strategy, variable, fn, (2.0,))

    results = strategy.local_results(await strategy.run(step))

    assert set(results) == {6.0}
    assert components(variable) == [6.0] * strategy.num_replicas_in_sync
    assert variable.version == 1


@pytest.mark.asyncio
async def test_components_are_swapped_in_together(gang: ar.MirroredStrategy) -> None:
    variable = new(gang, 1.0)
    seen: list[Any] = []

    async def step() -> None:
        async def fn(v: Any) -> None:
            await v.assign(5.0)
            await asyncio.sleep(0)
            seen.append(components(v))

        await me().update(variable, fn)

    await gang.run(step)

    count = gang.num_replicas_in_sync
    assert seen == [[1.0] * count] * count
    assert components(variable) == [5.0] * count


@pytest.mark.asyncio
async def test_a_sync_on_read_variable_may_differ(pair: ar.MirroredStrategy, update: Any) -> None:
    variable = new(pair, 0.0, synchronization="on_read", aggregation="sum")

    async def step() -> None:
        await update(pair, variable, lambda v, x: v.assign_add(x), (my_id() + 1.0,))

    await pair.run(step)

    assert components(variable) == [1.0, 2.0]
    await pair.check_in_sync([variable])


@pytest.mark.asyncio
async def test_the_function_of_replica_0_runs(pair: ar.MirroredStrategy) -> None:
    """A nested function is made anew on every replica and counts as the same."""
    variable = new(pair)

    async def step() -> None:
        mine = my_id() + 4.0
        await me().update(variable, lambda v: v.assign(mine))

    await pair.run(step)

    assert components(variable) == [4.0, 4.0]


@pytest.mark.asyncio
async def test_calls_that_differ_are_a_mismatch(pair: ar.MirroredStrategy, update: Any) -> None:
    first, second = new(pair), new(pair)
    keep, other = (lambda _v: None), (lambda _v: 1)
    pairs: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [
        [((first, keep), {}), ((second, keep), {})],
        [((first, keep), {}), ((first, other), {})],
        [((first, keep), {}), ((first, keep), {"group": False})],
        [((first, keep, (1,)), {}), ((first, keep, (1, 2)), {})],
        [((first, keep, ()), {"kwargs": {"x": 1}}), ((first, keep, ()), {"kwargs": {"y": 1}})],
    ]

    for calls in pairs:

        async def step(calls: Any = calls) -> None:
            args, options = calls[my_id()]
            await update(pair, *args, **options)

        with pytest.raises(MergeMismatchError, match="Replicas 0 and 1 disagree in update #1"):
            await pair.run(step)
    assert (first.version, second.version) == (0, 0)


@pytest.mark.asyncio
async def test_a_function_that_fails_leaves_the_variable_as_it_was(
    gang: ar.MirroredStrategy, update: Any
) -> None:
    variable = new(gang, 1.0)

    def fn(v: Any) -> None:
        v.assign(9.0)
        if ar.get_update_replica_id() == 1:
            raise LookupError("lost")

    async def step() -> None:
        await update(gang, variable, fn)

    with pytest.raises(LookupError, match="lost"):
        await gang.run(step)
    assert components(variable) == [1.0] * gang.num_replicas_in_sync
    assert variable.version == 0


@pytest.mark.asyncio
async def test_a_foreign_variable_is_refused(pair: ar.MirroredStrategy, update: Any) -> None:
    plain = ar.Variable(1.0)
    other = new(ar.OneDeviceStrategy("cpu:0"), 1.0)

    for foreign in (plain, other):

        async def step(foreign: Any = foreign) -> None:
            await update(pair, foreign, lambda v: v.assign(2.0))

        with pytest.raises(ContextError, match="does not belong to"):
            await pair.run(step)
        assert foreign.value == 1.0


@pytest.mark.asyncio
async def test_an_argument_that_is_not_a_variable_is_refused(
    pair: ar.MirroredStrategy, update: Any
) -> None:
    async def step() -> None:
        await update(pair, "w", lambda v: v)

    with pytest.raises(TypeError, match="needs a variable"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_another_strategys_extended_is_refused_in_a_replica(
    pair: ar.MirroredStrategy,
) -> None:
    other = ar.OneDeviceStrategy("cpu:0")
    variable = new(other, 1.0)

    async def step() -> None:
        await other.extended.update(variable, lambda v: v.assign(2.0))

    with pytest.raises(ContextError, match=r"extended\.update"):
        await pair.run(step)
    assert variable.value == 1.0
