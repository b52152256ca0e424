"""The state of a parameter server, without any engine: events in, arrays out."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.optimizers import Optimizer, recipe_of
from aioreplica.strategies.parameter_server._messages import (
    Count,
    Gradient,
    Key,
    NewShard,
    Pull,
    Stamp,
    Write,
)
from aioreplica.strategies.parameter_server._server import ParameterServer

W: Key = (1, 0)
ITERATIONS: Key = (9, 0)


def new_server(value: Any = 0.0, **options: Any) -> ParameterServer:
    server = ParameterServer(0, **options)
    server.create([
        NewShard(W, np.array(value, float), "w", True, None),
        NewShard(ITERATIONS, np.int64(0), "iterations", False, None),
    ])  # fmt: skip
    return server


def learn(server: ParameterServer, optimizer: Optimizer, version: int = 0) -> None:
    """Take settings that the closure of the same number is the first to have."""
    recipe = pickle.dumps(recipe_of(optimizer, []))
    server.learn(ITERATIONS[0], recipe, version, closure=version)


def value_of(server: ParameterServer, key: Key = W) -> Any:
    [(_, value)] = server.pull([Pull(key)])
    assert value is not None
    return value.tolist()


def add(ordinal: int, amount: Any = 1.0) -> Write:
    return Write(W, ordinal, "assign_add", np.array(amount))


def halved(iteration: int) -> float:
    return 0.5 if iteration == 0 else 0.25


def gradient(ordinal: int, amount: Any, iteration: int | None = 0, **more: Any) -> Gradient:
    given: dict[str, Any] = {"read_version": None, **more}
    return Gradient(W, ordinal, ITERATIONS[0], np.array(amount, float), iteration, **given)


def test_a_push_that_comes_again_is_dropped() -> None:
    server = new_server()
    server.push(Stamp(0, 4, 0, attempt="a"), [add(0), add(1)])
    server.push(Stamp(0, 4, 0, attempt="b"), [add(0), add(1), add(2)])
    report = server.report(0)
    assert value_of(server) == 3.0
    assert (report.pushes, report.dropped, report.retries) == (3, 2, 1)


def test_new_settings_of_an_optimizer_leave_its_slots() -> None:
    server, plain, velocity = new_server(), 0.0, 0.0
    for number, rate in enumerate((0.1, 0.2)):
        learn(server, ar.optimizers.SGD(rate, momentum=0.5), number)
        server.push(Stamp(0, number, 0), [gradient(0, 1.0, number, recipe=number)])
        velocity = 0.5 * velocity + 1.0
        plain -= rate * velocity
    np.testing.assert_allclose(value_of(server), plain)


def test_a_closure_that_is_over_pushes_nothing_more() -> None:
    server = new_server()
    server.push(Stamp(0, 4, 0), [add(0)])
    server.push(Stamp(0, 7, 6), [add(0)])  # says that everything below 6 is over
    server.push(Stamp(0, 4, 0), [add(0), add(1)])  # a worker that was thought dead
    assert value_of(server) == 2.0
    assert server.report(8).dropped == 2
    server.push(Stamp(0, 7, 6), [add(1)])
    assert value_of(server) == 2.0


def test_after_a_restore_pushes_of_before_are_dropped() -> None:
    server = new_server()
    server.load({W: np.array(5.0)}, {}, 1, 0)
    server.push(Stamp(0, 3, 0), [add(0)])
    server.push(Stamp(1, 3, 0), [add(0)])
    assert value_of(server) == 6.0


def test_a_pull_sends_nothing_that_is_known() -> None:
    server = new_server([1.0, 2.0, 3.0])
    [(version, value)] = server.pull([Pull(W)])
    assert server.pull([Pull(W, version)]) == [(version, None)]
    server.push(Stamp(0, 1, 0), [add(0, [1.0, 1.0, 1.0])])
    [(newer, whole)] = server.pull([Pull(W, version)])
    assert newer > version
    assert whole is not None
    assert whole.tolist() == [2.0, 3.0, 4.0]
    assert value is not None
    assert value.tolist() == [1.0, 2.0, 3.0]  # what was sent does not change
    [(_, rows)] = server.pull([Pull(W, newer, rows=np.array([2, 0]))])
    assert rows is not None
    assert rows.tolist() == [4.0, 2.0]


def test_the_count_of_the_same_push_numbers_its_gradients() -> None:
    server = new_server(1.0)
    learn(server, ar.optimizers.SGD(halved))
    for closure in range(2):
        stamp = Stamp(0, closure, 0)
        counts = server.push(stamp, [Count(ITERATIONS, 0), gradient(0, 1.0, None)])
        assert counts == {ITERATIONS: closure + 1}
    assert value_of(server) == 0.25


def test_gradients_that_are_too_old_are_dropped_and_counted() -> None:
    server = new_server(0.0, max_staleness=1)
    learn(server, ar.optimizers.SGD(1.0))
    [(version, _)] = server.pull([Pull(W)])
    for closure in range(3):
        server.push(Stamp(0, closure, 0), [gradient(0, -1.0, read_version=version)])
    report = server.report(0)
    assert value_of(server) == 2.0
    assert (report.stale, report.max_staleness, report.staleness_sum) == (1, 2, 1)


def test_slots_come_back_with_their_optimizer_and_are_forgotten_without() -> None:
    server = new_server(1.0)
    learn(server, ar.optimizers.SGD(1.0, momentum=0.5))
    server.push(Stamp(0, 0, 0), [gradient(0, 1.0)])
    [(key, slot, *_)] = server.slots()
    assert (key, slot) == (W, (ITERATIONS[0], "momentum"))
    [(_, kept)] = server.pull([Pull(W, slot=slot)])
    assert kept is not None
    server.load({W: np.array(0.0)}, {(W, ITERATIONS[0]): {"momentum": np.array(2.0)}}, 1, 0)
    server.push(Stamp(1, 1, 0), [gradient(0, 1.0)])
    assert value_of(server) == -2.0  # 2 * 0.5 + 1
    server.load({W: np.array(0.0)}, {}, 2, 0)
    assert [slot for _, slot, *_ in server.slots()] == [(ITERATIONS[0], "momentum")]
    server.load({W: np.array(0.0)}, {}, 3, 0, ITERATIONS[:1])
    assert server.slots() == []


def test_slots_wait_for_their_optimizer() -> None:
    server = new_server(0.0)
    server.load({W: np.array(0.0)}, {(W, ITERATIONS[0]): {"momentum": np.array(2.0)}}, 1, 0)
    learn(server, ar.optimizers.SGD(1.0, momentum=0.5))
    server.push(Stamp(1, 1, 0), [gradient(0, 1.0)])
    assert value_of(server) == -2.0


def test_new_settings_leave_the_slots() -> None:
    server = new_server(0.0)
    learn(server, ar.optimizers.SGD(1.0, momentum=0.5))
    server.push(Stamp(0, 0, 0), [gradient(0, 1.0)])
    learn(server, ar.optimizers.SGD(10.0, momentum=0.5), 1)
    server.push(Stamp(0, 1, 0), [gradient(0, 1.0, recipe=1)])
    assert value_of(server) == -16.0


def test_closures_of_before_have_the_settings_of_before() -> None:
    server = new_server(0.0)
    for version, rate in enumerate((1.0, 10.0, 100.0)):
        learn(server, ar.optimizers.SGD(rate), version)
    for closure in (2, 0, 1):
        server.push(Stamp(0, closure, 0), [gradient(0, 1.0, recipe=closure)])
    assert value_of(server) == -111.0
    server.report(1)
    assert len(server._former) == 1
    server.report(2)
    assert len(server._former) == 0


def test_closures_that_are_over_write_nothing_whatever_their_number() -> None:
    server = new_server()
    server.report(3, (5, 6, 2))
    for closure in (2, 5, 6):
        server.push(Stamp(0, closure, 0), [Write(W, 0, "assign_add", np.ones(()))])
    assert server.report(3).dropped == 3
    server.push(Stamp(0, 4, 0), [Write(W, 0, "assign_add", np.ones(()))])
    assert server.report(7).pushes == 1


def test_a_closure_that_has_finished_pushes_nothing_more_while_an_older_one_runs() -> None:
    server = new_server()
    server.push(Stamp(0, 5, 3, attempt="a"), [add(0)])
    server.report(3, finished=(5,))
    server.push(Stamp(0, 5, 3, attempt="b"), [add(0), add(1)])
    server.push(Stamp(0, 6, 3, is_over=True), [add(0)])  # made again, though that was not told
    assert value_of(server) == 1.0
    assert server.report(3).dropped == 3


def test_what_a_closure_took_is_the_same_when_it_is_made_again() -> None:
    server = new_server()
    stamp = Stamp(0, 5, 3)
    first = [server.take(stamp, 1, 1, 0, ordinal, 0, None) for ordinal in range(2)]
    again = [server.take(stamp._replace(is_over=True), 1, 1, 0, i, 0, None) for i in range(3)]
    assert again == [*first, None]
    assert server.take(Stamp(0, 4, 3), 1, 1, 0, 0, 0, None) == (0, 2)
    server.report(3, finished=(5,))
    assert server.take(stamp, 1, 1, 0, 1, 0, None) == first[1]
