"""SlotTable: slots are made once, beside their variable."""

from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.optimizers._slots import SlotTable, new_variable


def initial(name: str, variable: ar.Variable) -> Any:
    return np.full(variable.shape, {"m": 1.0, "v": 2.0}[name])


def test_slots_are_made_at_the_first_request() -> None:
    table, w = SlotTable(("m", "v")), ar.Variable([0.0, 0.0], name="w")
    assert table.find(w, "m") is None

    m, v = table.make(w, initial)

    assert table.make(w, initial) == (m, v)
    assert (table.find(w, "m"), table.find(w, "v")) == (m, v)
    assert (m.name, v.name) == ("w/m", "w/v")
    assert v.value.tolist() == [2.0, 2.0]
    assert len(table) == 1


def test_a_slot_of_an_unknown_name_is_none() -> None:
    table, w = SlotTable(("m", "v")), ar.Variable(0.0)
    assert table.find(w, "x") is None
    table.make(w, lambda name, variable: np.zeros(()))
    assert table.find(w, "x") is None
    assert SlotTable(()).find(w, "x") is None


def test_slots_of_two_optimizers_have_different_names(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w = ar.Variable(0.0, name="w")

    slots = [SlotTable(("m",)).make(w, initial)[0] for _ in range(2)]

    assert [slot.name for slot in slots] == ["w/m", "w/m_1"]


def test_a_new_variable_belongs_to_the_strategy(pair: ar.MirroredStrategy) -> None:
    value = np.zeros(2)
    ours, plain = new_variable(pair._runtime, value, "ours"), new_variable(None, value, "plain")

    assert (ours.strategy, len(ours.components)) == (pair, 2)
    assert (plain.strategy, len(plain.components)) == (None, 1)
    assert not ours.trainable
    value[:] = 1  # the variable has a copy
    assert ours.value.tolist() == plain.value.tolist() == [0.0, 0.0]
    assert not ours.value.flags.writeable


def test_what_an_optimizer_remembers_has_names(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        adam = ar.optimizers.Adam(loss_scale=ar.optimizers.DynamicLossScale(), measure_norm=True)
        sgd = ar.optimizers.SGD(0.1, loss_reduction="mean")

    assert adam.get_slot_names() == ["m", "v"]
    assert sgd.get_slot_names() == []
    non_slots = (adam.iterations, adam.skipped_steps, adam.gradient_norm)
    assert all(variable in {*map(id, adam.variables)} for variable in map(id, non_slots))
    assert adam.get_loss_reduction() is ar.ReduceOp.SUM
    assert sgd.get_loss_reduction() is ar.ReduceOp.MEAN
