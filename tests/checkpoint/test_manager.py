"""Saving and restoring: every kind of state, other strategies, what does not match, retention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import FsspecStorage, LocalStorage
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError, ContextError
from tests.conftest import mirrored

pytestmark = pytest.mark.asyncio

SUM, MEAN = "sum", "mean"


def on_read(value: Any, aggregation: str) -> ar.Variable:
    return ar.Variable(value, synchronization="on_read", aggregation=aggregation)


async def fill(strategy: ar.Strategy, variable: ar.Variable, values: list[float]) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        assert context is not None
        await variable.assign(np.full(variable.shape, values[context.replica_id_in_sync_group]))

    await strategy.run(step)


def parts(strategy: ar.Strategy, variable: ar.Variable) -> list[Any]:
    return [np.asarray(part).tolist() for part in strategy.local_results(variable)]


# --- every kind of state ----------------------------------------------------------------------


async def test_plain_data_arrays_and_generators_come_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "epoch": 3,
        "history": [1.5, float("inf")],
        "settings": {"name": "run/7", "shape": (2, 3), 7: None, "$odd": b"\x00\xff"},
        "array": np.arange(6)[::-2],
        "scalar": np.float32(0.1),
        "nested": {"of two": [np.arange(2), np.arange(3) * 0.5], "of one": np.int8(4)},
        "rng": np.random.default_rng(5),
        "a/b": True,
        "a": {"b": False},
    }
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(0, state)
        drawn = state["rng"].random(3)
        fresh: dict[str, Any] = {
            "epoch": 0, "history": [], "settings": {}, "array": np.zeros(3, int),
            "scalar": np.float32(0), "rng": np.random.default_rng(6), "a/b": None, "a": {"b": 1},
            "nested": {"of two": [np.zeros(2, int), np.zeros(3)], "of one": np.int8(0)},
        }  # fmt: skip
        history = fresh["history"]
        assert await manager.restore(fresh) == 0

    assert history is fresh["history"]  # in place
    assert fresh["history"] == [1.5, float("inf")]
    assert fresh["settings"] == state["settings"]
    assert type(fresh["settings"]["shape"]) is tuple
    assert (fresh["epoch"], fresh["a/b"], fresh["a"]["b"]) == (3, True, False)
    assert fresh["array"].tolist() == [5, 3, 1]
    assert fresh["scalar"] == np.float32(0.1)
    assert [each.tolist() for each in fresh["nested"]["of two"]] == [[0, 1], [0.0, 0.5, 1.0]]
    assert fresh["nested"]["of one"] == 4
    assert fresh["rng"].random(3).tolist() == drawn.tolist()


DTYPES = [
    "bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64", "complex128",
    ml_dtypes.bfloat16,
]  # fmt: skip


async def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path: Path) -> None:
    def arrays() -> list[Any]:
        rng = np.random.default_rng(0)
        shapes = [(), (0,), (3, 0, 2), (2, 3, 4)]
        made = [rng.integers(0, 2, s).astype(d) for d in DTYPES for s in shapes]
        made += [np.asfortranarray(a) for a in made if a.ndim > 1]
        made += [a[::-1, :, ::2] for a in made if a.shape == (2, 3, 4)]
        made += [np.arange(5, dtype=">i4"), np.float64([-0.0, np.nan, np.inf])]
        return made

    saved = arrays()
    variables = [ar.Variable(np.asfortranarray(rows)) for rows in (np.eye(3), np.ones((2, 5)))]
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"arrays": saved, "variables": variables})
        zeros = [np.zeros_like(array) for array in saved]
        others = [ar.Variable(np.zeros(v.shape)) for v in variables]
        await manager.restore({"arrays": zeros, "variables": others})
        await manager.verify(1)

    for array, found in zip(saved, zeros, strict=True):
        assert array.dtype == found.dtype
        assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(found).tobytes()
    assert [v.value.tolist() for v in others] == [v.value.tolist() for v in variables]


async def test_the_files_are_safetensors(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    state = {"w": ar.Variable(np.arange(6.0).reshape(2, 3).T), "n": ar.Variable([1, 2])}
    await ar.CheckpointManager(tmp_path).save(12, state)

    [path] = tmp_path.glob("step-0000000012/*.safetensors")
    found = numpy.load_file(path)

    assert found["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["n"].tolist() == [1, 2]


@pytest.mark.xslow
async def test_small_tensors_are_written_together(tmp_path: Path) -> None:
    """Large, small, empty, strided and swapped ones, in any order: all come back, in any file."""
    numpy = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    kinds = [
        np.float32(rng.random(())), rng.random(0), rng.random((8, 6))[::2, ::3],
        rng.random(7).astype(">f8"), rng.random(511), rng.random(513), rng.random(40_000),
        rng.random(3) + 1j, np.array(True),
    ]  # fmt: skip
    chosen = rng.integers(len(kinds), size=2000)
    state = {"arrays": [np.array(kinds[each], order="K") for each in chosen]}
    writes: list[int] = []
    create = LocalStorage.create

    def watched(storage: LocalStorage, path: str) -> Any:
        sink = create(storage, path)
        write = sink.write

        def count(data: memoryview) -> None:
            writes.append(len(data))
            write(data)

        sink.write = count
        return sink

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "create", watched)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, state)
            found = {"arrays": [np.zeros(each.shape, each.dtype) for each in state["arrays"]]}
            await manager.restore(found)
            await manager.verify(1)
            parts = [await manager.read(1, f"arrays/{number}") for number in range(20)]
    for read, back, saved in zip(found["arrays"], parts, state["arrays"], strict=False):
        assert np.array_equal(read, saved)
        assert np.array_equal(back, saved)
    assert all(map(np.array_equal, found["arrays"], state["arrays"]))
    files = [*map(numpy.load_file, tmp_path.glob("step-*/*.safetensors"))]
    assert sum(map(len, files)) == len(chosen)
    num_small = int(sum(kinds[each].nbytes <= 4096 for each in chosen))
    assert num_small > 1000
    assert len(writes) < len(chosen) - num_small / 2


async def test_any_key_gives_a_file_that_safetensors_opens(tmp_path: Path) -> None:
    """Names that clash with labels of components, with metadata, and that are no Unicode."""
    numpy = pytest.importorskip("safetensors.numpy")
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = ar.Variable(1.0, synchronization="on_read", aggregation="sum")
        names = ["v#1", "__metadata__", "\udcff", "%udcff", "%", "a/b", "é", "%23", "#"]
        state = {"v": v, **{name: np.full(2, float(i)) for i, name in enumerate(names)}}
        await ar.CheckpointManager(tmp_path).save(3, state)
        expected = {name: state[name] for name in names}
        state.update({name: np.zeros(2) for name in names})

        await ar.CheckpointManager(tmp_path).restore(state)

    [path] = tmp_path.glob("step-0000000003/*.safetensors")
    found = numpy.load_file(path)
    assert len(found) == 2 + len(names)
    assert {"v", "v#1"} < set(found)
    for name in names:
        assert state[name].tolist() == expected[name].tolist()
    saved = [array.tolist() for label, array in found.items() if label not in {"v", "v#1"}]
    assert sorted(saved) == sorted(array.tolist() for array in expected.values())


# --- other strategies -------------------------------------------------------------------------

KINDS: dict[str, Callable[[], ar.Strategy]] = {
    "default": ar.DefaultStrategy,
    "one": lambda: ar.OneDeviceStrategy("cpu:0"),
    "two": lambda: mirrored(2),
    "central": lambda: ar.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "three": lambda: mirrored(3),
}


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
async def test_any_strategy_restores_what_another_one_saved(
    before: str, after: str, tmp_path: Path
) -> None:
    """What a reader outside the replicas saw is what it sees again (TensorFlow's values_test)."""

    def build(strategy: ar.Strategy) -> dict[str, ar.Variable]:
        with strategy.scope():
            return {
                "mirrored": ar.Variable([1.0, 2.0]),
                "sum": on_read(0.0, SUM),
                "count": on_read(0, SUM),
                "mean": on_read(0.0, MEAN),
                "first": on_read(0.0, "only_first_replica"),
            }

    async with KINDS[before]() as old:
        model = build(old)
        count = old.num_replicas_in_sync
        for name in ("sum", "count", "mean", "first"):
            if before != "default":
                await fill(old, model[name], [7.0, 4.0, 2.0] if name != "count" else [7, 4, 2])
        seen = {name: v.value.tolist() for name, v in model.items()}
        own = {name: parts(old, v) for name, v in model.items()}
        await ar.CheckpointManager(tmp_path).save(0, model)
    async with KINDS[after]() as new:
        model = build(new)
        await ar.CheckpointManager(tmp_path).restore(model)

        for name, variable in model.items():
            assert variable.value.tolist() == pytest.approx(seen[name])
        if new.num_replicas_in_sync == count:  # then nothing is divided or averaged
            assert {name: parts(new, v) for name, v in model.items()} == own
        elif count > 1 and new.num_replicas_in_sync > 1:
            total = seen["sum"]
            share = total / new.num_replicas_in_sync
            assert parts(new, model["sum"]) == pytest.approx([share] * new.num_replicas_in_sync)


def training(strategy: ar.Strategy) -> dict[str, Any]:
    with strategy.scope():
        return {
            "model": [ar.Variable(np.arange(4.0)), ar.Variable(1.0)],
            "adam": ar.optimizers.Adam(0.1, loss_scale=ar.optimizers.DynamicLossScale()),
            "loss": ar.metrics.Mean(),
        }


async def train(strategy: ar.Strategy, state: dict[str, Any], num_steps: int) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        assert context is not None
        noise = context.rng("noise").normal()
        await state["adam"].apply_gradients([(v.value + noise, v) for v in state["model"]])
        state["loss"].update_state(noise)

    for _ in range(num_steps):
        await strategy.run(step)


def everything(state: dict[str, Any]) -> list[Any]:
    made = [*state["model"], *state["adam"].variables, *state["loss"].variables]
    return [[part.tolist() for part in v.components] for v in made]


async def test_slots_of_a_fresh_optimizer_take_their_value_when_they_are_made(
    tmp_path: Path,
) -> None:
    async with mirrored(2) as strategy:
        state = training(strategy)
        await train(strategy, state, 3)
        await ar.CheckpointManager(tmp_path).save(3, state)
        await train(strategy, state, 2)
        expected = everything(state)
    for number in (3, 4):  # saved again before the slots are made, nothing is lost
        async with mirrored(2) as strategy, ar.CheckpointManager(tmp_path) as manager:
            state = training(strategy)
            assert await manager.restore(state) == number
            assert manager.restored is not None
            assert len(manager.restored.deferred) == 4
            await manager.save(number + 1, state)
            await train(strategy, state, 2)
            assert everything(state) == expected


async def test_slots_that_were_not_made_when_it_was_saved_are_made_anew(tmp_path: Path) -> None:
    async with mirrored(2) as strategy, ar.CheckpointManager(tmp_path) as manager:
        state = training(strategy)
        await manager.save(0, state)
        await train(strategy, state, 3)
        expected = everything(state)
        await manager.restore(state)
        await train(strategy, state, 3)
        assert everything(state) == expected


async def test_an_accumulator_goes_on_with_other_replicas(tmp_path: Path) -> None:
    """An open window is finished by fewer or more replicas with the same update."""

    def build(strategy: ar.Strategy) -> dict[str, Any]:
        with strategy.scope():
            w = ar.Variable([0.0, 0.0])
            return {"w": w, "window": ar.GradientAccumulator(ar.optimizers.SGD(1.0))}

    async def add(strategy: ar.Strategy, state: dict[str, Any]) -> None:
        async def step() -> None:
            context = ar.get_replica_context()
            assert context is not None
            i = context.replica_id_in_sync_group
            await state["window"].add([(ar.Weighted(np.array([i, 1.0]), 1 + i), state["w"])])

        await strategy.run(step)

    async with mirrored(3) as strategy:
        state = build(strategy)
        await add(strategy, state)
        await ar.CheckpointManager(tmp_path).save(0, state)
        with strategy.scope():
            await state["window"].apply()
        expected = state["w"].value
    for count in (1, 2, 3, 4):
        async with mirrored(count) as strategy:
            state = build(strategy)
            await ar.CheckpointManager(tmp_path).restore(state)
            with strategy.scope():
                await state["window"].apply()
            assert state["w"].value.tolist() == pytest.approx(expected.tolist())


# --- what does not match ----------------------------------------------------------------------


async def test_mismatches_are_listed_on_both_sides(tmp_path: Path) -> None:
    a, b = ar.Variable(1.0), ar.Variable(2.0)
    manager = ar.CheckpointManager(tmp_path)
    await manager.save(5, {"a": a, "b": b})
    fresh, extra = ar.Variable(0.0), ar.Variable(9.0)

    with pytest.raises(CheckpointError, match=r"Only in the state: c\. Only in the checkpoint: b"):
        await manager.restore({"a": fresh, "c": extra})
    assert fresh.value == 0.0

    assert await manager.restore({"a": fresh, "c": extra}, partial=True) == 5
    assert (fresh.value, extra.value) == (1.0, 9.0)
    assert manager.restored is not None
    assert (manager.restored.missing, manager.restored.unclaimed) == (("c",), ("b",))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: ar.Variable([1.0, 2.0, 3.0]), r"'w' has shape \(3,\).* here, shape \(2,\)"),
        (lambda: ar.Variable([1, 2]), "dtype int64 here.* dtype float64 there"),
        (lambda: "text", "'w' is a value here and a variable there"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_changes_nothing(
    other: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    manager = ar.CheckpointManager(tmp_path)
    await manager.save(1, {"v": ar.Variable(5.0), "w": ar.Variable([1.0, 2.0])})
    v = ar.Variable(0.0)

    with pytest.raises(CheckpointError, match=said):
        await manager.restore({"v": v, "w": other()})
    assert v.value == 0.0


async def test_an_object_that_refuses_its_state_leaves_everything_as_it_was(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"place": 1}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("another dataset")

    class Counter(Refusing):
        place = 0

        def load_state_dict(self, state: Any) -> None:
            self.place = state["place"]

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

    manager, counter, v = ar.CheckpointManager(tmp_path), Counter(), ar.Variable(1.0)
    counter.place = 4
    state = {"counter": counter, "epoch": 1, "z": Refusing(), "v": v}
    await manager.save(1, state)
    await v.assign(2.0)
    counter.place, state["epoch"] = 7, 9

    with pytest.raises(ValueError, match="another dataset"):
        await manager.restore(state)
    assert (counter.place, state["epoch"], v.value) == (7, 9, 2.0)


def read_only() -> Any:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (lambda: ar.Variable(1.0), ValueError, "A state is a dict or list"),
        (lambda: {"f": open}, TypeError, "'f' in the state is .* cannot be saved"),
        (lambda: {"t": (1, ar.Variable(1.0))}, TypeError, "'t/0' in the state is 1 in a tuple"),
        (lambda: {"t": (np.float64(1.5), [np.ones(2)])}, TypeError, r"'t/0' .*1\.5\) in a tuple"),
        (lambda: {"t": ([1], read_only())}, TypeError, r"'t/1' .*array\(.* in a tuple"),
        (lambda: {1: ar.Variable(1.0), "1": ar.Variable(1.0)}, ValueError, "are called '1'"),
        (lambda: {"x": np.array(["text"])}, TypeError, "has dtype <U4"),
        (lambda: {"x": np.array([object()])}, TypeError, "has dtype object"),
    ],
)
async def test_objects_that_cannot_be_saved_are_refused(
    state: Callable[[], Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    manager = ar.CheckpointManager(tmp_path / "new")
    with pytest.raises(error, match=said):
        await manager.save(1, state())
    assert manager.steps() == ()
    await manager.save(1, {"x": 1})  # it is not stuck


async def test_bad_arguments(tmp_path: Path, pair: ar.Strategy) -> None:
    manager = ar.CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="step must be between 0"):
        await manager.save(-1, {})
    with pytest.raises(TypeError, match="step must be an int"):
        await manager.save(1.5, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_to_keep must be at least 1, got 0"):
        ar.CheckpointManager(tmp_path, max_to_keep=0)
    with pytest.raises(TypeError, match="a path or a Storage"):
        ar.CheckpointManager(7)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"There is no step to restore in .* It has none"):
        await manager.restore({})
    with pytest.raises(CheckpointError, match="no step 4"):
        await manager.verify(4)

    async def step() -> None:
        await manager.save(1, {})

    with pytest.raises(ContextError, match="would wait for itself"):
        await pair.run(step)


async def test_a_step_is_described_without_looking_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    names_in = LocalStorage.list

    def watched(storage: LocalStorage, folder: str) -> list[str]:
        listed.append(folder)
        return names_in(storage, folder)

    async with ar.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(5):
            await manager.save(step, {"step": step})
        monkeypatch.setattr(LocalStorage, "list", watched)
        assert [manager.describe(step).step for step in range(5)] == [*range(5)]
        assert listed == []
        with pytest.raises(CheckpointError, match=r"no step 7 .* It has 0, 1, 2, 3, 4"):
            manager.describe(7)


# --- retention, replacement, the background ---------------------------------------------------


async def test_old_steps_go_and_every_so_many_stay(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path, max_to_keep=2, keep_every=4) as manager:
        for step in range(1, 11):
            await manager.save(step, {"step": step})
        assert manager.steps() == (4, 8, 9, 10)
        assert manager.latest() == 10
        state = {"step": 0}
        await manager.restore(state, 4)
        assert state == {"step": 4}

        await manager.save(5, {"step": "again"})  # saved last, so the newest, whatever its number
        assert manager.latest() == 5
        assert manager.steps() == (4, 5, 8, 10)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", *(f"step-{step:010d}" for step in (4, 5, 8, 10)),
        *(f"claim-{i:010d}-{step:010d}" for i, step in [(4, 4), (8, 8), (10, 10), (11, 5)]),
    }  # fmt: skip


