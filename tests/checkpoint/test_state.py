"""What a state consists of: walked once, and again when something else is in it."""

import asyncio
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import DescribedState
from aioreplica.checkpoint._state import read_state
from aioreplica.optimizers import Adam


class Counter:
    """An object that says anew what it consists of each time."""

    def __init__(self) -> None:
        self.count = 0

    def checkpoint_entries(self) -> dict[tuple[None, str], Any]:
        return {(None, f"{'count'}.{0}"): {"count": self.count}}


Change = Callable[[dict[str, Any]], Any]


def new_state() -> dict[str, Any]:
    w = ar.Variable(np.zeros(3))
    return {
        "model": [w, {"b": ar.Variable(1.0)}],
        "user": UserDict({"c": ar.Variable(2.0)}),
        "optimizer": Adam(0.1),
        "metric": ar.metrics.Mean(),
        "rng": np.random.default_rng(0),
        "array": np.zeros(2),
        "plain": {"epoch": 3, "inner": [1, (2, [3])]},
        "empty": [],
        "number": 7,
    }


def step(state: dict[str, Any]) -> None:
    w = state["model"][0]
    optimizer = state["optimizer"]
    apply = optimizer.blocking.apply_gradients
    asyncio.run(ar.get_strategy().run(lambda: apply([(np.ones(3), w)])))


def taken(state: Any) -> list[Any]:
    found = read_state(state)
    return [
        (e.key, id(e.thing), id(e.container), e.index, id(e.owner), e.part, e.object)
        for e in found.entries.values()
    ]


CHANGES: dict[str, Change] = {
    "another variable in a list": lambda s: s["model"].append(ar.Variable(0.0)),
    "a variable replaced": lambda s: s["model"].__setitem__(0, ar.Variable(np.zeros(3))),
    "a variable in a dict": lambda s: s["model"][1].update(d=ar.Variable(0.0)),
    "another name": lambda s: s["model"][1].update(d=s["model"][1].pop("b")),
    "another mapping": lambda s: s.update(user=OrderedDict(s["user"])),
    "a mapping of the user": lambda s: s["user"].update(d=ar.Variable(0.0)),
    "a variable in a plain list": lambda s: s["empty"].append(ar.Variable(0.0)),
    "a variable in a plain dict": lambda s: s["plain"].update(v=ar.Variable(0.0)),
    "a variable deep in plain data": lambda s: s["plain"]["inner"].append([ar.Variable(0.0)]),
    "another number": lambda s: s.update(number=8),
    "another array": lambda s: s.update(array=np.zeros(2)),
    "an optimizer replaced": lambda s: s.update(optimizer=Adam(0.1)),
    "slots that a step makes": step,
    "one entry less": lambda s: s.pop("rng"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_come_or_gone_is_found(change: Change) -> None:
    state = new_state()
    described = DescribedState(state)
    before = described.read()
    assert described.read() is before
    change(state)
    assert described.read() is not before
    assert taken(described) == taken(state)
    assert described.read() is described.read()


def test_new_values_in_old_places_need_no_walk() -> None:
    state = new_state()
    step(state)
    described = DescribedState(state)
    before = described.read()
    step(state)
    state["array"][:] = 7.0
    state["plain"]["epoch"] = 4
    state["plain"]["inner"].append([5])
    state["empty"] += [1.5, None]
    state["rng"].random()
    assert described.read() is before
    assert taken(described) == taken(state)


def test_a_state_that_cannot_be_saved_any_more_is_refused_each_time() -> None:
    state = new_state()
    described = DescribedState(state)
    described.read()
    state["plain"]["thing"] = object()
    for _ in range(2):
        with pytest.raises(TypeError, match="'plain/thing' in the state"):
            described.read()
    del state["plain"]["thing"]
    assert taken(described) == taken(state)


def test_objects_that_make_their_parts_anew_are_looked_into_each_time() -> None:
    counter = Counter()
    described = DescribedState({"counter": counter})
    for count in range(20):
        counter.count = count
        [entry] = described.read().entries.values()
        assert (entry.key, entry.thing) == ("counter/count.0", {"count": count})
