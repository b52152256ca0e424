"""Variables in expressions: comparisons, truth, numbers, formats, copies, constraints, lives."""

import asyncio
import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.values import WeakVariableDict

# ---- comparing ---------------------------------------------------------------------------------


def test_equality_is_elementwise() -> None:
    v, w = ar.Variable([1.0, 2.0]), ar.Variable([1.0, 3.0])

    assert (v == w).tolist() == [True, False]
    assert (v != w).tolist() == [False, True]
    assert (v == [1.0, 5.0]).tolist() == [True, False]
    assert (v == [1.0, 5.0]).tolist() == [True, False]
    assert (np.array([0.0, 2.0]) == v).tolist() == [False, True]
    assert bool(ar.Variable(2.0) == 2)


def test_a_variable_is_never_none() -> None:
    v = ar.Variable([1.0, 2.0])
    assert (v == None) is False  # noqa: E711 - that is the point
    assert (v != None) is True  # noqa: E711
    assert None not in [v]


def test_sets_and_dicts_tell_variables_apart_by_identity() -> None:
    v, w = ar.Variable([1.0, 2.0]), ar.Variable([1.0, 2.0])

    assert len({v, w, v}) == 2
    assert {v: "v", w: "w"}[w] == "w"
    assert hash(v) != hash(w)


def test_membership_of_a_list_is_ambiguous() -> None:
    v, w = ar.Variable([1.0, 2.0]), ar.Variable([1.0, 2.0])

    assert v in [v, w]  # the same object is found before anything is compared
    with pytest.raises(ValueError, match="ambiguous"):
        _ = w in [v, w]


# ---- as a number -------------------------------------------------------------------------------


def test_a_scalar_is_a_number() -> None:
    loss = ar.Variable(1.25)

    assert (int(loss), float(loss), complex(loss), bool(loss)) == (1, 1.25, 1.25 + 0j, True)
    assert (f"{loss:.1f}", f"{loss}", str(loss)) == ("1.2", "1.25", repr(loss))
    assert not ar.Variable(0)


def test_a_variable_of_several_numbers_is_not_a_number() -> None:
    v = ar.Variable([1.0, 2.0])

    for convert in (int, float, complex):
        with pytest.raises(TypeError):
            convert(v)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(v)
    with pytest.raises(TypeError, match="format"):
        f"{v:.1f}"
    assert f"{v}" == repr(v)


# ---- rows --------------------------------------------------------------------------------------


def test_rows_are_those_of_the_value() -> None:
    v = ar.Variable([[1.0, 2.0], [3.0, 4.0]])

    assert [row.tolist() for row in v] == [[1.0, 2.0], [3.0, 4.0]]
    assert [row.tolist() for row in reversed(v)] == [[3.0, 4.0], [1.0, 2.0]]
    a, b = v
    assert (a + b).tolist() == [4.0, 6.0]
    assert 3.0 in v
    assert 5.0 not in v
    assert ar.Variable(4.0) in v


def test_a_scalar_has_no_rows() -> None:
    v = ar.Variable(3.0)

    for fn in (list, sum, reversed):
        with pytest.raises(TypeError, match=r"0-d array|unsized"):
            fn(v)
    assert 3.0 in v


