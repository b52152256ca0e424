"""Copies of a module in replicas and losses: their buffers, modes and attributes."""

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, torch_module
from aioreplica.errors import ContextError
from tests.autodiff.torch_modules import X, assert_all_equal, mlp
from tests.replica.gated import me, my_id
from tests.strategies.workers import on_workers

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional


@pytest.mark.asyncio
async def test_replicas_make_no_modules_and_change_no_modes(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(mlp())

    for refused in (lambda: torch_module(mlp()), model.eval, lambda: model.load_state_dict({})):

        async def step(fn: Any) -> None:
            fn()

        with pytest.raises(ContextError, match="concerns all replicas"):
            await pair.run(step, args=(refused,))


@pytest.mark.asyncio
async def test_two_modules_of_one_class_get_names_of_their_own(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        models = [torch_module(nn.Linear(2, 2)) for _ in range(2)]
        with pytest.raises(ValueError, match="'Linear/weight'"):
            torch_module(nn.Linear(2, 2), name="Linear")

    assert [model.name for model in models] == ["Linear", "Linear_1"]


# ---- replicas ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_replicas_call_one_model_at_the_same_time(gang: ar.MirroredStrategy) -> None:
    """Each replica has values of its own, and all are inside a call at once."""
    count = gang.num_replicas_in_sync
    together = threading.Barrier(count)

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.0))

        def forward(self, x: Any) -> Any:
            together.wait(10)  # breaks unless all replicas are inside at once
            scale = self.scale
            together.wait(10)
            return x * scale * self.scale

    with gang.scope():
        model = torch_module(Meeting())
    model.variables[0].store.write(
        {model.variables[0]: tuple(np.float32(i + 1) for i in range(count))}
    )

    async def step() -> Any:
        def loss() -> Any:
            return model(torch.tensor(1.0))

        ctx = me()
        return await ctx.run_on_device(differentiate_variables, loss, model.variables)

    results = gang.local_results(await gang.run(step))

    assert [(float(value), float(pairs[0][0])) for value, pairs in results] == [
        ((i + 1) ** 2, 2.0 * (i + 1)) for i in range(count)
    ]


@pytest.mark.asyncio
async def test_running_statistics_are_the_mean_of_the_replicas(pair: ar.MirroredStrategy) -> None:
    module = nn.BatchNorm1d(4, momentum=None)  # the plain average over calls
    with pair.scope():
        model = torch_module(module)

    async def step(x: Any) -> Any:
        await me().run_on_device(model, x)
        return model.buffers[0].value.copy()

    local = await pair.run(step, args=(ar.PerReplica([X[:4], X[4:]]),))

    means = [X[:4].mean(0), X[4:].mean(0)]
    np.testing.assert_allclose(local[0], means[0], rtol=1e-6)
    np.testing.assert_allclose(local[1], means[1], rtol=1e-6)
    np.testing.assert_allclose(model.buffers[0].value, X.mean(0), rtol=1e-5)
    variances = [X[:4].var(0, ddof=1), X[4:].var(0, ddof=1)]
    np.testing.assert_allclose(model.buffers[1].value, np.mean(variances, 0), rtol=1e-5)
    assert model.buffers[2].value == 1
    assert model.buffers[2].dtype == np.int64


@pytest.mark.asyncio
async def test_statistics_are_kept_by_every_strategy(strategy: ar.Strategy) -> None:
    module = nn.BatchNorm1d(4)
    with strategy.scope():
        model = torch_module(module)
    for _ in range(2):
        await strategy.run(lambda: model(X).sum().item())
        module(torch.tensor(X))

    with strategy.scope():
        assert_all_equal([v.value for v in model.buffers], [b.numpy() for b in module.buffers()])


@pytest.mark.asyncio
async def test_evaluation_writes_no_statistics(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(nn.BatchNorm1d(4)).eval()
    before = model.buffers[0].store.version

    await pair.run(lambda: model(X).sum().item())

    assert not model.training
    assert model.buffers[0].store.version == before
    assert model.train().training


class Backbone(nn.Module):
    """Keeps its batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.calls = nn.BatchNorm1d(4), nn.Linear(4, 1), 0

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        self.calls += 1
        return self

    def forward(self, x: Any) -> Any:
        assert self.calls == 0
        return self.training, self.head(self.norm(x))


def test_modes_are_those_that_the_module_sets() -> None:
    model = torch_module(Backbone())
    for change in (model.eval, model.train):
        assert change() is model
        assert model(X)[0] == model.training == (change == model.train)
        np.testing.assert_array_equal(model.buffers[0].value, 0.0)


class Table:
    """A large attribute of a module."""

    num_copies = 0

    def __deepcopy__(self, memo: object) -> Any:
        Table.num_copies += 1
        return self


def test_modes_are_set_without_a_copy_of_what_the_module_holds() -> None:
    module = mlp()
    module.table = Table()
    model = torch_module(module)
    before = Table.num_copies

    for change in (model.eval, model.train):
        assert change().training == (change == model.train)
    assert Table.num_copies == before
    model(X)
    assert Table.num_copies == before + 1


class Fusing(nn.Module):
    """Has no batch norm of its own left in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.layers = nn.Sequential(self.layers[0])
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        return [part.training for part in self.modules()], self.layers(x)


def test_parts_that_a_change_of_modes_takes_out_follow_it() -> None:
    model = torch_module(Fusing())

    for change in (model.eval, model.train):
        change()
        assert model(X)[0] == [change == model.train] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("shift", [0.0, np.nan])
async def test_loading_a_part_leaves_the_rest_of_each_replica(
    pair: ar.MirroredStrategy, shift: float
) -> None:
    with pair.scope():
        model = torch_module(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), name="net")

    async def step(x: Any) -> None:
        await me().run_on_device(model, x)

    await pair.run(step, args=(ar.PerReplica([X[:4] + shift, X[4:]]),))
    before = {v.name: v.components for v in (*model.variables, *model.buffers)}

    result = model.load_state_dict({"1.bias": torch.tensor([3.0, 4.0])}, strict=False)

    assert result.unexpected_keys == []
    changed = [v.name for v in (*model.variables, *model.buffers)
               if v.components is not before[v.name]]  # fmt: skip
    assert changed == ["net/1.bias"]
    assert model.variables[3].value.tolist() == [3.0, 4.0]
    mean = model.buffers[0].value
    model.load_state_dict({"0.running_mean": torch.tensor(mean)}, strict=False)
    assert_all_equal(model.buffers[0].components, [mean, mean])  # as it is given, to all


