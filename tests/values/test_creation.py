"""Variable creators: functions that make the variables of a strategy."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import mirrored


def renaming(suffix: str, seen: list[str]) -> Any:
    def create(next_creator: Any, **options: Any) -> ar.Variable:
        name = options.pop("name", None) or "w"
        seen.append(f"{suffix} {name}")
        made: ar.Variable = next_creator(**options, name=f"{name}.{suffix}")
        return made

    return create


def test_the_innermost_creator_is_called_and_calls_the_next() -> None:
    strategy, seen = mirrored(2), []  # type: ignore[var-annotated]
    with strategy.scope():
        with strategy.extended.variable_creator_scope(renaming("outer", seen)):
            with strategy.extended.variable_creator_scope(renaming("inner", seen)):
                both = ar.Variable([1.0], trainable=False)
            one = ar.Variable(1.0, name="v")
        none = ar.Variable(1.0, name="u")

    assert (both.name, one.name, none.name) == ("w.inner.outer", "v.outer", "u")
    assert seen == ["inner w", "outer w.inner", "outer v"]
    assert isinstance(both, ar.MirroredVariable)
    assert not both.trainable


def test_a_creator_is_called_for_a_value_that_is_named() -> None:
    strategy, seen = mirrored(2), []  # type: ignore[var-annotated]
    with strategy.scope(), strategy.extended.variable_creator_scope(renaming("x", seen)):
        made = ar.Variable(initial_value=[1.0, 2.0], name="w")
        with pytest.raises(TypeError, match="multiple values for argument 'initial_value'"):
            ar.Variable(1.0, initial_value=2.0)  # type: ignore[misc]  # pyright: ignore[reportCallIssue]

    assert (made.name, made.value.tolist(), seen) == ("w.x", [1.0, 2.0], ["x w"])


def test_a_creator_is_for_its_strategy_alone() -> None:
    strategy, seen = mirrored(2), []  # type: ignore[var-annotated]
    with strategy.extended.variable_creator_scope(renaming("x", seen)):
        ar.Variable(1.0)
        with mirrored(1).scope():
            ar.Variable(1.0)
    assert seen == []

    with ar.get_strategy().extended.variable_creator_scope(renaming("x", seen)):
        assert ar.Variable(1.0, name="w").name == "w.x"


def test_a_creator_may_call_the_factory_itself() -> None:
    strategy = mirrored(2)

    def halved(_next_creator: Any, *, initial_value: Any, **options: Any) -> ar.Variable:
        return ar.Variable(initial_value, dtype=np.float32, **options)

    with strategy.scope(), strategy.extended.variable_creator_scope(halved):
        assert ar.Variable(1.0).dtype == np.float32


@pytest.mark.asyncio
async def test_slots_and_counters_are_not_theirs(pair: ar.MirroredStrategy) -> None:
    seen: list[str] = []
    with pair.scope(), pair.extended.variable_creator_scope(renaming("x", seen)):
        w, adam = ar.Variable(1.0, name="w"), ar.optimizers.Adam(0.1)
        await adam.distributed_apply([(1.0, w)])
        made = await pair.run(creating, args=("in a step",))

    assert seen == ["x w", "x in a step"]
    assert made.name == "in a step.x"
    assert adam.get_slot(w, "m") is not None


async def creating(name: str) -> ar.Variable:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return await ctx.variable(1.0, name=name)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_models_are_made_by_them(library: str) -> None:
    module, strategy, seen = pytest.importorskip(library), mirrored(2), []  # type: ignore[var-annotated]
    with strategy.scope(), strategy.extended.variable_creator_scope(renaming("x", seen)):
        if library == "torch":
            ar.autodiff.torch_module(module.nn.BatchNorm1d(2), name="m")
        else:
            ar.autodiff.jax_variables({"w": module.numpy.ones(2)}, name="m")

    assert seen[0] in ("x m/weight", "x m/w")
    assert len(seen) == (5 if library == "torch" else 1)


async def later(next_creator: Any, **options: Any) -> Any: ...


def test_what_is_no_creator_is_refused() -> None:
    strategy = mirrored(2)
    for wrong in (3, later):
        with pytest.raises(TypeError, match="takes a plain function that makes variables"):
            strategy.extended.variable_creator_scope(wrong).__enter__()  # type: ignore[arg-type]
    wrong = strategy.extended.variable_creator_scope(lambda _, **options: 3)  # type: ignore[arg-type, return-value]
    text = r"returned 3 \(int\)\. Return what next_creator"
    with strategy.scope(), wrong, pytest.raises(TypeError, match=text):
        ar.Variable(1.0)


def test_keywords_that_are_unknown_name_the_factory() -> None:
    with pytest.raises(
        TypeError, match=r"^ar\.Variable\(\) got an unexpected keyword .*'trainabel'"
    ):
        ar.Variable(1.0, trainabel=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"^ar\.Variable\(\) missing 1 required .*'initial_value'"):
        ar.Variable()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_scopes_are_left_outside_of_blocks_that_were_entered_in_them() -> None:
    strategy = mirrored(2)
    for enter, name in (
        (lambda: ar.device("cpu:1"), r"ar\.device"),
        (lambda: strategy.extended.variable_creator_scope(renaming("x", [])), "variable_creator"),
    ):
        block: Any = enter()
        scope = strategy.scope()
        scope.__enter__()
        block.__enter__()
        with pytest.raises(ContextError, match=f"was left inside a block of {name}"):
            scope.__exit__(None, None, None)
        assert not ar.has_strategy()
        block.__exit__(None, None, None)


def test_an_error_of_the_program_comes_first() -> None:
    block, scope = ar.device("cpu:1"), mirrored(2).scope()
    scope.__enter__()
    block.__enter__()
    scope.__exit__(KeyError, KeyError(), None)
    assert not ar.has_strategy()
    block.__exit__(None, None, None)
