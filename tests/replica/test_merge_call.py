"""merge_call: arguments regrouped, one function run once, its result handed out in parts."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError

pytestmark = pytest.mark.usefixtures("no_task_left")

WHO: ContextVar[int] = ContextVar("who")


class Color(Enum):
    RED = 1
    BLUE = 2


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


async def merged(strategy: ar.Strategy, argument_of: Callable[[int], Any]) -> Any:
    """What a merge function gets where replica i passes `argument_of(i)`."""
    got: list[Any] = []

    async def step() -> None:
        await me().merge_call(lambda _strategy, value: got.append(value), (argument_of(my_id()),))

    await strategy.run(step)
    assert len(got) == 1
    return got[0]


# ---- the regroup rule ------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "value_of",
    [
        lambda i: i,
        lambda i: float(i),
        lambda _i: 1,
        lambda i: 1j * i,
        lambda i: i % 2 == 0,
        lambda i: np.float32(i),
    ],
    ids=["int", "float", "equal ints", "complex", "bool", "numpy scalar"],
)
async def test_every_number_becomes_per_replica(
    gang: ar.MirroredStrategy, value_of: Callable[[int], Any]
) -> None:
    value = await merged(gang, value_of)

    assert type(value) is ar.PerReplica
    assert value.values == tuple(map(value_of, range(gang.num_replicas_in_sync)))


@pytest.mark.asyncio
async def test_arrays_are_passed_as_they_are(gang: ar.MirroredStrategy) -> None:
    arrays = [np.arange(i) for i in range(gang.num_replicas_in_sync)]

    value = await merged(gang, arrays.__getitem__)

    assert type(value) is ar.PerReplica
    assert all(a is b for a, b in zip(value, arrays, strict=True))


@pytest.mark.asyncio
async def test_one_replica_gets_per_replica_too(solo: ar.OneDeviceStrategy) -> None:
    value = await merged(solo, lambda i: {"x": i, "s": "s", "none": None})

    assert type(value["x"]) is ar.PerReplica
    assert (value["x"].values, value["s"], value["none"]) == ((0,), "s", None)


@pytest.mark.asyncio
async def test_the_default_strategy_passes_plain_values() -> None:
    array = np.ones(2)

    value = await merged(ar.DefaultStrategy(), lambda _i: (array, "s", None))

    assert value[0] is array
    assert value[1:] == ("s", None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "constant",
    ["text", b"bytes", Color.RED, len, np.ndarray, merged, None],
    ids=["str", "bytes", "enum", "builtin", "class", "function", "none"],
)
async def test_equal_constants_stay_themselves(gang: ar.MirroredStrategy, constant: object) -> None:
    assert await merged(gang, lambda _i: constant) is constant
    assert await merged(gang, lambda _i: {"deep": (constant,)}) == {"deep": (constant,)}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "constants",
    [("a", "b"), (b"a", b"b"), (Color.RED, Color.BLUE), (len, max), (int, float), ("a", 1)],
    ids=["str", "bytes", "enum", "builtin", "class", "str and int"],
)
async def test_different_constants_are_a_mismatch(
    gang: ar.MirroredStrategy, constants: tuple[object, object]
) -> None:
    with pytest.raises(MergeMismatchError, match="merge_call #1"):
        await merged(gang, lambda i: constants[i == 1])


@pytest.mark.asyncio
async def test_none_on_some_replicas_is_a_per_replica(gang: ar.MirroredStrategy) -> None:
    value = await merged(gang, lambda i: i or None)

    assert type(value) is ar.PerReplica
    assert value.values == (None, *range(1, gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_nested_arguments_are_regrouped_leaf_by_leaf(gang: ar.MirroredStrategy) -> None:
    value = await merged(
        gang, lambda i: {"b": [i, (None, "s")], "a": np.full(i, i), "none": None, "empty": ()}
    )

    count = gang.num_replicas_in_sync
    assert sorted(value) == ["a", "b", "empty", "none"]
    assert value["b"][0].values == tuple(range(count))
    assert value["b"][1] == (None, "s")
    assert [a.tolist() for a in value["a"]] == [[i] * i for i in range(count)]
    assert (value["none"], value["empty"]) == (None, ())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "values",
    [([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (1, [1])],
    ids=["container", "length", "keys", "leaf and list"],
)
async def test_different_structures_are_a_mismatch(
    gang: ar.MirroredStrategy, values: tuple[object, object]
) -> None:
    with pytest.raises(MergeMismatchError, match="argument 0"):
        await merged(gang, lambda i: values[i == 1])


@pytest.mark.asyncio
async def test_shapes_and_dtypes_may_differ(gang: ar.MirroredStrategy) -> None:
    value = await merged(gang, lambda i: np.zeros((1,) * i, "f4" if i else "i8"))

    assert [a.ndim for a in value] == list(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_a_variable_stays_itself(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        variables = [ar.Variable(0.0), ar.Variable(1.0)]

    assert await merged(gang, lambda _i: [variables[0]]) == [variables[0]]
    with pytest.raises(MergeMismatchError):
        await merged(gang, lambda i: variables[i == 1])


@pytest.mark.asyncio
async def test_keyword_arguments_are_merged_alike(gang: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().merge_call(
            lambda _s, a, *, b, c: (
                a,
                ar.PerReplica([x + y for x, y in zip(a, b, strict=True)]),
                c,
            ),
            [my_id()],
            {"b": 10 * my_id(), "c": "c"} if my_id() else {"c": "c", "b": 0},
        )

    result = await gang.run(step)

    ids = range(gang.num_replicas_in_sync)
    assert result[0].values == tuple(ids)
    assert result[1].values == tuple(11 * i for i in ids)
    assert set(result[2]) == {"c"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (((1,), (1, 2)), ({}, {})),
        (((), ()), ({"a": 1}, {"b": 1})),
        (((), ()), ({}, {"b": 1})),
        (((1,), (1,)), ({}, {"b": 1})),
        (((1,), (1,)), ({"b": 1}, {})),
    ],
    ids=["positional", "names", "some", "one more", "one less"],
)
async def test_different_argument_lists_are_a_mismatch(
    gang: ar.MirroredStrategy, args: tuple[Any, Any], kwargs: tuple[Any, Any]
) -> None:
    def merge(*_args: object, **_kwargs: object) -> None:
        """Be one function for all replicas."""

    async def step() -> None:
        odd = my_id() == 1
        await me().merge_call(merge, args[odd], kwargs[odd])

    with pytest.raises(MergeMismatchError, match="arguments"):
        await gang.run(step)


# ---- the merge function -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_sync_async_and_awaitable_returning_functions(strategy: ar.Strategy) -> None:
    async def asynchronous(_strategy: ar.Strategy, x: Any) -> str:
        await ar.run_on_host(int)
        return "async"

    def returning(current: ar.Strategy, x: Any) -> Awaitable[str]:
        return asynchronous(current, x)

    def future(_strategy: ar.Strategy, x: Any) -> Awaitable[str]:
        made: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(made.set_result, "future")
        return made

    async def step() -> list[str]:
        return [
            await me().merge_call(lambda _s, x: "plain", (1,)),
            await me().merge_call(asynchronous, (1,)),
            await me().merge_call(returning, (1,)),
            await me().merge_call(future, (1,)),
        ]

    results = strategy.local_results(await strategy.run(step))

    assert results == (["plain", "async", "async", "future"],) * len(results)


class Adder:
    """Different objects, equal methods."""

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def add(self, _strategy: ar.Strategy, values: Any) -> list[int]:
        return [value + self.amount for value in values]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["lambda", "def", "partial", "bound", "partial of bound"])
async def test_functions_with_one_code_object_are_the_same(
    gang: ar.MirroredStrategy, kind: str
) -> None:
    """Replica 0's function runs: it is the one that adds 100."""

    async def step() -> Any:
        amount = 100 + my_id()

        def nested(_strategy: ar.Strategy, values: Any) -> list[int]:
            return [value + amount for value in values]

        def explicit(extra: int, _strategy: ar.Strategy, values: Any) -> list[int]:
            return [value + extra for value in values]

        functions: dict[str, Callable[..., Any]] = {
            "lambda": lambda _s, values: [value + amount for value in values],
            "def": nested,
            "partial": functools.partial(explicit, amount),
            "bound": Adder(amount).add,
            "partial of bound": functools.partial(Adder(amount).add),
        }
        return tuple(await me().merge_call(functions[kind], (my_id(),)))

    results = gang.local_results(await gang.run(step))

    expected = tuple(100 + i for i in range(gang.num_replicas_in_sync))
    assert results == (expected,) * gang.num_replicas_in_sync