@pytest.mark.asyncio
async def test_buffers_of_several_workers_are_loaded_outside_and_read_in_replicas() -> None:
    given = nn.BatchNorm1d(4)
    given.running_mean.fill_(7.0)

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        with strategy.scope():
            model = torch_module(nn.BatchNorm1d(4))
            model.load_state_dict(given.state_dict())
            for read in (model.state_dict, lambda: model.copy_to(nn.BatchNorm1d(4))):
                with pytest.raises(ContextError, match=r"In a replica .*`state_dict\(\)`"):
                    read()

        async def step() -> Any:
            model.copy_to(module := nn.BatchNorm1d(4))
            return module.running_mean.tolist(), model.state_dict()["running_mean"].tolist()

        return strategy.local_results(await strategy.run(step))

    for results in await on_workers(2, 2, program):
        assert results == (([7.0] * 4, [7.0] * 4),) * 2


@pytest.mark.asyncio
async def test_statistics_of_a_plain_variable_and_in_inference_mode() -> None:
    model, module = torch_module(nn.BatchNorm1d(4)), nn.BatchNorm1d(4)

    with torch.inference_mode():
        model(X)
    module(torch.tensor(X))

    np.testing.assert_array_equal(model.buffers[0].value, module.running_mean)


class Remembering(nn.Module):
    """Keeps what it was called with in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen: list[int] = []
        self.refs: list[Any] = []

    def forward(self, x: int) -> Any:
        self.seen.append(x)
        self.refs.append(weakref.ref(self.scale))
        return self.scale * x, list(self.seen), self.refs


@pytest.mark.asyncio
async def test_plain_attributes_stay_with_their_replica(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        model = torch_module(Remembering())

    for _ in range(2):
        result = await pair.run(lambda: tuple(model(my_id())[1]))

    assert pair.local_results(result) == ((0, 0), (1, 1))


def test_a_loss_holds_one_copy_and_gives_it_back_without_tensors() -> None:
    model, seen = torch_module(Remembering()), []

    def loss() -> Any:
        for x in (1, 2):
            value, so_far, refs = model(x)
            seen.append((so_far, refs))
        return value

    for _ in range(2):
        differentiate_variables(loss, model.variables)

    assert [so_far for so_far, _ in seen] == [[1], [1, 2], [1, 2, 1], [1, 2, 1, 2]]
    gc.collect()
    assert [ref() for ref in seen[-1][1]] == [None] * 4


def test_a_copy_in_use_is_not_lent_again() -> None:
    """Two calls at once, twice: at first on new copies, then on those that were given back."""
    together = threading.Barrier(2)

    class Meeting(nn.Module):
        def forward(self, x: int) -> int:
            self.mine = x
            together.wait(10)
            return self.mine

    model, found = torch_module(Meeting()), {}

    def work(x: int) -> None:
        for turn in range(2):
            found[x, turn] = model(x)
            together.wait(10)

    threads = [threading.Thread(target=work, args=(x,)) for x in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert found == {(x, turn): x for x in range(2) for turn in range(2)}


def test_buffers_written_without_a_trace_are_noticed() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return F.batch_norm(x, self.mean, self.var, training=True, momentum=1.0)

    model = torch_module(Norm())

    model(X)

    np.testing.assert_allclose(model.buffers[0].value, X.mean(0), rtol=1e-5)


@pytest.mark.asyncio
async def test_a_run_that_was_aborted_writes_no_buffers(pair: ar.MirroredStrategy) -> None:
    started = threading.Event()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self) -> None:
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                while True:  # ends when the other replica has failed
                    me()._own.check_running()
            self.count += 1

    with pair.scope():
        model = torch_module(Waiting())

    async def step() -> None:
        if my_id() == 0:
            await me().run_on_device(model)
        await me().run_on_device(started.wait, 10)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await pair.run(step)

    assert model.buffers[0].value == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_no_replicas_statistics_are_lost_under_contention(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        model = torch_module(nn.BatchNorm1d(4))

    def step() -> int:
        for _ in range(300):
            model(X)
        return int(model.buffers[2].value)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counts = await gang.run(step)
    finally:
        sys.setswitchinterval(before)

    assert set(counts) == {300}
