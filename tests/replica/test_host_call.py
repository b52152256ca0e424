"""The end of a function that a device thread has the event loop run: its result, or its error."""

import asyncio
from contextvars import copy_context
from typing import Any

import pytest

from aioreplica.devices import new_gate
from aioreplica.replica._host_call import HostCall


def fail(error: BaseException) -> None:
    raise error


def call_of(fn: Any, *args: Any) -> HostCall:
    return HostCall(fn, args, copy_context(), "call", new_gate(asyncio.get_running_loop()))


@pytest.mark.asyncio
async def test_a_plain_function_gives_its_result_or_its_error() -> None:
    error = ValueError("of the call")
    good, bad = call_of(max, 3, 4), call_of(fail, error)
    good.begin()
    bad.begin()

    assert good.result() == 4
    with pytest.raises(ValueError, match="of the call") as caught:
        bad.result()
    assert caught.value is error
    assert bad.result() is None  # which keeps no error, nor the frames of its traceback


@pytest.mark.asyncio
async def test_a_call_that_was_cancelled_before_it_began_does_not_begin() -> None:
    began: list[int] = []
    call = call_of(began.append, 1)
    call.cancel()
    call.begin()

    with pytest.raises(asyncio.CancelledError):
        call.result()
    assert began == []
