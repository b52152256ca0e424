"""Bodies within limits: brackets counted in pieces, JSON that is none, whom a request is from."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.integrations._request import (
    Nesting,
    RefusedError,
    check_host,
    check_origin,
    check_token,
    parse,
)

from .asking import scope_of

TEXTS = st.text(alphabet='ab"\\[]{}é\n', max_size=6)
TREES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def depth(tree: Any) -> int:
    if isinstance(tree, dict | list):
        parts = tree.values() if isinstance(tree, dict) else tree
        return 1 + max(map(depth, parts), default=0)
    return 0


def is_within(body: bytes, limit: int, cuts: list[int]) -> bool:
    nesting = Nesting(limit)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    try:
        for start, stop in pairwise(edges):
            nesting.read(body[start:stop])
    except RefusedError:
        return False
    return True


@given(TREES, st.lists(st.integers(0, 300), max_size=8), st.booleans())
def test_brackets_are_counted_wherever_a_body_is_cut(
    tree: Any, cuts: list[int], is_ascii: bool
) -> None:
    body = json.dumps(tree, ensure_ascii=is_ascii).encode()

    assert is_within(body, depth(tree), cuts)
    assert not depth(tree) or not is_within(body, depth(tree) - 1, cuts)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b'{"input": NaN}', "NaN is not a number in JSON"),
        (b"[-Infinity]", "-Infinity is not"),
        (b"\xff", "utf-8"),
        (b"1" * 5000, "digits"),
    ],
)
def test_what_is_no_json_is_refused_with_the_place(body: bytes, reason: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(body)

    assert caught.value.status == 422
    assert reason in caught.value.reasons[0][1]


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({}, True),
        ({"origin": "http://127.0.0.1:8000"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://127.0.0.1:9000"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:8000"}, False),
    ],
)
def test_pages_of_other_sites_do_not_write(headers: dict[str, str], is_taken: bool) -> None:
    scope = scope_of("POST", "/learn", headers)

    if is_taken:
        check_origin(scope)
    else:
        with pytest.raises(RefusedError, match="other sites"):
            check_origin(scope)


@pytest.mark.parametrize("host", ["", "example.com", "127.0.0.1.example.com:8000", "[", "a@b:1"])
def test_another_name_of_this_address_is_no_name_of_the_service(host: str) -> None:
    with pytest.raises(RefusedError, match="hosts"):
        check_host(scope_of("GET", "/", {"host": host}), ["127.0.0.1", "::1"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
def test_the_names_of_the_service_are_known_with_any_port(host: str) -> None:
    check_host(scope_of("GET", "/", {"host": host}), ["127.0.0.1", "::1", "localhost"])


@pytest.mark.parametrize("given_token", ["", "Bearer", "Bearer wrong", "Basic right", "right", "é"])
def test_only_the_token_is_the_token(given_token: str) -> None:
    headers = {"authorization": given_token} if given_token else {}
    with pytest.raises(RefusedError) as caught:
        check_token(scope_of("GET", "/", headers), "right")

    assert caught.value.status == 401
    assert caught.value.headers == {"www-authenticate": "Bearer"}


def test_the_token_lets_in() -> None:
    check_token(scope_of("GET", "/", {"authorization": "Bearer right"}), "right")
    check_token(scope_of("GET", "/", {}), None)


def test_a_header_that_is_there_twice_is_refused() -> None:
    scope = scope_of("GET", "/", {})
    scope["headers"] += [(b"authorization", b"Bearer right")] * 2
    with pytest.raises(RefusedError, match="2 times"):
        check_token(scope, "right")