@pytest.mark.asyncio
async def test_rows_that_are_read_in_a_loop_are_of_one_version(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        v = ar.Variable([1.0, 2.0, 3.0])
    for order, expected in ((iter, [1.0, 2.0, 3.0]), (reversed, [3.0, 2.0, 1.0])):
        await v.assign([1.0, 2.0, 3.0])
        seen = []
        for row in order(v):
            seen.append(float(row))
            await v.assign_add([10.0, 10.0, 10.0])
        assert seen == expected


# ---- writing -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, 2**20], ids=["small", "on the host"])
async def test_a_write_gives_the_new_value(strategy: ar.Strategy, size: int) -> None:
    with strategy.scope():
        variable = ar.Variable(np.ones(size), aggregation="sum")
    count = strategy.num_replicas_in_sync

    assert (await variable.assign(np.full(size, 2.0))) is variable.value
    assert (await variable.assign_add(np.ones(size)))[0] == 3.0

    async def step() -> Any:
        new = await variable.assign_sub(np.ones(size))
        return new is variable.value, new[0]

    results = await strategy.run(step)
    assert strategy.local_results(results) == ((True, 3.0 - count),) * count


@pytest.mark.asyncio
async def test_an_on_read_write_gives_the_own_component(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        total = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
        silent = ar.Variable(0.0, synchronization="on_read")

    async def step(x: float) -> Any:
        return await total.assign_add(x), await silent.assign(x)

    own, _ = await pair.run(step, args=(ar.PerReplica([1.0, 2.0]),))

    assert own.values == (1.0, 2.0)
    assert await total.assign_add(4.0) == 7.0
    assert await silent.assign(5.0) == 5.0


@pytest.mark.asyncio
async def test_a_write_in_an_update_gives_the_staged_component(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(1.0)

    async def add(v: ar.Variable) -> Any:
        return await v.assign_add(1.0), v.value

    results = await pair.extended.update(variable, add)
    assert results.values == ((2.0, 2.0),) * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, 2**20], ids=["small", "on the host"])
async def test_writes_at_the_same_time_all_count(pair: ar.MirroredStrategy, size: int) -> None:
    with pair.scope():
        variable = ar.Variable(np.zeros(size))

    await asyncio.gather(*(variable.assign_add(np.ones(size)) for _ in range(4)))

    assert variable.value[0] == 4.0
    assert variable.version == 4


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_deep_copy_is_a_variable_of_its_own(strategy: ar.Strategy) -> None:
    with strategy.scope():
        model = {"w": ar.Variable([1.0, 2.0], name="w", constraint=np.abs), "again": None}
    model["again"] = model["w"]

    twin = copy.deepcopy(model)
    await twin["w"].assign([5.0, 6.0])

    assert twin["again"] is twin["w"]
    assert model["w"].value.tolist() == [1.0, 2.0]
    assert twin["w"].value.tolist() == [5.0, 6.0]
    assert twin["w"].strategy is model["w"].strategy
    assert (type(twin["w"]), twin["w"].constraint) == (type(model["w"]), np.abs)
    if not isinstance(strategy, ar.DefaultStrategy):
        assert twin["w"].name == "w_1"


def test_a_deep_copy_keeps_every_component() -> None:
    with ar.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        total = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
    total.store.write({total: (np.array(1.0), np.array(2.0))})

    assert copy.deepcopy(total).components == (1.0, 2.0)


@pytest.mark.asyncio
async def test_a_replica_cannot_copy_a_variable(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(0.0)

    async def step() -> None:
        copy.deepcopy(variable)

    with pytest.raises(ContextError, match=r"await ctx\.variable"):
        await pair.run(step)


def test_shallow_copies_and_pickles_are_errors_with_advice() -> None:
    variable = ar.Variable([1.0], name="w")

    with pytest.raises(TypeError, match=r"'w' cannot be shallow-copied.*copy\.deepcopy"):
        copy.copy(variable)
    with pytest.raises(TypeError, match=r"'w' cannot be pickled.*np\.asarray\(variable\)"):
        pickle.dumps(variable)


# ---- constraints -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_constraint_is_kept_for_optimizers(strategy: ar.Strategy) -> None:
    with strategy.scope():
        variable = ar.Variable([-1.0], constraint=np.abs)

    assert variable.constraint is np.abs
    assert ar.Variable(0.0).constraint is None
    assert (await variable.assign([-2.0])).tolist() == [-2.0]  # writes of one's own are left alone
    with pytest.raises(TypeError, match="constraint of a variable must be a function, got 3"):
        ar.Variable(0.0, constraint=3)  # type: ignore[arg-type]


# ---- lives -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_variable_that_the_program_drops_is_freed(strategy: ar.Strategy) -> None:
    with strategy.scope():
        kept = ar.Variable(0.0, name="kept")
        dropped = [weakref.ref(ar.Variable(float(i), name=f"v{i}")) for i in range(100)]

    await kept.assign(1.0)
    gc.collect()

    assert [ref() for ref in dropped] == [None] * 100
    if not isinstance(strategy, ar.DefaultStrategy):
        assert len(strategy._runtime.variable_table) == 1
        assert list(map(id, strategy.snapshot())) == [id(kept)]


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_variables_made_in_steps_do_not_pile_up(pair: ar.MirroredStrategy) -> None:
    async def step() -> float:
        context = ar.get_replica_context()
        assert context is not None
        made = await context.variable(np.ones(4), name="scratch")
        return float(made.value[0])

    for _ in range(5):
        await pair.run(step)
        gc.collect()

    assert len(pair._runtime.variable_table) == 0


def test_variables_are_listed_in_order_of_creation() -> None:
    strategy = ar.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        first, second, third = (ar.Variable(0.0) for _ in range(3))
    assert list(map(id, strategy.trainable_variables)) == list(map(id, (first, second, third)))

    del second
    assert list(map(id, strategy.trainable_variables)) == [id(first), id(third)]


def test_a_cell_that_runs_again_may_use_the_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    strategy = ar.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        old = ar.Variable(1.0, name="w")
        new = ar.Variable(2.0, name="w")

    assert (old.name, new.name) == ("w_1", "w")
    del old
    with strategy.scope():
        newest = ar.Variable(3.0, name="w")
    assert (new.name, newest.name) == ("w_1", "w")
    assert len(strategy._runtime.variable_table) == 2


def test_entries_of_a_weak_dict_go_with_their_variables() -> None:
    v, w = ar.Variable([1.0, 2.0]), ar.Variable([1.0, 2.0])
    found: WeakVariableDict[str] = WeakVariableDict()
    found[v], found[w] = "v", "w"
    found[v] = "again"

    assert (found.get(v), found.get(w), v in found, len(found)) == ("again", "w", True, 2)
    assert (list(map(id, found)), found.values()) == ([id(v), id(w)], ["again", "w"])

    del v
    gc.collect()
    assert (len(found), found.values()) == (1, ["w"])
    assert found.get(ar.Variable(0.0)) is None