async def test_a_step_saved_again_after_steps_were_removed_is_the_latest(tmp_path: Path) -> None:
    """By any manager: a save is numbered above all that are there, not by how many there are."""
    async with ar.CheckpointManager(tmp_path, max_to_keep=3) as manager:
        for step in range(1, 7):
            await manager.save(step, {"step": step})
    async with ar.CheckpointManager(tmp_path, max_to_keep=3) as manager:
        await manager.save(2, {"step": "again"})
    state = {"step": 0}
    manager = ar.CheckpointManager(tmp_path)
    assert (manager.latest(), await manager.restore(state)) == (2, 2)
    assert state == {"step": "again"}


async def test_a_save_in_the_background_keeps_the_state_of_its_cut(tmp_path: Path) -> None:
    v, values = ar.Variable(np.zeros(1000)), np.zeros(4)
    async with ar.CheckpointManager(tmp_path) as manager:
        for step in range(1, 6):
            await manager.save(step, {"v": v, "values": values}, wait=False)
            await v.assign_add(np.ones(1000))
            values += 1
        await manager.wait()
        state = {"v": v, "values": values}
        for step in manager.steps():
            await manager.restore(state, step)
            assert {*v.value, *values} == {step - 1.0}


async def test_a_save_in_the_background_that_fails_is_raised_at_the_next_await(
    tmp_path: Path,
) -> None:
    def hinder() -> None:
        (tmp_path / "step-0000000002").write_text("in the way")

    v = ar.Variable(1.0)
    manager = ar.CheckpointManager(tmp_path)
    await manager.save(1, {"v": v})
    hinder()
    for call in (
        manager.wait,
        lambda: manager.save(3, {"v": v}),
        lambda: manager.restore({"v": v}),
        manager.aclose,
    ):
        await manager.save(2, {"v": v}, wait=False)
        with pytest.raises(CheckpointNotCommittedError, match="Step 2 was not saved"):
            await call()
        await manager.wait()  # once
        assert manager.steps() == (1,)


