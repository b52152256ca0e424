"""Trees as JSON: everything comes back as it was, and nothing else is read."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.tree import decode, encode

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)
)
names = st.one_of(st.integers(), st.text(max_size=3), st.sampled_from(["$tuple", "$items", "$x"]))
trees = st.recursive(
    plain,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(names, children, max_size=3),
    ),
    max_leaves=8,
)


def refuse(leaf: Any) -> Any:
    raise TypeError(f"{leaf!r} is not plain")


@pytest.mark.xslow
@given(tree=trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    text = json.dumps(encode(tree, refuse), allow_nan=False)
    assert repr(decode(json.loads(text), [])) == repr(tree)  # of NaN, -0.0, and 1 beside True


def test_other_leaves_and_kinds_of_containers_are_for_the_caller() -> None:
    class Pair(tuple[int, int]):
        __slots__ = ()

    kept: list[Any] = []

    def keep(leaf: Any) -> Any:
        kept.append(leaf)
        return {"$tensor": len(kept) - 1}

    thing, pair = object(), Pair((1, 2))
    found = encode({"a": [thing], "b": pair}, keep)
    assert found == {"a": [{"$tensor": 0}], "b": {"$tensor": 1}}
    assert decode(found, kept) == {"a": [thing], "b": pair}
    with pytest.raises(TypeError, match="not plain"):
        encode((1, [thing]), refuse)


@given(
    tag=st.sampled_from(["$float", "$bytes", "$tuple", "$items", "$tensor", "$scalar", "$array"]),
    content=st.recursive(plain, lambda children: st.lists(children, max_size=2), max_leaves=4),
)
def test_what_nobody_has_written_is_an_error_or_plain_data(tag: str, content: Any) -> None:
    with suppress(ValueError, TypeError, LookupError):
        decode({tag: content}, [])
