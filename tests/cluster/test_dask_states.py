"""Calls of states on Dask: what travels, what comes back, and what is told of a lost server."""

from __future__ import annotations

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioreplica.cluster._dask_states import DaskHost, DaskState, _pickled
from aioreplica.devices.processes._parcel import SEPARATE_BYTES
from aioreplica.errors import WorkerLostError

pytest.importorskip("distributed")
pytestmark = pytest.mark.asyncio


class OddError(Exception):
    """Cannot be built anew from its message."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


class State:
    """Is called, on a server or in its place."""

    def joined(self, *parts: Any) -> Any:
        return [part() if callable(part) else part for part in parts]

    def refused(self) -> None:
        raise ValueError("no")

    def odd(self) -> None:
        raise OddError("odd", 7)


class Server:
    """Carries calls of a state out as a worker of Dask does, or fails to."""

    def __init__(self, failure: Exception | None = None, *, is_told: bool = False) -> None:
        self.loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        self.host = DaskHost(pickle.dumps((State, ())))
        self.failure, self.is_told = failure, is_told
        self.called: list[str] = []

    def rpc(self, address: str) -> Any:
        assert address == "there"
        return self

    async def actor_execute(self, *, actor: str, function: str, args: Any, kwargs: Any) -> Any:
        assert (actor, kwargs) == ("actor-1", {})
        self.called.append(function)
        if self.is_told:
            return {"status": "error", "exception": self.failure}
        if self.failure is not None:
            raise self.failure
        arrived = [getattr(each, "data", each) for each in args]  # marked, to be serialized
        return {"status": "OK", "result": getattr(self.host, function)(*arrived)}


class WorkersActor:
    """Stands for a state, on a worker."""

    _address, key = "there", "actor-1"

    def __init__(self, server: Server | None = None) -> None:
        self._worker = server

    def __reduce__(self) -> Any:
        return WorkersActor, ()


async def test_large_buffers_of_a_call_go_apart() -> None:
    small, large = np.arange(3.0), np.zeros(SEPARATE_BYTES, np.uint8)
    large.flags.writeable = False
    data, buffers = _pickled("joined", (small, large, large[::2], np.zeros(0)))
    assert [each.nbytes for each in buffers] == [SEPARATE_BYTES]
    method, (first, second, third, fourth) = pickle.loads(data, buffers=buffers)
    np.testing.assert_array_equal(first, small)
    assert (method, third.shape, fourth.shape) == ("joined", (SEPARATE_BYTES // 2,), (0,))
    assert (first.flags.writeable, second.flags.writeable) == (True, False)
    assert np.shares_memory(second, large)


@pytest.mark.parametrize("thing", [lambda: 7, type("Inner", (), {"__module__": "__main__"})])
async def test_what_the_other_process_cannot_import_goes_by_value(thing: Any) -> None:
    given = np.arange(3.0), np.ones(SEPARATE_BYTES), np.zeros(0)
    data, buffers = _pickled("joined", (*given, thing))
    method, arrived = pickle.loads(data, buffers=buffers)
    assert (method, arrived[3].__name__) == ("joined", thing.__name__)
    for one, other in zip(given, arrived, strict=False):
        np.testing.assert_array_equal(one, other)
    assert np.shares_memory(arrived[1], given[1])


async def test_a_call_from_a_worker_returns_raises_or_has_lost_its_server() -> None:
    server = Server()
    state = DaskState("owner", 3, WorkersActor(server))
    finish = state.begin("joined", np.ones(SEPARATE_BYTES), 5)
    ones, five = await asyncio.to_thread(finish)
    assert (float(ones.sum()), five) == (SEPARATE_BYTES, 5)
    with pytest.raises(ValueError, match="no"):
        await asyncio.to_thread(state.begin("refused"))
    assert server.called == ["call", "call"]
    for is_told in (False, True):
        lost = DaskState("owner", 3, WorkersActor(Server(OSError("gone"), is_told=is_told)))
        with pytest.raises(WorkerLostError, match="Parameter server 3 was lost: gone") as error:
            await asyncio.to_thread(lost.begin("joined"))
        assert error.value.ranks == (3,)
    with pytest.raises(WorkerLostError, match="server 3"):
        DaskState("owner", 3, WorkersActor()).begin("joined")


async def test_what_cannot_be_pickled_is_no_lost_server() -> None:
    server = Server()
    with pytest.raises(TypeError, match="lock"):
        DaskState("owner", 3, WorkersActor(server)).begin("joined", threading.Lock())
    assert server.called == []


async def test_an_error_that_cannot_be_built_anew_arrives_in_words() -> None:
    state = DaskState("owner", 3, WorkersActor(Server()))
    with pytest.raises(RuntimeError, match=r"OddError: odd 7 \(it cannot be pickled"):
        await asyncio.to_thread(state.begin("odd"))
    waited = await DaskHost(pickle.dumps((State, ()))).wait(pickle.dumps(("odd", ())))
    assert isinstance(waited.error, RuntimeError)