@pytest.mark.asyncio
async def test_different_functions_are_a_mismatch(gang: ar.MirroredStrategy) -> None:
    def first(_strategy: ar.Strategy) -> None: ...
    def second(_strategy: ar.Strategy) -> None: ...

    async def step(wrap: Callable[[Any], Any]) -> None:
        await me().merge_call(wrap(second if my_id() == 1 else first))

    for wrap in (lambda fn: fn, functools.partial):
        with pytest.raises(MergeMismatchError, match=r"first.* and .*second"):
            await gang.run(step, args=(wrap,))


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_it_sees_context_variables_of_replica_0(
    strategy: ar.Strategy, asynchronous: bool
) -> None:
    def look(_strategy: ar.Strategy) -> int:
        seen = WHO.get()
        WHO.set(99)
        return seen

    async def look_later(current: ar.Strategy) -> int:
        await ar.run_on_host(int)
        return look(current)

    async def step() -> int:
        WHO.set(10 + my_id())
        result: int = await me().merge_call(look_later if asynchronous else look)
        assert WHO.get() == 10 + my_id()
        return result

    assert set(strategy.local_results(await strategy.run(step))) == {10}


@pytest.mark.asyncio
async def test_it_may_run_the_strategy_again(strategy: ar.Strategy) -> None:
    async def inner(x: int) -> int:
        return await me().all_reduce("sum", x + my_id())

    async def merge(current: ar.Strategy) -> Any:
        assert current.statistics().num_active in {0, 1, 2}
        return current.local_results(await current.run(inner, args=(1,)))[0]

    async def step() -> int:
        return await me().merge_call(merge) + await me().all_reduce("sum", 0)

    count = strategy.num_replicas_in_sync
    total = sum(1 + i for i in range(count))
    assert strategy.local_results(await strategy.run(step)) == (total,) * count


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [None, "name", 3])
async def test_a_merge_function_that_is_not_callable_is_refused(
    strategy: ar.Strategy, bad: object
) -> None:
    async def step() -> None:
        with pytest.raises(TypeError, match="merge_call needs a function"):
            me().merge_call(bad)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_arguments_must_be_a_tuple_or_list(strategy: ar.Strategy) -> None:
    async def step() -> None:
        for bad in ("ab", {"a": 1}, 3, np.ones(2)):
            with pytest.raises(ValueError, match="args=\\(value,\\)"):
                me().merge_call(lambda *_: None, bad)

    await strategy.run(step)


