"""Batches of pandas, polars and Arrow: dicts of columns that keep their dtypes, or refused."""

import sys
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.input import ArraySpec, _batches, split_batch
from aioreplica.input._batches import BatchReader

LIBRARIES = ["pandas", "polars", "pyarrow"]
IDS = [2**53 + 1, 2, 3, 4]  # float64 has no number for the first


def library(name: str) -> Any:
    """Return the library, and have the test skipped if it is not installed."""
    return pytest.importorskip(name)


def table(name: str, columns: dict[str, Any]) -> Any:
    """Return a table of the library."""
    module = library(name)
    return module.table(columns) if name == "pyarrow" else module.DataFrame(columns)


def column(name: str, values: list[Any]) -> Any:
    """Return a column of the library."""
    module = library(name)
    return module.array(values) if name == "pyarrow" else module.Series(values)


def whole(batches: list[Any]) -> dict[str, np.ndarray]:
    """Put the parts of all replicas and batches together again."""
    return {
        name: np.concatenate([part for batch in batches for part in batch[name].values])
        for name in batches[0]
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("name", LIBRARIES)
async def test_a_table_becomes_a_dict_of_columns(pair: ar.MirroredStrategy, name: str) -> None:
    batch = table(name, {"id": IDS, "x": [0.5, 1.5, 2.5, 3.5], "ok": [True, False, True, True]})

    async with pair.distribute_dataset([batch, batch]) as batches:
        seen = [batch async for batch in batches]

    found = whole(seen)
    assert {key: value.dtype.name for key, value in found.items()} == {
        "id": "int64",
        "x": "float64",
        "ok": "bool",
    }
    assert found["id"].tolist() == IDS * 2
    assert found["ok"].tolist() == [True, False, True, True] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("name", LIBRARIES)
async def test_arrays_may_be_tables(pair: ar.MirroredStrategy, name: str) -> None:
    data = table(name, {"id": IDS, "x": np.float32([1, 2, 3, 4])})
    dataset = ar.ArrayDataset(data, 3, shuffle=True)

    assert dataset.element_spec == {
        "id": ArraySpec((None,), np.dtype("int64")),
        "x": ArraySpec((None,), np.dtype("float32")),
    }
    async with pair.distribute_dataset(dataset) as batches:
        found = whole([batch async for batch in batches])

    assert sorted(found["id"].tolist()) == sorted(IDS)


@pytest.mark.parametrize("name", LIBRARIES)
def test_columns_stand_for_arrays(name: str) -> None:
    parts = split_batch({"id": column(name, IDS)}, 2)

    assert [part["id"].tolist() for part in parts] == [IDS[:2], IDS[2:]]
    assert parts[0]["id"].dtype == np.int64


@pytest.mark.parametrize("name", ["polars", "pyarrow"])
def test_missing_integers_are_refused(name: str) -> None:
    """NumPy would make floats of them."""
    batch = table(name, {"id": [1, None, 3]})

    with pytest.raises(ValueError, match=rf"Leaf \['id'\] is a {name} .* with 1 missing values"):
        split_batch(batch, 2)


@pytest.mark.parametrize("name", ["polars", "pyarrow"])
def test_missing_floats_are_not_a_number(name: str) -> None:
    parts = split_batch(table(name, {"x": [1.0, None]}), 1)

    np.testing.assert_array_equal(parts[0]["x"], [1.0, np.nan])


def test_nullable_columns_of_pandas_keep_their_dtypes() -> None:
    pandas = library("pandas")
    data = pandas.DataFrame(
        {"id": pandas.array(IDS, "Int64"), "x": pandas.array([1] * 4, "Float32")}
    )

    (part,) = split_batch(data, 1)
    assert (part["id"].dtype, part["x"].dtype) == (np.int64, np.float32)
    assert part["id"].tolist() == IDS

    missing = pandas.DataFrame({"id": pandas.array([1, None], "Int64")})
    with pytest.raises(ValueError, match=r"pandas Series of Int64 with 1 missing"):
        split_batch(missing, 1)


@pytest.mark.parametrize("kind", ["datetime", "timedelta", "category"])
def test_missing_values_of_pandas_that_are_no_floats_are_refused(kind: str) -> None:
    pandas = library("pandas")
    column = {
        "datetime": lambda: pandas.to_datetime(["2020-01-01", None]),
        "timedelta": lambda: pandas.to_timedelta(["1s", None]),
        "category": lambda: pandas.Categorical([7, None]),
    }[kind]()
    data = pandas.DataFrame({"t": column})

    with pytest.raises(ValueError, match=r"Leaf \['t'\] is a pandas Series .* 1 missing"):
        split_batch(data, 1)
    (part,) = split_batch(data[:1], 1)
    assert part["t"].dtype.kind == {"datetime": "M", "timedelta": "m", "category": "i"}[kind]


def test_an_arrow_batch_is_a_table_too() -> None:
    arrow = library("pyarrow")
    batch = arrow.RecordBatch.from_pydict({"id": IDS, "ok": [True, False, True, True]})

    (part,) = split_batch(batch, 1)

    assert (part["id"].tolist(), part["ok"].dtype) == (IDS, np.bool_)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_column_of_text_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"Leaf \['name'\] is a .*Drop the column, or convert"):
        split_batch(table(name, {"id": [1, 2], "name": ["a", "b"]}), 2)


def test_paths_of_columns_are_made_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes microseconds: for every leaf of a table of 1000 columns they took seconds."""
    calls = []

    def counted(structure: Any) -> list[str]:
        calls.append(structure)
        return [str(number) for number in range(50)]

    for name in ("paths", "paths_of"):
        monkeypatch.setattr(_batches, name, counted)
    reader = BatchReader("batch", "here")
    for _ in range(3):
        arrays, _spec = reader.read({f"c{number}": memoryview(b"ab") for number in range(50)})
        assert len(arrays) == 50

    assert len(calls) == 1


def test_two_columns_of_one_name_are_refused() -> None:
    pandas = library("pandas")
    data = pandas.DataFrame(np.ones((2, 2)), columns=["a", "a"])

    with pytest.raises(ValueError, match="several columns named 'a'"):
        ar.ArrayDataset(data, 1)


def test_a_lazy_frame_is_refused() -> None:
    polars = library("polars")

    with pytest.raises(TypeError, match=r"LazyFrame has no data yet.*collect\(\)"):
        split_batch(polars.LazyFrame({"a": [1]}), 1)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.asyncio
async def test_examples_of_a_table_can_be_put_together(name: str) -> None:
    batch = table(name, {"id": IDS})

    made = [b async for b in ar.Dataset([batch, batch]).batch(2)]

    assert made[0]["id"].shape == (2, 4)


def test_none_of_them_is_imported() -> None:
    """A batch of other leaves asks for nothing that was not imported by the program."""
    before = {name for name in LIBRARIES if name in sys.modules}

    split_batch({"x": np.ones(2), "y": memoryview(b"ab")}, 2)

    assert {name for name in LIBRARIES if name in sys.modules} == before
