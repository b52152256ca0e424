"""The strategies that `prepare` takes, and where it may be called."""

import sys
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import mirrored


def test_a_strategy_is_needed() -> None:
    with pytest.raises(TypeError, match=r"needs strategy=, such as an ar\.MirroredStrategy, got 3"):
        ar.prepare(None, None, [], strategy=3)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_replicas_prepare_nothing(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        ar.prepare(None, None, [], strategy=pair)

    with pytest.raises(ContextError, match="prepare is a cross-replica method"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_parameter_servers_have_no_replicas_that_meet() -> None:
    async with ar.ParameterServerStrategy(ar.cluster.LocalClosureEngine(num_workers=1)) as strategy:
        with pytest.raises(TypeError, match=r"no replicas that meet.*ar\.MirroredStrategy"):
            ar.prepare(None, None, [], strategy=strategy)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_torch_replicas", "_torch_batches", "_torch_random"):
        monkeypatch.delitem(sys.modules, f"aioreplica.autodiff.{name}", raising=False)
        monkeypatch.delattr(f"aioreplica.autodiff.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]

    def prepare() -> Any:
        return ar.prepare(None, None, [], strategy=mirrored(1))

    for name, call in (("prepare", prepare), ("no_sync", lambda: ar.no_sync(None))):
        with pytest.raises(ImportError, match=rf"^ar\.{name} needs the torch package") as caught:
            call()
        assert caught.value.name == "torch"
