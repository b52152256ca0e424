"""Scopes: current strategy, nesting, and leaving where one entered."""

import asyncio
from collections.abc import AsyncIterator
from contextvars import copy_context

import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import STRATEGIES


@pytest_asyncio.fixture(params=[kind for kind in STRATEGIES if kind != "default"])
async def bound(request: pytest.FixtureRequest) -> AsyncIterator[ar.Strategy]:
    """Every kind of strategy but the default one, whose scope changes nothing."""
    async with STRATEGIES[request.param]() as chosen:
        yield chosen


pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.mark.asyncio
async def test_a_scope_makes_its_strategy_current(bound: ar.Strategy) -> None:
    before = ar.get_strategy()
    assert isinstance(before, ar.DefaultStrategy)
    assert not ar.has_strategy()

    with bound.scope() as entered:
        assert entered is bound
        assert ar.get_strategy() is bound
        assert ar.has_strategy()
        assert ar.get_replica_context() is None

    assert ar.get_strategy() is before


@pytest.mark.asyncio
@pytest.mark.parametrize("is_one_object", [True, False], ids=["one scope", "two scopes"])
async def test_the_same_strategy_nests(bound: ar.Strategy, is_one_object: bool) -> None:
    outer = bound.scope()
    inner = outer if is_one_object else bound.scope()

    for _ in range(2):
        with outer:
            with inner as entered:
                assert ar.get_strategy() is entered is bound
            assert ar.get_strategy() is bound
            assert ar.in_cross_replica_context()
        assert not ar.has_strategy()


@pytest.mark.asyncio
async def test_tasks_may_share_a_scope(bound: ar.Strategy) -> None:
    scope, order = bound.scope(), asyncio.Event()

    async def first() -> None:
        with scope:
            await order.wait()  # leaves before the one that entered later
            assert ar.get_strategy() is bound
        assert not ar.has_strategy()

    async def second() -> None:
        with scope:
            order.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ar.get_strategy() is bound
        assert not ar.has_strategy()

    await asyncio.gather(first(), second())


@pytest.mark.asyncio
async def test_another_strategy_does_not_nest(bound: ar.Strategy) -> None:
    for other in (ar.MirroredStrategy(["cpu:6", "cpu:7"]), ar.DefaultStrategy()):
        with bound.scope():
            with pytest.raises(ContextError, match="the scope of"), other.scope():
                pass
            assert ar.get_strategy() is bound


@pytest.mark.asyncio
async def test_the_default_strategys_scope_changes_nothing(pair: ar.MirroredStrategy) -> None:
    default = ar.get_strategy()

    async def step() -> int:
        before = ar.get_replica_context()
        with ar.get_strategy().scope() as entered:
            assert entered is default
            assert ar.get_replica_context() is before
        return 1

    with default.scope(), default.scope():
        assert ar.get_strategy() is default
        assert ar.get_replica_context() is not None
        assert not ar.in_cross_replica_context()
        with pair.scope():
            assert ar.get_strategy() is pair
        assert await default.run(step) == 1


@pytest.mark.asyncio
async def test_an_equal_strategy_is_another_one() -> None:
    first, second = (ar.OneDeviceStrategy("cpu:0") for _ in range(2))
    assert first == second

    with first.scope(), pytest.raises(ContextError), second.scope():
        pass


@pytest.mark.asyncio
async def test_a_scope_cannot_be_entered_in_a_replica(bound: ar.Strategy) -> None:
    async def step() -> None:
        with pytest.raises(ContextError, match="replica"), bound.scope():
            pass
        with pytest.raises(ContextError, match="replica"), ar.DefaultStrategy().scope():
            pass

    await bound.run(step)


@pytest.mark.asyncio
async def test_not_in_an_update(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(0.0)

    def update(_variable: ar.Variable) -> None:
        with pytest.raises(ContextError, match="update of component"), pair.scope():
            pass

    await pair.extended.update(variable, update)


@pytest.mark.asyncio
async def test_in_a_merge_function_its_own_strategy_only(strategy: ar.Strategy) -> None:
    other = ar.MirroredStrategy(["cpu:6", "cpu:7"])

    def merge(current: ar.Strategy) -> None:
        with current.scope():
            assert ar.in_cross_replica_context()
        assert ar.in_cross_replica_context()
        with pytest.raises(ContextError, match="merge function"), other.scope():
            pass

    async def step() -> None:
        await ar.get_replica_context().merge_call(merge)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_left_in_another_context(strategy: ar.Strategy) -> None:
    scope = strategy.scope()
    copy_context().run(scope.__enter__)

    with pytest.raises(ContextError, match="another context"):
        scope.__exit__(None, None, None)
    assert ar.get_strategy() is not strategy


@pytest.mark.asyncio
async def test_left_in_another_task(strategy: ar.Strategy) -> None:
    scope = strategy.scope()

    async def enter() -> None:
        scope.__enter__()

    await asyncio.get_running_loop().create_task(enter())
    with pytest.raises(ContextError, match="another context"):
        scope.__exit__(None, None, None)


@pytest.mark.asyncio
async def test_scopes_of_concurrent_tasks_are_apart(
    pair: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    async def use(strategy: ar.Strategy) -> None:
        for _ in range(5):
            with strategy.scope():
                await asyncio.sleep(0)
                assert ar.get_strategy() is strategy

    await asyncio.gather(use(pair), use(solo), use(pair))


@pytest.mark.asyncio
async def test_an_error_inside_goes_through(strategy: ar.Strategy) -> None:
    with pytest.raises(ValueError, match="mine"), strategy.scope():
        raise ValueError("mine")
    assert ar.get_strategy() is not strategy


@pytest.mark.asyncio
async def test_variables_belong_to_the_strategy_of_their_scope(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        inside = ar.Variable(1.0)
    outside = ar.Variable(1.0)

    assert inside.strategy is gang
    assert gang.extended.variable_created_in_scope(inside)
    assert not gang.extended.variable_created_in_scope(outside)
    assert ar.get_strategy().extended.variable_created_in_scope(outside)
    assert not ar.get_strategy().extended.variable_created_in_scope(inside)