async def test_two_managers_on_one_directory(tmp_path: Path) -> None:
    v = ar.Variable(1.0)
    async with ar.CheckpointManager(tmp_path) as first, ar.CheckpointManager(tmp_path) as second:
        await first.save(1, {"v": v})
        with pytest.raises(CheckpointError, match=r"is in use: a checkpoint manager of process \d"):
            await second.save(2, {"v": v})
        assert await second.restore({"v": v}) == 1  # any number may read
        await first.aclose()
        await second.save(2, {"v": v})


async def test_an_object_store(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    v = ar.Variable([1.0, 2.0])
    async with ar.CheckpointManager(url, max_to_keep=2) as manager:
        for step in (1, 2, 3):
            await manager.save(step, {"v": v, "step": step})
        assert manager.steps() == (2, 3)
        state = {"v": ar.Variable([0.0, 0.0]), "step": 0}
        assert await ar.CheckpointManager(FsspecStorage(url)).restore(state) == 3
        assert (state["v"].value.tolist(), state["step"]) == ([1.0, 2.0], 3)
        await manager.verify(3)
        damage(3)
        with pytest.warns(RuntimeWarning, match="Restored step 2 .* step 3"):
            assert await manager.restore(state) == 2


def damage(step: int) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    [path] = [p for p in files.find("/") if f"step-{step:010d}/data" in p]
    data = bytearray(files.cat_file(path))
    data[-1] ^= 1
    files.pipe_file(path, bytes(data))
