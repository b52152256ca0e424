"""Bodies within limits: brackets counted, what is not JSON, whom a request is from."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request

from aioreplica.integrations._request import check, depth, parse

from .asking import scope_of

TEXTS = st.text(alphabet='ab"\\[]{}é\n', max_size=6)
TREES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def depth_of(tree: Any) -> int:
    if isinstance(tree, dict | list):
        parts = tree.values() if isinstance(tree, dict) else tree
        return 1 + max(map(depth_of, parts), default=0)
    return 0


def asked(method: str, headers: dict[str, str]) -> Request:
    return Request(scope_of(method, "/learn", headers))


@given(TREES, st.booleans())
def test_brackets_are_counted_outside_of_texts(tree: Any, is_ascii: bool) -> None:
    assert depth(json.dumps(tree, ensure_ascii=is_ascii).encode()) == depth_of(tree)


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 30_000, b'"' * 60_001, b'["[[' + b"\\"])
def test_a_text_without_an_end_is_passed_over_in_one_go(body: bytes) -> None:
    assert depth(body) <= 1


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
    with pytest.raises(HTTPException) as caught:
        parse(body)

    told: Any = caught.value.detail
    assert caught.value.status_code == 422
    assert reason in told["reasons"][0]["what"]


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
    check(asked("GET", headers), ["127.0.0.1"], None)  # who only reads is not asked

    if is_taken:
        check(asked("POST", headers), ["127.0.0.1"], None)
    else:
        with pytest.raises(HTTPException, match="other sites"):
            check(asked("POST", headers), ["127.0.0.1"], None)


@pytest.mark.parametrize("host", ["", "example.com", "127.0.0.1.example.com:8000", "[", "a@b:1"])
def test_another_name_of_this_address_is_no_name_of_the_service(host: str) -> None:
    with pytest.raises(HTTPException, match="hosts"):
        check(asked("GET", {"host": host}), ["127.0.0.1", "::1"], None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
def test_the_names_of_the_service_are_known_with_any_port(host: str) -> None:
    check(asked("GET", {"host": host}), ["127.0.0.1", "::1", "localhost"], None)


@pytest.mark.parametrize("given_token", ["", "Bearer", "Bearer wrong", "Basic right", "right", "é"])
def test_only_the_token_is_the_token(given_token: str) -> None:
    headers = {"authorization": given_token} if given_token else {}
    with pytest.raises(HTTPException) as caught:
        check(asked("GET", headers), ["*"], "right")

    assert caught.value.status_code == 401
    assert caught.value.headers == {"www-authenticate": "Bearer"}


def test_the_token_lets_in() -> None:
    check(asked("GET", {"authorization": "Bearer right"}), ["*"], "right")
    check(asked("GET", {}), ["*"], None)


def test_a_header_that_is_there_twice_is_refused() -> None:
    scope = scope_of("GET", "/", {})
    scope["headers"] += [(b"authorization", b"Bearer right")] * 2
    with pytest.raises(HTTPException, match="2 times"):
        check(Request(scope), ["*"], "right")
