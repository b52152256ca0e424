"""The store where workers of torch.distributed meet, without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aioreplica.cluster import ClusterResolver, _torch
from aioreplica.cluster._torch_store import Store, StoreSilentError
from aioreplica.devices import CompletionQueue
from aioreplica.errors import WorkerLostError


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
        _torch.join(resolver, 1.0, CompletionQueue.of_running_loop(), [])

    assert told.value.ranks == (0,)


@pytest.mark.asyncio
async def test_a_store_that_was_given_back_refuses_calls_at_once() -> None:
    """A split may be closed after its group; the lane that tells the others serves all groups."""
    store = Store(None, CompletionQueue.of_running_loop(), answer_s=1e6)
    assert store.call(lambda: 3) == 3
    store.close()

    with pytest.raises(StoreSilentError, match="given back"):
        store.call(lambda: 3)
