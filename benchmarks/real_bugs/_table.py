"""The bugs: package, last release with the bug, first release without, upstream number, culprit.

Chosen and committed before the kit was tried on any of them; `README.md` says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that was in a release of a package.

    Attributes:
        name: Of the program `programs/<name>.py`.
        package: As the package index names it; "cpython" for the standard library.
        buggy: The last release that has it, or a late one.
        fixed: The first release that has not, or an early one; empty if the newest still has it.
        issue: The upstream issue or pull request.
        culprit: Files and functions that the fix changed: "path/of/file.py:function,function;...".
            A report names the wrong line if it names a line in one of them.
        needs: What else is installed, pinned.
    """

    name: str
    package: str
    buggy: str
    fixed: str
    issue: str
    culprit: str
    needs: tuple[str, ...] = ()


ANYIO: Final = "anyio==4.12.1"
BINARY: Final = "psycopg[binary]==3.2.13"

BUGS: Final = (
    Bug("anyio_condition", "anyio", "4.12.1", "4.14.0", "agronholm/anyio#1075",
        "_core/_synchronization.py:wait"),
    Bug("anyio_lock", "anyio", "4.13.0", "4.14.0", "agronholm/anyio#1145",
        "_backends/_asyncio.py:acquire,release,acquire_nowait"),
    Bug("anyio_semaphore", "anyio", "4.13.0", "4.14.0", "agronholm/anyio#1145",
        "_backends/_asyncio.py:acquire,release,acquire_nowait"),
    Bug("anyio_limiter_cancelled", "anyio", "4.9.0", "4.10.0", "agronholm/anyio#947",
        "_backends/_asyncio.py:acquire_on_behalf_of,release_on_behalf_of"),
    Bug("anyio_limiter_overgrant", "anyio", "4.14.1", "4.14.2", "agronholm/anyio#1170",
        "_backends/_asyncio.py:acquire_on_behalf_of,acquire_on_behalf_of_nowait,_notify_next_waiter"),
    Bug("anyio_started_twice", "anyio", "4.3.0", "4.4.0", "agronholm/anyio#706",
        "_backends/_asyncio.py:started"),
    Bug("redis_wrong_reply", "redis", "4.5.2", "5.0.0", "redis/redis-py#2624",
        "redis/asyncio/client.py:execute_command,_send_command_parse_response,"
        "_disconnect_raise,_try_send_command_parse_response", (ANYIO,)),
    Bug("redis_blocking_pool", "redis", "5.0.1", "5.1.0", "redis/redis-py#2997",
        "redis/asyncio/connection.py:get_connection", (ANYIO,)),
    Bug("redis_shared_client", "redis", "6.4.0", "7.0.0", "redis/redis-py#3512",
        "redis/asyncio/client.py:__aexit__,__aenter__,aclose", (ANYIO,)),
    Bug("redis_lock_release", "redis", "7.1.1", "7.2.0", "redis/redis-py#3847",
        "redis/asyncio/lock.py:release,do_release", (ANYIO,)),
    Bug("redis_pipeline_reset", "redis", "8.0.0", "8.0.1", "redis/redis-py#4123",
        "redis/asyncio/client.py:reset", (ANYIO,)),
    Bug("httpcore_cancelled_request", "httpcore", "0.17.2", "0.17.3", "encode/httpcore#726",
        "_async/connection_pool.py:handle_async_request,response_closed", (ANYIO,)),
    Bug("httpcore_cancelled_waiter", "httpcore", "1.0.2", "1.0.3", "encode/httpcore#880",
        "_async/connection_pool.py:handle_async_request,response_closed,"
        "_attempt_to_acquire_connection", (ANYIO,)),
    Bug("httpcore_closed_while_waiting", "httpcore", "0.17.0", "0.17.1", "encode/httpcore#680",
        "_async/connection_pool.py:handle_async_request", (ANYIO,)),
    Bug("aiohttp_connector", "aiohttp", "3.10.10", "", "aio-libs/aiohttp#9670",
        "aiohttp/connector.py:connect,_wait_for_available_connection,_release_waiter", (ANYIO,)),
    Bug("aiohttp_ws_cancelled_send", "aiohttp", "3.13.1", "3.13.2", "aio-libs/aiohttp#11725",
        "aiohttp/_websocket/writer.py:send_frame", (ANYIO,)),
    Bug("aiohttp_ws_two_senders", "aiohttp", "3.9.0", "3.9.1", "aio-libs/aiohttp#7865",
        "aiohttp/compression_utils.py:compress;aiohttp/http_websocket.py:_send_frame", (ANYIO,)),
    Bug("psycopg_pool_cancelled_wait", "psycopg_pool", "3.1.6", "3.1.7", "psycopg/psycopg#503",
        "psycopg_pool/pool_async.py:getconn,wait,_add_to_pool", (ANYIO, BINARY)),
    Bug("psycopg_pool_close", "psycopg_pool", "3.2.1", "3.2.2", "psycopg/psycopg#784",
        "psycopg_pool/pool_async.py:close,_close,_add_to_pool", (ANYIO, BINARY)),
    Bug("psycopg_pool_cancelled_check", "psycopg_pool", "3.2.7", "3.2.8", "psycopg/psycopg#1123",
        "psycopg_pool/pool_async.py:_getconn_with_check_loop,_check_connection", (ANYIO, BINARY)),
    Bug("psycopg_pool_handoff", "psycopg_pool", "3.3.0", "3.3.1", "psycopg/psycopg#1275",
        "psycopg_pool/pool_async.py:_getconn_unchecked,wait", (ANYIO, BINARY)),
    Bug("starlette_background", "starlette", "0.20.4", "0.21.0", "encode/starlette#1438",
        "middleware/base.py:__call__,call_next", (ANYIO,)),
    Bug("starlette_stacked", "starlette", "0.38.2", "0.38.3", "encode/starlette#2516",
        "middleware/base.py:__call__,call_next,wrapped_receive", (ANYIO,)),
    Bug("janus_join", "janus", "1.1.0", "1.2.0", "aio-libs/janus#716",
        "janus/__init__.py:join,task_done,_put_internal", (ANYIO,)),
    Bug("async_lru_evicted", "async-lru", "2.0.2", "2.0.3", "aio-libs/async-lru#480",
        "async_lru/__init__.py:_task_done_callback,__call__", (ANYIO,)),
    Bug("async_lru_cleared", "async-lru", "2.0.3", "2.0.4", "aio-libs/async-lru#506",
        "async_lru/__init__.py:_task_done_callback,cache_clear,__call__", (ANYIO,)),
    Bug("async_lru_all_gone", "async-lru", "2.0.5", "2.1.0", "aio-libs/async-lru#697",
        "async_lru/__init__.py:__call__", (ANYIO,)),
    Bug("aiojobs_pending_limit", "aiojobs", "1.0.0", "1.1.0", "aio-libs/aiojobs#135",
        "aiojobs/_scheduler.py:spawn", (ANYIO,)),
    Bug("aiojobs_lost_exception", "aiojobs", "1.3.0", "1.4.0", "aio-libs/aiojobs#546",
        "aiojobs/_scheduler.py:wait_and_close", (ANYIO,)),
    Bug("aiorwlock_two_writers", "aiorwlock", "1.1.0", "1.2.0", "aio-libs/aiorwlock#235",
        "aiorwlock/__init__.py:acquire_write,acquire_read,_wake_up", (ANYIO,)),
    Bug("aiorwlock_cancelled", "aiorwlock", "1.4.0", "1.5.1", "aio-libs/aiorwlock#514",
        "aiorwlock/__init__.py:acquire_write,acquire_read", (ANYIO,)),
    Bug("sse_ping", "sse-starlette", "1.3.4", "1.5.0", "sysid/sse-starlette#55",
        "sse_starlette/sse.py:_ping,stream_response,__call__", (ANYIO, "starlette==0.27.0")),
    Bug("websockets_cancelled_ping", "websockets", "14.1", "14.2",
        "python-websockets/websockets#1566",
        "websockets/asyncio/connection.py:acknowledge_pings,ping", (ANYIO,)),
    Bug("cpython_condition", "cpython", "3.12.1", "3.13.0", "python/cpython#112202",
        "asyncio/locks.py:wait,notify", (ANYIO,)),
    Bug("cpython_task_group", "cpython", "3.12.1", "3.13.0", "python/cpython#116720",
        "asyncio/taskgroups.py:__aexit__", (ANYIO,)),
)  # fmt: skip
QUICK: Final = (
    "anyio_condition",
    "anyio_limiter_cancelled",
    "aiorwlock_cancelled",
    "async_lru_cleared",
)
