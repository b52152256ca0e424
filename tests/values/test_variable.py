"""Variables: creation in and out of scope, reading, plain ones."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.values import PlainVariable

# --- creation ---------------------------------------------------------------------------------


def test_outside_every_scope_a_variable_is_plain() -> None:
    variable = ar.Variable([1.0, 2.0])

    assert isinstance(variable, PlainVariable)
    assert isinstance(variable, ar.Variable)
    assert len(variable.components) == 1


def test_in_scope_the_strategy_makes_it() -> None:
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])

    with strategy.scope():
        variable = ar.Variable([1.0, 2.0])

    assert isinstance(variable, ar.MirroredVariable)
    assert isinstance(variable, ar.Variable)
    assert variable.strategy is strategy
    assert strategy.extended.variable_created_in_scope(variable)
    assert [part.tolist() for part in variable.components] == [[1.0, 2.0]] * 2


def test_the_default_strategy_owns_variables_made_outside_any_scope() -> None:
    variable = ar.Variable(1.0)

    assert ar.get_strategy().extended.variable_created_in_scope(variable)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_all_replicas_start_equal_and_a_callable_is_called_once(num_replicas: int) -> None:
    calls: list[int] = []

    def initial() -> np.ndarray:
        calls.append(1)
        return np.random.default_rng(len(calls)).standard_normal(4)

    strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        variable = ar.Variable(initial)

    assert calls == [1]
    assert len(variable.components) == num_replicas
    assert len({part.tobytes() for part in variable.components}) == 1


def test_the_initial_value_is_copied() -> None:
    source = np.zeros(3)
    variable = ar.Variable(source)

    source[:] = 7.0

    assert variable.value.tolist() == [0.0, 0.0, 0.0]
    assert source.flags.writeable


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1, None, "int64"),
        (1.0, None, "float64"),
        ([1, 2], np.float32, "float32"),
        (np.float16(2), None, "float16"),
        (lambda: np.ones(2, np.int8), None, "int8"),
        (True, None, "bool"),
        ([1 + 2j], "complex64", "complex64"),
    ],
)
def test_dtype(value: Any, dtype: Any, expected: str) -> None:
    variable = ar.Variable(value, dtype=dtype)

    assert variable.dtype == variable.value.dtype == expected
    assert variable.shape == variable.value.shape


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    assert ar.Variable(np.zeros(shape)).value.shape == shape


@pytest.mark.parametrize("bad", [None, "text", object(), [1, None], b"raw"])
def test_a_value_that_is_not_a_number_is_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ar.Variable(bad, name="w")


def test_a_distributed_value_cannot_be_an_initial_value() -> None:
    with pytest.raises(TypeError, match="PerReplica"):
        ar.Variable(ar.PerReplica([1.0, 2.0]))


@pytest.mark.parametrize("aggregation", ["none", "SUM", "Mean", "only_first_replica"])
def test_aggregation_is_a_member_or_its_name_in_any_case(aggregation: str) -> None:
    member = ar.VariableAggregation[aggregation.upper()]

    assert ar.Variable(0.0, aggregation=aggregation).aggregation is member
    assert ar.Variable(0.0, aggregation=member).aggregation is member


@pytest.mark.parametrize("aggregation", ["median", "", 3])
def test_an_unknown_aggregation_names_the_variable_and_the_legal_ones(aggregation: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)'w'.*none.*sum.*mean.*only_first_replica"):
        ar.Variable(0.0, name="w", aggregation=aggregation)


def test_trainable_and_name() -> None:
    variable = ar.Variable(0.0, trainable=False, name="rate")

    assert (variable.trainable, variable.name) == (False, "rate")
    assert ar.Variable(0.0).trainable


def test_names_are_unique_within_a_strategy() -> None:
    strategy = ar.MirroredStrategy(["cpu:0"])

    with strategy.scope():
        named = ar.Variable(0.0, name="w")
        with pytest.raises(ValueError, match="named 'w'"):
            ar.Variable(0.0, name="w")
        unnamed = [ar.Variable(0.0) for _ in range(3)]

    assert [v.name for v in [named, *unnamed]] == ["w", "variable", "variable_1", "variable_2"]
    assert len(strategy._runtime.variable_table) == 4


def test_a_free_name_is_found_without_trying_all_that_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = ar.MirroredStrategy(["cpu:0"])
    asked: list[object] = []

    class Counted(weakref.WeakValueDictionary[str, ar.Variable]):
        def __contains__(self, key: object) -> bool:
            asked.append(key)
            return super().__contains__(key)

    monkeypatch.setattr(strategy._runtime.variable_table, "_by_name", Counted())
    with strategy.scope():
        made = [ar.Variable(0.0) for _ in range(100)]
        assert [v.name for v in made] == ["variable", *(f"variable_{i}" for i in range(1, 100))]
        assert len(asked) < 400

        del made[3:6]  # their names are free, the first one of them first
        gc.collect()
        made += [ar.Variable(0.0) for _ in range(4)]
    assert [v.name[9:] for v in made[-4:]] == ["3", "4", "5", "100"]


def test_trainable_variables_are_listed_in_order() -> None:
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])

    with strategy.scope():
        first = ar.Variable(0.0)
        ar.Variable(0, trainable=False)
        last = ar.Variable(0.0)

    assert strategy.trainable_variables == (first, last)


@pytest.mark.asyncio
async def test_a_variable_cannot_be_made_in_a_replica(solo: ar.OneDeviceStrategy) -> None:
    async def step() -> None:
        ar.Variable(0.0)

    with pytest.raises(ContextError, match=r"ar\.Variable"):
        await solo.run(step)


@pytest.mark.asyncio
async def test_a_variable_cannot_be_made_in_an_update(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(0.0)

    with pytest.raises(ContextError, match=r"ar\.Variable"):
        await pair.extended.update(variable, lambda _v: ar.Variable(0.0))


@pytest.mark.asyncio
async def test_a_merge_function_may_make_one(pair: ar.MirroredStrategy) -> None:
    made: list[ar.Variable] = []

    def merge(_strategy: ar.Strategy) -> None:
        made.append(ar.Variable(2.0))

    async def step() -> None:
        await ar.get_replica_context().merge_call(merge)

    await pair.run(step)

    assert pair.extended.variable_created_in_scope(made[0])


def test_repr_is_one_line_with_the_state() -> None:
    variable = ar.Variable(np.zeros((2, 3), np.float32), name="w")

    assert repr(variable) == "<PlainVariable w | float32 (2, 3), v0>"


def test_a_plain_variable_is_freed_with_its_last_reference() -> None:
    variable = ar.Variable(np.zeros(3))
    watched = weakref.ref(variable)

    del variable
    gc.collect()

    assert watched() is None


# --- reading ----------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "mirrored"])
def variable(request: pytest.FixtureRequest) -> ar.Variable:
    if request.param == "plain":
        return ar.Variable([1.0, 2.0])
    with ar.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return ar.Variable([1.0, 2.0])


def test_the_value_is_read_only(variable: ar.Variable) -> None:
    with pytest.raises(ValueError, match="read-only"):
        variable.value[0] = 5.0
    assert not any(part.flags.writeable for part in variable.components)


def test_asarray_is_the_value_and_array_is_a_copy(variable: ar.Variable) -> None:
    assert np.asarray(variable) is variable.value
    copied = np.array(variable)
    copied[0] = 9.0
    assert variable.value.tolist() == [1.0, 2.0]
    assert np.asarray(variable, np.float32).dtype == np.float32


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda v: v + 1, [2.0, 3.0]),
        (lambda v: 1 - v, [0.0, -1.0]),
        (lambda v: v * v, [1.0, 4.0]),
        (lambda v: v / 2, [0.5, 1.0]),
        (lambda v: -v, [-1.0, -2.0]),
        (lambda v: v**2, [1.0, 4.0]),
        (lambda v: v @ np.eye(2), [1.0, 2.0]),
        (lambda v: np.array([1.0, 1.0]) + v, [2.0, 3.0]),
        (lambda v: np.add(v, 1), [2.0, 3.0]),
        (lambda v: np.dot(v, np.eye(2)), [1.0, 2.0]),
        (lambda v: np.exp(0 * np.asarray(v)), [1.0, 1.0]),
        (lambda v: np.where(v > 1, v, 0), [0.0, 2.0]),
        (lambda v: np.concatenate([v, v])[:2], [1.0, 2.0]),
    ],
    ids=["v+1", "1-v", "v*v", "v/2", "-v", "v**2", "v@m", "a+v", "add", "dot", "exp", "v>1", "cat"],
)
def test_variables_take_part_in_numpy_expressions(
    variable: ar.Variable, expression: Any, expected: list[float]
) -> None:
    result = expression(variable)

    assert isinstance(result, np.ndarray)
    assert result.tolist() == expected
    assert variable.value.tolist() == [1.0, 2.0]


# --- writing a plain variable -----------------------------------------------------------------


@pytest.mark.asyncio
async def test_plain_assign_add_and_sub() -> None:
    variable = ar.Variable([1.0, 2.0])

    await variable.assign([3.0, 4.0])
    await variable.assign_add(np.array([1.0, 1.0]))
    await variable.assign_sub(np.array([0.5, 0.0]))

    assert variable.value.tolist() == [3.5, 5.0]
    assert variable.version == 3


@pytest.mark.asyncio
async def test_a_reader_of_a_plain_variable_keeps_what_it_read() -> None:
    variable = ar.Variable([1.0, 2.0])
    old = variable.value

    await variable.assign_add(np.ones(2))

    assert old.tolist() == [1.0, 2.0]
    assert variable.value.tolist() == [2.0, 3.0]
    assert not variable.value.flags.writeable


@pytest.mark.asyncio
async def test_a_plain_variable_works_under_the_default_strategy() -> None:
    variable = ar.Variable(1.0, aggregation="sum")

    async def step() -> None:
        await variable.assign_add(1.0)

    await ar.get_strategy().run(step)

    assert variable.value == 2.0


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [np.zeros(3), 1.0, np.zeros((1, 2)), "ab"])
async def test_a_plain_variable_refuses_another_shape_or_dtype(value: Any) -> None:
    variable = ar.Variable([1.0, 2.0], name="w")

    with pytest.raises(ValueError, match="'w'"):
        await variable.assign(value)
    assert (variable.value.tolist(), variable.version) == ([1.0, 2.0], 0)


@pytest.mark.asyncio
async def test_a_variable_takes_no_masked_array(either: ar.Strategy) -> None:
    """What was masked would count."""
    masked = np.ma.array([1.0, 999.0], mask=[False, True])
    with either.scope():
        variable = ar.Variable([1.0, 2.0], name="w", aggregation="mean")
        with pytest.raises(TypeError, match=r"'u' would drop the mask of (?s:.*)\.filled"):
            ar.Variable(masked, name="u")

    async def step() -> None:
        with pytest.raises(TypeError, match=r"'w' would drop the mask of (?s:.*)\.filled"):
            await variable.assign(masked)

    await either.run(step)
    assert variable.value.tolist() == [1.0, 2.0]
    await variable.assign(np.ma.array([3.0, 4.0]))  # none is
    assert variable.value.tolist() == [3.0, 4.0]


@pytest.mark.asyncio
async def test_a_plain_variable_is_not_written_under_another_strategy(
    solo: ar.OneDeviceStrategy,
) -> None:
    """It belongs to the default strategy; several replicas would each write it."""
    variable = ar.Variable(1.0, name="w")

    async def step() -> None:
        await variable.assign_add(1.0)

    with pytest.raises(ContextError, match="'w'"):
        await solo.run(step)
    with solo.scope(), pytest.raises(ContextError, match="'w'"):
        await variable.assign(2.0)
    assert variable.value == 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [-1, 256, 10**30])
async def test_an_int_that_does_not_fit_is_refused(value: int) -> None:
    variable = ar.Variable(np.uint8([1, 2]).sum(dtype=np.uint8))

    with pytest.raises(ValueError, match="holds 0 to 255"):
        await variable.assign(value)

    assert variable.value == 3
    assert await variable.assign(255) == 255


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint64"])
async def test_an_int_is_held_to_the_limits_wherever_it_is_written(
    pair: ar.MirroredStrategy, dtype: str
) -> None:
    limits = np.iinfo(dtype)
    with pair.scope():
        variable = ar.Variable(np.zeros((), dtype), aggregation="only_first_replica")
        total = ar.Variable(np.zeros((), dtype), aggregation="sum", synchronization="on_read")

    async def step(value: int) -> None:
        await variable.assign(value)

    def plain(value: int) -> None:
        variable.blocking.assign(value)

    async def count(value: int) -> None:
        await total.assign_add(value)

    ways: list[Any] = [
        variable.assign,
        total.assign,
        lambda value: pair.extended.update(variable, lambda v: v.assign(value)),
        *(lambda value, fn=fn: pair.run(fn, (value,)) for fn in (step, plain, count)),
    ]
    for write in ways:
        for value in (limits.min - 1, limits.max + 1, 10**30, -(10**30)):
            text = rf"holds {limits.min} to {limits.max}, cannot assign {value}\."
            with pytest.raises(ValueError, match=text):
                await write(value)
    assert variable.version == total.version == 0
    for write in (variable.assign, ways[3], ways[4]):
        for value in (limits.min, limits.max, True):
            await write(value)
            assert variable.value == value


@pytest.mark.asyncio
async def test_lists_are_held_to_the_limits_and_arrays_are_not() -> None:
    """NumPy's own numbers are cast as it casts them, if the kind is the same."""
    variable = ar.Variable(np.zeros(2, np.int8))

    for value in ([1, 300], (-129, 1)):
        with pytest.raises(ValueError, match=r"holds -128 to 127, cannot assign (300|-129)\."):
            await variable.assign(value)
    assert variable.version == 0
    assert (await variable.assign([-128, True])).tolist() == [-128, 1]
    assert (await variable.assign(np.array([1, 300]))).tolist() == [1, 44]
    assert await ar.Variable(np.int8(0)).assign(np.int64(300)) == 44
