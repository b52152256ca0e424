"""ReduceOp and VariableAggregation: a member or its name in any case."""

import pickle
from typing import Any

import pytest

import aioreplica as ar


def test_the_operators() -> None:
    assert [op.name for op in ar.ReduceOp] == ["SUM", "MEAN", "MIN", "MAX"]


@pytest.mark.parametrize("op", list(ar.ReduceOp))
def test_parse_takes_a_member_or_its_name_in_any_case(op: ar.ReduceOp) -> None:
    for given in (op, op.name, op.name.lower(), op.name.title()):
        assert ar.ReduceOp.parse(given) is op


@pytest.mark.parametrize("name", ["", "median", " sum", "ReduceOp.SUM"])
def test_an_unknown_name_lists_the_legal_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"SUM, MEAN, MIN, MAX") as caught:
        ar.ReduceOp.parse(name)

    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("bad", [None, 0, b"sum", sum, ar.VariableAggregation.SUM])
def test_a_value_other_than_a_name_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match="ReduceOp"):
        ar.ReduceOp.parse(bad)


@pytest.mark.parametrize("op", list(ar.ReduceOp))
def test_pickling_keeps_the_identity(op: ar.ReduceOp) -> None:
    assert pickle.loads(pickle.dumps(op)) is op


LEGAL = ["none", "sum", "mean", "only_first_replica"]


def test_the_members() -> None:
    assert [member.name.lower() for member in ar.VariableAggregation] == LEGAL


@pytest.mark.parametrize("member", list(ar.VariableAggregation))
def test_an_aggregation_is_a_member_or_its_name_in_any_case(member: ar.VariableAggregation) -> None:
    for given in (member, member.name, member.name.lower(), member.name.title()):
        assert ar.VariableAggregation.parse(given, "w") is member


@pytest.mark.parametrize("bad", ["", "median", "first", 3, ar.ReduceOp.SUM])
def test_anything_else_names_the_variable_and_the_legal_values(bad: Any) -> None:
    with pytest.raises(ValueError, match="'weights'") as caught:
        ar.VariableAggregation.parse(bad, "weights")

    assert all(repr(name) in str(caught.value) for name in LEGAL)


@pytest.mark.parametrize("member", list(ar.VariableAggregation))
def test_pickling_keeps_the_identity_of_an_aggregation(member: ar.VariableAggregation) -> None:
    assert pickle.loads(pickle.dumps(member)) is member
