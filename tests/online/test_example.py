"""Examples: what is taken, how it is checked, stored and stacked."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioreplica.online import ExampleSpec
from aioreplica.online._example import as_example, pack_example, stack_examples, unpack_example
from aioreplica.tree import leaves

numbers = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.just(float("nan")),
)
arrays = hnp.arrays(
    st.sampled_from([np.bool_, np.int8, np.int64, np.uint16, np.float16, np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
examples = st.recursive(
    st.one_of(numbers, arrays),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.dictionaries(
            st.text(max_size=4).filter(lambda s: not s.startswith("$")),
            children,
            min_size=1,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=40)
@given(example=examples)
def test_an_example_comes_back_from_the_journal_as_it_was(example: Any) -> None:
    kept = as_example(example)
    packed = pack_example(kept)
    found = unpack_example(packed)
    assert pack_example(found) == packed
    for mine, theirs in zip(leaves(kept), leaves(found), strict=True):
        assert type(mine) is type(theirs)
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    again, stacked = leaves(stack_examples([kept, found])), leaves(kept)
    for batch, leaf in zip(again, stacked, strict=True):
        assert batch.shape == (2, *np.shape(leaf))
        assert batch[0].tobytes() == np.asarray(leaf, batch.dtype).tobytes()


@given(data=st.binary(max_size=300), flips=st.lists(st.integers(0, 10**6), max_size=4))
def test_damaged_rows_are_refused_or_read_and_nothing_else(data: bytes, flips: list[int]) -> None:
    whole = bytearray(pack_example(as_example({"x": np.arange(3.0), "y": (1, 2.0)})))
    for flip in flips:
        whole[flip % len(whole)] ^= 1 << (flip % 8)
    for row in (bytes(whole), data, bytes(whole[: len(data)])):
        with suppress(ValueError):
            unpack_example(row)


def test_later_writes_of_the_caller_do_not_change_an_example() -> None:
    array = np.zeros(3)
    kept = as_example({"x": array})
    array[:] = 7.0
    assert kept["x"].sum() == 0.0
    frozen = np.ones(2)
    frozen.flags.writeable = False
    assert as_example(frozen) is frozen


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("text", TypeError),
        (None, TypeError),
        ({"x": object()}, TypeError),
        ({3: 1.0}, TypeError),
        ({"$array": "0"}, TypeError),
        (np.array(["a"]), TypeError),
        (np.array([object()]), TypeError),
        (np.ma.masked_array([1.0], [True]), TypeError),
        ({1.0, 2.0}, TypeError),
        (1j, TypeError),
        (2**63, ValueError),
        ([], ValueError),
        ({"x": {}}, ValueError),
    ],
)
def test_objects_of_other_types_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="n example"):
        as_example(wrong)


def test_nesting_is_bounded() -> None:
    deep: Any = 1.0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="at most 32 levels"):
        as_example(deep)
    spec = ExampleSpec({"x": np.zeros(2)})
    with pytest.raises(ValueError, match=r"\['x'\]"):
        spec({"x": deep})
    while isinstance(deep, list):  # taken apart by hand: the interpreter would recurse
        deep = deep[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "The example is .* expected an object"),
        ({"x": [0.0, 1.0], "y": 1, "z": 1}, r"the keys \['x', 'y', 'z'\], expected \['x', 'y'\]"),
        ({"x": [0.0], "y": 1}, r"\['x'\] has shape \(1,\), expected \(2,\)"),
        ({"x": [[0.0], [1.0, 2.0]], "y": 1}, r"\['x'\] is not an array of shape \(2,\)"),
        ({"x": ["a", "b"], "y": 1}, "something else than numbers"),
        ({"x": [None, 1.0], "y": 1}, "something else than numbers"),
        ({"x": "ab", "y": 1}, "something else than numbers|shape"),
        ({"x": [0.0, float("nan")], "y": 1}, "NaN"),
        ({"x": [0.0, 1e39], "y": 1}, "beyond float32"),
        ({"x": [0.0, 1.0], "y": 1.5}, r"\['y'\] is 1.5 \(float\), expected int"),
        ({"x": [0.0, 1.0], "y": True}, "expected int"),
        ({"x": [0.0, 1.0], "y": 2**70}, "no int64"),
        ({"x": [0.0, 1.0], "y": None}, "expected int"),
        ({"x": [1j, 1.0], "y": 1}, "holds complex128, expected float32"),
    ],
)
def test_mismatches_with_the_template_are_named(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExampleSpec({"x": np.zeros(2, np.float32), "y": 0})(given)


def test_numbers_are_converted_where_nothing_is_lost() -> None:
    spec = ExampleSpec([np.zeros(2, np.int8), (0.0, False)])
    [array, (number, flag)] = spec([[1, -128], [3, True]])
    assert array.dtype == np.int8
    assert (array.tolist(), number, flag) == ([1, -128], 3.0, True)
    assert type(number) is float
    with pytest.raises(ValueError, match="outside -128 to 127"):
        spec([[1, 128], [3, True]])
    with pytest.raises(ValueError, match="2 entries"):
        spec([[1, 2]])
    assert np.isnan(ExampleSpec(0.0, finite=False)(float("nan")))
    assert repr(spec) == "<ExampleSpec [int8[2], (float, bool)]>"


def test_an_example_that_an_older_version_has_packed() -> None:
    """Bytes stay as they are: journals compare those of examples that have one key."""
    stored = (Path(__file__).parent / "stored" / "example.bin").read_bytes()
    example: Any = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": (1, -2.5, True),
        "nested": [float("nan"), float("-inf"), {"h": np.float16(0.5), "z": np.array(2**63 - 1)}],
        "ü": np.zeros((0, 2), np.complex64),
    }
    kept = as_example(example)
    assert pack_example(kept) == stored
    assert repr(unpack_example(stored)) == repr(kept)
