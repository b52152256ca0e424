"""The store where workers of torch.distributed meet, without torch."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioreplica.cluster import ClusterResolver, _torch, _torch_reserves, _torch_transport
from aioreplica.cluster._engine import EngineCommunicator
from aioreplica.cluster._mpi import MpiCommunicator
from aioreplica.cluster._processes import ProcessId, require_own_program
from aioreplica.cluster._torch import TorchCommunicator
from aioreplica.cluster._torch_reserves import (
    Caller,
    Meeting,
    Questions,
    Reserves,
    Word,
    own_host_towards,
)
from aioreplica.cluster._torch_store import Store, StoreSilentError
from aioreplica.cluster._torch_transport import TorchTransport, changes_timeouts
from aioreplica.cluster._transport import Group, Link
from aioreplica.devices import CompletionQueue
from aioreplica.errors import ContextError, WorkerLostError
from tests.cluster.thread_engine import ThreadTransport, Wires, new_poller


@pytest.mark.asyncio
async def test_a_store_that_goes_while_workers_meet_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 has raised, while another one was still asking it who has come."""

    def meet(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    dist = SimpleNamespace(PrefixStore=lambda _prefix, store: store)
    monkeypatch.setattr(_torch, "import_torch", lambda: (None, dist))
    monkeypatch.setattr(_torch, "open_store", lambda *_: object())
    monkeypatch.setattr(_torch, "announce_reserve", lambda *_: None)
    monkeypatch.setattr(_torch, "meet", meet)
    resolver = ClusterResolver(task_id=1, num_workers=2, coordinator_address="127.0.0.1:1")

    with pytest.raises(WorkerLostError, match=r"store at 127.0.0.1:1.*\(Connection reset") as told:
        _torch.join(resolver, Caller(1.0, CompletionQueue.of_running_loop(), []))

    assert told.value.ranks == (0,)


def test_a_worker_that_is_cancelled_while_it_meets_the_others_is_connected_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those who came later waited for it for ever."""
    begun, goes_on, is_connected = (threading.Event() for _ in range(3))
    meeting: Any = SimpleNamespace(before=None)
    seen: list[tuple[Meeting, int]] = []

    def meet(_caller: Caller) -> Meeting:
        begun.set()
        assert goes_on.wait(60)
        return meeting

    def new_transport(met: Meeting, caller: Caller, _ring: Any) -> None:
        seen.append((met, len(caller.abandoned)))
        is_connected.set()

    async def main() -> None:
        connecting = asyncio.ensure_future(TorchCommunicator._made(meet, None))
        await asyncio.to_thread(begun.wait, 60)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    monkeypatch.setattr(_torch, "new_transport", new_transport)
    asyncio.run(main())
    goes_on.set()

    assert is_connected.wait(60)
    assert seen == [(meeting, 1)]


@pytest.mark.asyncio
@pytest.mark.parametrize("adapter", [MpiCommunicator, TorchCommunicator])
async def test_a_group_that_works_is_not_shrunk(adapter: type[EngineCommunicator]) -> None:
    """Gloo made another group, and the one that worked was of no use any more."""
    link = Link(ThreadTransport(Wires(1), 0), new_poller("worker:0", is_attempted=False))
    async with adapter(link, (0,), None) as alone:
        with pytest.raises(ContextError, match="nothing to shrink"):
            await alone.shrink()
        assert await alone.all_reduce(1) == 1


@pytest.mark.asyncio
async def test_a_store_that_was_given_back_refuses_calls_at_once() -> None:
    """A split may be closed after its group; the lane that tells the others serves all groups."""
    store = Store(None, CompletionQueue.of_running_loop(), answer_s=1e6)
    assert store.call(lambda: 3) == 3
    store.close()

    with pytest.raises(StoreSilentError, match="given back"):
        store.call(lambda: 3)


@pytest.mark.parametrize(
    ("address", "rank", "own"),
    [
        ("a.cluster:2222", 0, "a.cluster"),  # where the others have found it
        ("127.0.0.1:2222", 1, "127.0.0.1"),
        ("a.cluster:2222", 1, "a.cluster"),  # this host, whose name is one of itself alone
    ],
)
def test_a_worker_tells_the_others_an_address_that_they_reach(
    monkeypatch: pytest.MonkeyPatch, address: str, rank: int, own: str
) -> None:
    found = _torch_reserves._addresses("127.0.0.1", 2222)
    monkeypatch.setattr(_torch_reserves, "_addresses", lambda *_: found)

    assert own_host_towards(address, rank) == own


@pytest.mark.asyncio
async def test_who_waits_for_others_to_connect_a_split_asks_whether_they_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, gone, asked = [0.0], set[int](), list[int]()

    def word(_: Questions, rank: int) -> Word:
        asked.append(rank)
        return Word(is_gone=rank in gone)

    monkeypatch.setattr(_torch_transport, "monotonic", lambda: now[0])
    monkeypatch.setattr(Questions, "word", word)
    monkeypatch.setattr(TorchTransport, "_connecting", lambda *_: SimpleNamespace(is_done=False))
    monkeypatch.setattr(TorchTransport, "end", lambda _: None)
    transport = object.__new__(TorchTransport)
    transport._gloo, transport._is_open, transport._dist = {}, True, None  # type: ignore[assignment]
    transport._reserves = Reserves("g", ["a:1", "b:1", "c:1", "d:1"])
    transport._completions = CompletionQueue.of_running_loop()
    poll = transport._exchange(Group(0, (0, 1, 3), "/0,1,3.0"), lambda _gloo: None)

    for now[0] in (0.5, 1.0, 1.5, 2.0):
        assert not poll()
    assert asked == [1, 3] * 2  # not always
    gone.update((2, 3))
    now[0] = 3.0
    with pytest.raises(WorkerLostError) as lost:
        poll()

    assert lost.value.ranks == (3,)
    failure = transport.explain(lost.value, "barrier #0")
    assert failure is not None
    assert failure.ranks == (3,)
    assert failure.text.startswith("Worker 3 is gone; noticed in barrier #0: ")


@pytest.mark.asyncio
async def test_a_process_waits_at_its_end_for_connections_that_are_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter aborts a thread that comes back from there when it has ended."""
    at_exit, gate = list[Callable[[], None]](), threading.Event()

    class Groups(list[object]):
        def clear(self) -> None:
            assert gate.wait(60)
            super().clear()

    groups = Groups(["a group"])
    handlers = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(_torch_transport, "atexit", handlers)
    monkeypatch.setattr(_torch_transport, "EXIT_S", 60.0)
    monkeypatch.setattr(TorchTransport, "_let_go", lambda _: groups)
    transport = object.__new__(TorchTransport)
    transport._pid, transport._completions = os.getpid(), CompletionQueue.of_running_loop()

    transport.end()
    (wait,) = at_exit
    gate.set()
    wait()

    assert groups == at_exit == []


def test_an_unknown_name_leads_nowhere() -> None:
    assert _torch_reserves._addresses("no such host.invalid", 1) == []


def test_reserves_follow_the_workers_that_are_left() -> None:
    processes = [ProcessId("here", number, "1") for number in range(3)]
    reserves = Reserves("g", ["a:1", "b:1", "c:1"], processes, 4, rank=2, lost={1})

    after = reserves.after([0, 2], "h")

    assert after == Reserves("h", ["a:1", "c:1"], [processes[0], processes[2]], 5, rank=1)
    assert Reserves.decode(after.encode().encode()) == Reserves(
        "h", after.addresses, after.processes, 5
    )
    reserves.become(after, 1)
    assert reserves == after
    assert reserves.place == "aioreplica/h/5"


@pytest.mark.parametrize(
    ("version", "can"), [("2.7.1", False), ("2.13.0+cpu", True), ("3.0.0a0+git1", True)]
)
def test_only_a_newer_torch_changes_the_timeout_of_a_group(version: str, can: bool) -> None:
    assert changes_timeouts(version) is can


@pytest.mark.parametrize("argv", [[], [""], ["-"]])
def test_what_has_no_program_cannot_be_started_once_more(
    monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", argv)

    with pytest.raises(ContextError, match=r"which has no program.*into a file"):
        require_own_program("grow")