# ---- functions that update variables -----------------------------------------------------------


class Decay:
    """A function with a state, as an object."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, v: Any, x: float) -> Any:
        return v.assign_sub(self.rate * x)


def decay(v: Any, x: float, rate: float) -> Any:
    return v.assign_sub(rate * x)


CALLABLES: dict[str, Callable[[], Any]] = {
    "partial": lambda: functools.partial(decay, rate=0.5),
    "partial of a lambda": lambda: functools.partial(lambda v, x: v.assign_sub(0.5 * x)),
    "object": lambda: Decay(0.5),
    "method": lambda: Decay(0.5).__call__,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("kind", CALLABLES)
async def test_anything_that_can_be_called_updates_a_variable(
    strategy: ar.Strategy, kind: str, is_blocking: bool
) -> None:
    with strategy.scope():
        variable = ar.Variable(10.0)

    async def step() -> None:
        await me().update(variable, CALLABLES[kind](), (4.0,))

    def plain() -> None:
        me().blocking.update(variable, CALLABLES[kind](), (4.0,))

    await strategy.run(plain if is_blocking else step)

    assert variable.value == 8.0
    await strategy.check_in_sync([variable])


@pytest.mark.asyncio
async def test_partials_and_objects_of_different_functions_are_a_mismatch(
    gang: ar.MirroredStrategy,
) -> None:
    with gang.scope():
        variable = ar.Variable(10.0)

    async def step() -> None:
        fn = functools.partial(decay, rate=0.5) if my_id() else Decay(0.5)
        await me().update(variable, fn, (4.0,))

    with pytest.raises(MergeMismatchError, match=r"argument 1 is .*ecay"):
        await gang.run(step)
    assert variable.value == 10.0
