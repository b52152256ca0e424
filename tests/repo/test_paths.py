"""How many functions and files a reader follows through a collective and an optimizer step."""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import CheckpointManager, _lane, _state
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import Journal, OnlineLearner
from aioreplica.optimizers import SGD, Adam

Passed = set[tuple[str, str]]
PACKAGE = str(Path(ar.__file__).parent)


def properties() -> set[str]:
    """Return the qualified names of the package's properties, which do not read as calls."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "aioreplica"]
    classes = [c for module in modules for c in vars(module).values() if inspect.isclass(c)]
    found = [p for c in classes for p in vars(c).values() if isinstance(p, property)]
    return {getattr(p.fget, "__qualname__", "") for p in found}


@contextmanager
def functions(passed: Passed) -> Iterator[None]:
    """Collect the named functions of the package that are called inside the block."""

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            passed.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


async def passed_by(strategy: ar.Strategy, call: Callable[[ar.ReplicaContext], Any]) -> Passed:
    """Return what the last replica passes through in a call that the others wait in."""
    passed: Passed = set()

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        await call(ctx)  # makes what is made once
        if ctx.replica_id_in_sync_group == 0:
            await call(ctx)
            return
        await asyncio.sleep(0)  # the other one waits by now
        with functions(passed):
            await call(ctx)

    await strategy.run(step)
    skipped = properties()
    return {each for each in passed if each[1] not in skipped}


@pytest.mark.asyncio
async def test_an_all_reduce(pair: ar.MirroredStrategy) -> None:
    value = np.ones(4)

    passed = await passed_by(pair, lambda ctx: ctx.all_reduce("sum", value))

    assert len(passed) <= 20, sorted(passed)
    assert len({file for file, _ in passed}) <= 8


@pytest.mark.asyncio
async def test_calls_of_a_run_around_an_all_reduce(pair: ar.MirroredStrategy) -> None:
    """With set-up and end, both replicas; asyncio's own calls are not counted."""
    value, calls = np.ones(4), list[str]()

    async def step(x: np.ndarray) -> object:
        return await ar.get_replica_context().all_reduce("sum", x)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            calls.append(code.co_qualname)

    await pair.run(step, args=(value,))  # makes what is made once
    sys.setprofile(note)
    try:
        await pair.run(step, args=(value,))
    finally:
        sys.setprofile(None)

    assert "ReplicaGroup.start_tasks" in calls
    assert len(calls) <= 113, calls


