"""ArrayDataset: batches as a pure function of seed and epoch."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.input import ArraySpec


def joined(dataset: ar.ArrayDataset, epoch: int) -> list[int]:
    return [int(number) for batch in dataset.batches(epoch) for number in batch]


@given(st.integers(0, 30), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_every_example_comes_once(n: int, batch_size: int, shuffle: bool, epoch: int) -> None:
    dataset = ar.ArrayDataset(np.arange(n), batch_size, shuffle=shuffle)
    batches = list(dataset.batches(epoch))

    assert sorted(joined(dataset, epoch)) == list(range(n))
    assert len(batches) == len(dataset)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(st.integers(0, 30), st.integers(1, 12))
def test_a_short_last_batch_can_be_left_out(n: int, batch_size: int) -> None:
    dataset = ar.ArrayDataset(np.arange(n), batch_size, drop_remainder=True)

    assert [len(batch) for batch in dataset] == [batch_size] * (n // batch_size)
    assert len(dataset) == n // batch_size


def test_without_shuffling_examples_keep_their_order() -> None:
    dataset = ar.ArrayDataset(np.arange(7), 3)

    assert joined(dataset, 0) == joined(dataset, 1) == list(range(7))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return joined(ar.ArrayDataset(np.arange(50), 8, shuffle=True, seed=seed), epoch)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_an_epoch_does_not_depend_on_those_before_it() -> None:
    dataset = ar.ArrayDataset(np.arange(20), 4, shuffle=True)
    late = joined(dataset, 5)

    for epoch in range(5):
        joined(dataset, epoch)

    assert joined(dataset, 5) == late


def test_leaves_of_a_tree_stay_together() -> None:
    x = np.arange(20).reshape(10, 2)
    dataset = ar.ArrayDataset({"x": x, "y": 2 * x[:, 0]}, 3, shuffle=True)

    for batch in dataset.batches(3):
        np.testing.assert_array_equal(batch["y"], 2 * batch["x"][:, 0])


def test_iterating_gives_epoch_zero() -> None:
    dataset = ar.ArrayDataset(np.arange(9), 4, shuffle=True)

    assert [batch.tolist() for batch in dataset] == [b.tolist() for b in dataset.batches(0)]


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "3"])
def test_the_batch_size_must_be_a_positive_int(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size.*{batch_size!r}"):
        ar.ArrayDataset(np.arange(3), batch_size)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None, "3"])
def test_the_seed_must_be_a_natural_number(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an int"):
        ar.ArrayDataset(np.arange(3), 2, shuffle=True, seed=seed)


@given(st.integers(0, 20), st.integers(1, 7), st.booleans(), st.booleans(), st.data())
def test_starting_late_leaves_out_the_beginning(
    n: int, batch_size: int, shuffle: bool, drop: bool, data: st.DataObject
) -> None:
    dataset = ar.ArrayDataset(np.arange(n), batch_size, shuffle=shuffle, drop_remainder=drop)
    whole = [batch.tolist() for batch in dataset.batches(2)]
    number = data.draw(st.integers(0, len(whole)))

    rest = [batch.tolist() for batch in dataset.batches(2, min(n, number * batch_size))]

    assert rest == whole[number:]


def test_slices_are_read_only_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # with it they are copies
    array = np.arange(6)

    for batch in ar.ArrayDataset(array, 4):
        assert np.shares_memory(batch, array)
        with pytest.raises(ValueError, match="read-only"):
            batch[0] = 7
    array[0] = 7  # it is the views that are protected


def test_all_epochs_may_have_the_same_order() -> None:
    data = np.arange(20)
    same = ar.ArrayDataset(data, 4, shuffle=True, seed=3, reshuffle_each_epoch=False)
    other = ar.ArrayDataset(data, 4, shuffle=True, seed=3)

    epochs = [np.concatenate(list(same.batches(epoch))).tolist() for epoch in range(3)]

    assert epochs == [np.concatenate(list(other.batches(0))).tolist()] * 3
    assert epochs[0] != np.concatenate(list(other.batches(1))).tolist()
    with pytest.raises(TypeError, match="reshuffle_each_epoch must be True or False"):
        ar.ArrayDataset(data, 4, reshuffle_each_epoch=1)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_state_of_another_order_is_refused(pair: ar.MirroredStrategy) -> None:
    def dataset(again: bool) -> ar.ArrayDataset:
        return ar.ArrayDataset(np.arange(8), 4, shuffle=True, reshuffle_each_epoch=again)

    state = pair.distribute_dataset(dataset(False)).state_dict()

    pair.distribute_dataset(dataset(False)).load_state_dict(state)
    with pytest.raises(ValueError, match="another dataset"):
        pair.distribute_dataset(dataset(True)).load_state_dict(state)


def test_element_spec_and_batch_size() -> None:
    dataset = ar.ArrayDataset({"x": np.zeros((3, 2), "f4")}, 2)

    assert dataset.element_spec == {"x": ArraySpec((None, 2), np.dtype("f4"))}
    assert dataset.batch_size == 2


@pytest.mark.parametrize("leaf", [object(), {"a"}, [[1, 2], [3]]])
def test_leaves_must_be_arrays(leaf: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"\['x'\]"):
        ar.ArrayDataset({"x": leaf}, 2)


class Table:
    """What a Hugging Face dataset offers: rows by number, columns by name."""

    column_names = ("x", "label")

    def __init__(self) -> None:
        self.read: list[Any] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        self.read.append(rows)
        numbers = np.arange(10)[rows]
        return {"x": np.stack([numbers, -numbers], axis=1), "label": numbers.tolist()}


def test_a_table_is_read_by_rows() -> None:
    table = Table()
    dataset = ar.ArrayDataset(table, 4, shuffle=True)

    batches = list(dataset.batches(0))

    assert [len(batch["label"]) for batch in batches] == [4, 4, 2]
    assert sorted(np.concatenate([batch["label"] for batch in batches])) == list(range(10))
    assert all((batch["x"][:, 0] == batch["label"]).all() for batch in batches)
    assert all(len(rows) <= 4 for rows in table.read)
    assert dataset.element_spec == {
        "x": ArraySpec((None, 2), np.dtype("i8")),
        "label": ArraySpec((None,), np.dtype("i8")),
    }


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mapped_file_is_read_batch_by_batch(tmp_path: Path, shuffle: bool) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.arange(20.0).reshape(10, 2))
    mapped = np.load(path, mmap_mode="r")

    batches = list(ar.ArrayDataset(mapped, 4, shuffle=shuffle).batches(0))

    assert sorted(np.concatenate(batches)[:, 0]) == list(range(0, 20, 2))
    assert all(type(batch) is np.ndarray and batch.flags.owndata for batch in batches)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.ones(3), "y": np.ones(4)}, r"\['x'\]: \(3,\), \['y'\]: \(4,\)"),
        (np.float64(2.0), r"value: \(\)"),
        ((), "no array"),
    ],
)
def test_arrays_need_one_common_leading_axis(arrays: Any, text: Any) -> None:
    with pytest.raises(ValueError, match=text):
        ar.ArrayDataset(arrays, 2)


@pytest.mark.parametrize("flag", ["shuffle", "drop_remainder"])
def test_flags_are_bools(flag: str) -> None:
    """shuffle=1000, as in other libraries, does not mean what it says there."""
    with pytest.raises(TypeError, match=f"{flag} must be True or False, got 1000"):
        ar.ArrayDataset(np.arange(4), 2, **{flag: 1000})


def test_sizes_and_seeds_may_be_numpy_integers() -> None:
    dataset = ar.ArrayDataset(np.arange(7), np.int64(3), shuffle=True, seed=np.uint8(1))  # type: ignore[arg-type]
    same = ar.ArrayDataset(np.arange(7), 3, shuffle=True, seed=1)

    assert [batch.tolist() for batch in dataset] == [batch.tolist() for batch in same]
    assert ar.Dataset([1]).batch(np.int32(2)) is not None  # type: ignore[arg-type]


def test_a_mask_is_not_lost_in_silence() -> None:
    masked = np.ma.masked_array(np.arange(4), mask=[True, False, False, False])

    with pytest.raises(TypeError, match=r"Leaf \['x'\] is a MaskedArray.*filled"):
        ar.ArrayDataset({"x": masked}, 2)


def test_repr_shows_sizes() -> None:
    dataset = ar.ArrayDataset(np.arange(7), 3, shuffle=True)

    assert repr(dataset) == "<ArrayDataset | 7 examples in 3 batches of 3, shuffled>"
    assert dataset.num_examples == 7