@pytest.mark.asyncio
async def test_a_step_of_sgd(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        weights, optimizer = ar.Variable(np.zeros(4)), SGD(0.1)
    gradient = np.ones(4)

    passed = await passed_by(pair, lambda _ctx: optimizer.apply_gradients([(gradient, weights)]))

    assert "ApplyGradients.perform" in {name for _, name in passed}
    assert len(passed) <= 50, sorted(passed)
    assert len({file for file, _ in passed}) <= 19


@pytest.mark.asyncio
async def test_a_run_with_a_step_of_minimize(pair: ar.MirroredStrategy) -> None:
    """Counted on the loop's thread: the loss is differentiated on those of the devices."""
    with pair.scope():
        weights, optimizer = ar.Variable(np.zeros(4)), SGD(0.1)
    passed: Passed = set()

    async def step(x: np.ndarray) -> None:
        await optimizer.minimize(lambda: ((weights.value - x) ** 2).sum())

    await pair.run(step, args=(np.ones(4),))  # makes what is made once
    with functions(passed):
        await pair.run(step, args=(np.ones(4),))

    skipped = properties()
    files = {file for file, name in passed if name not in skipped}
    assert "_stages" in {name for _, name in passed}
    assert len(files) <= 36, sorted(files)


@pytest.mark.asyncio
async def test_a_save_of_a_variable_with_adam(
    pair: ar.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is asked once, and the state is walked once."""
    with pair.scope():
        weights, optimizer = ar.Variable(np.zeros(4)), Adam(0.1)
    await pair.run(lambda: optimizer.blocking.apply_gradients([(np.ones(4), weights)]))
    calls: list[str] = []
    walks: list[object] = []
    read_state = _state.read_state
    monkeypatch.setattr(
        _state, "read_state", lambda state: [walks.append(state), read_state(state)][1]
    )

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    def on_thread(fn: Callable[[], Any], stop: Any) -> Any:
        sys.setprofile(note)
        try:
            return guarded(fn, stop)
        finally:
            sys.setprofile(None)

    async with CheckpointManager(tmp_path, max_to_keep=2) as manager:
        for step in range(3):  # makes what is made once, and what is removed
            await manager.save(step, {"weights": weights, "optimizer": optimizer})
        guarded = _lane._guarded
        monkeypatch.setattr(_lane, "_guarded", on_thread)
        saves = []
        for step in (3, 4, 5):  # the least counts: other things may end beside one of them
            walks.clear()
            calls.clear()
            sys.setprofile(note)
            try:
                await manager.save(step, {"weights": weights, "optimizer": optimizer})
            finally:
                sys.setprofile(None)
            assert len(walks) == 1
            saves.append(list(calls))
    calls = min(saves, key=len)

    assert "LocalStorage.remove_folder" in calls
    assert len(calls) <= 300, sorted(calls)


@pytest.mark.asyncio
async def test_learned_examples_walk_the_state_once(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step makes slots, so the state is another one behind it."""
    with pair.scope():
        weights, optimizer = ar.Variable(np.zeros(4)), Adam(0.1)
    walks: list[str] = []
    walk = _state._walk

    def noted(found: Any, key: str, *args: Any) -> None:
        walks.append(key)
        walk(found, key, *args)

    async def step(_ctx: ar.ReplicaContext, _batch: Any) -> None:
        await optimizer.apply_gradients([(np.ones(4), weights)])

    async with OnlineLearner(
        pair, step, {"weights": weights, "optimizer": optimizer},
        max_batch=4, max_delay_s=0.0, queue_size=8,
    ) as learner:  # fmt: skip
        monkeypatch.setattr(_state, "_walk", noted)
        for _ in range(3):
            await (await learner.submit(1.0))

    assert walks == ["", "weights", "optimizer"]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_posted_example_up_to_the_version_that_has_learned_it(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    files: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    with pair.scope():
        weights, optimizer = ar.Variable(np.zeros(3)), Adam(0.1)

    async def step(_ctx: ar.ReplicaContext, batch: Any) -> None:
        error = batch["input"] @ weights.value - batch["target"]
        gradient = batch["input"].T @ error / max(len(error), 1)
        await optimizer.apply_gradients([(gradient, weights)])

    def on_threads(hook: Any) -> None:
        threading.setprofile(hook)
        sys.setprofile(hook)

    example = {"input": [1.0, 2.0, 3.0], "target": 1.0}
    on_threads(note)  # before the threads of lanes and of the journal are started
    try:
        learner = OnlineLearner(
            pair, step, {"weights": weights, "optimizer": optimizer}, max_batch=4, max_delay_s=0.0,
            queue_size=8, journal=Journal(tmp_path / "journal.db"),
        )  # fmt: skip
        service = OnlineService(
            learner, lambda _snapshot, _input: 0.0, input_like=np.zeros(3), target_like=0.0
        )
        transport = httpx.ASGITransport(service)
        url = "http://localhost"
        async with learner, httpx.AsyncClient(transport=transport, base_url=url) as client:
            records = learner.records()
            await client.post("/learn", json=example)
            await anext(records)  # what is made once is made
            files.clear()
            posted = await client.post("/learn", json=example)
            await anext(records)
            passed = {file.removeprefix(PACKAGE) for file in files}
    finally:
        on_threads(None)

    assert posted.status_code == 202
    assert {"/online/_journal_file.py", "/optimizers/_adam.py", "/values/_store.py"} <= passed
    assert len(passed) <= 59, sorted(passed)
