"""States on parameter servers of Dask: an actor keeps one, and handles call it.

Calls of a state are one at a time, in the thread that Dask has for actors. What waits does so on
the event loop of Dask's worker, beside them.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, final

import numpy as np

from ..context import REGISTRY
from ..devices import OwnedTask
from ..errors import WorkerLostError
from ._closures import ClosureWorker, StateHandle
from ._dask_processes import load_dask


@final
class DaskHost:
    """The actor: keeps a state, and tells its errors from those of the connection.

    Args:
        data: The pickled factory and its arguments.
    """

    def __init__(self, data: bytes) -> None:
        factory, args = pickle.loads(data)
        self._state = factory(*args)

    def call(self, data: bytes, *buffers: Any) -> _Answer:
        """Return the result of a method, or what it raised.

        Args:
            data: The pickled name of the method, and its arguments.
            buffers: Those of the pickle.
        """
        try:
            method, args = pickle.loads(data, buffers=buffers)
            arrived = [a.arrived() if isinstance(a, _SentHandle) else a for a in args]
            return _Answer(getattr(self._state, method)(*arrived))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return _Answer(error=_that_arrives(error))

    async def wait(self, data: bytes, *buffers: Any) -> _Answer:
        """Do the same with a method that returns a future, beside `call`."""
        try:
            method, args = pickle.loads(data, buffers=buffers)
            return _Answer(await asyncio.wrap_future(getattr(self._state, method)(*args)))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return _Answer(error=_that_arrives(error))


@final
class _Answer(NamedTuple):
    """Result of a call, or what it raised.

    A class of its own, as Dask takes plain tuples and lists apart and serializes each part by
    itself, which takes as long again.
    """

    result: Any = None
    error: Exception | None = None


def _that_arrives(error: Exception) -> Exception:
    """Return an error, or its words if it cannot be sent: Dask would break the connection then."""
    try:
        pickle.loads(load_dask().protocol.pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        words = "".join(traceback.format_exception_only(error)).strip()
        return RuntimeError(f"{words} (it cannot be pickled and built anew as it is)")
    return error


@final
class _SentHandle(NamedTuple):
    """A handle on its way to a state.

    Made there in the thread of the call: an actor looks in its thread for the worker that it is on.
    """

    owner: str
    server: int
    actor: bytes

    def arrived(self) -> DaskState:
        return DaskState(self.owner, self.server, pickle.loads(self.actor))


async def actor_of(client: Any, future: Any) -> object:
    with client.as_current():  # an actor looks for it
        return await future


@final
class DaskState(StateHandle):
    def __init__(
        self, owner: str, server: int, actor: Any, client: Any = None, future: object = None
    ) -> None:
        self.server = server
        self.place: str = actor._address
        self._actor = actor
        self._client = client  # None on workers, where actors find their own
        self._future = future  # keeps the actor alive
        self._is_lost: asyncio.Future[None] | None = None
        if client is not None:
            self._is_lost = asyncio.get_running_loop().create_future()
        # An actor whose worker is gone waits for its future, which would wait for ever: no other
        # worker may have it.
        actor._future = None
        data = pickle.dumps(actor, protocol=5)
        self._reduced = _state_on_worker, (owner, server, actor.key, data)
        self._sent = _SentHandle(owner, server, data)

    def lose(self) -> None:
        """Learn that its worker is gone."""
        if self._is_lost is not None and not self._is_lost.done():
            self._is_lost.set_result(None)

    @property
    def is_lost(self) -> bool:
        return self._is_lost is not None and self._is_lost.done()

    def when_lost(self, tell: Callable[[], object]) -> None:
        assert self._is_lost is not None
        self._is_lost.add_done_callback(lambda _lost: tell())

    async def call(self, method: str, *args: Any, is_wait: bool = False) -> Any:
        """Call in the program, until the scheduler says that the worker is gone.

        A connection to it would be tried again and again, for half a minute.
        """
        assert self._is_lost is not None
        calling = OwnedTask[Any](self._call(method, args, is_wait), f"call of server {self.server}")
        try:
            await asyncio.wait([calling.task, self._is_lost], return_when=asyncio.FIRST_COMPLETED)
            if calling.is_done:
                return await calling
        finally:
            calling.cancel()
        raise self._lost(ConnectionError("its process is gone"))

    async def _call(self, method: str, args: tuple[Any, ...], is_wait: bool) -> object:
        data, buffers = _pickled(method, args)
        try:
            with self._client.as_current():
                pending = (self._actor.wait if is_wait else self._actor.call)(data, *buffers)
            result, error = await pending
        except Exception as failure:
            raise self._lost(failure) from failure
        if error is not None:
            raise error
        return result

    def begin(self, method: str, *args: Any, is_wait: bool = False) -> Callable[[], Any]:
        """Send as an actor of Dask does, but the pickle as it is, and with one hop to the loop."""
        data, buffers = _pickled(method, args)
        try:
            worker = self._actor._worker
            asking = worker.rpc(self.place).actor_execute(
                actor=self._actor.key,
                function="wait" if is_wait else "call",
                args=[data, *map(load_dask().protocol.to_serialize, buffers)],
                kwargs={},
            )
            pending = asyncio.run_coroutine_threadsafe(asking, worker.loop.asyncio_loop)
        except Exception as failure:
            raise self._lost(failure) from failure

        def finish() -> object:
            try:
                answer = pending.result()
                if answer["status"] != "OK":
                    raise answer["exception"]
                result, error = answer["result"]
            except Exception as failure:
                raise self._lost(failure) from failure
            if error is not None:
                raise error
            return result

        return finish

    def _lost(self, failure: Exception) -> WorkerLostError:
        return WorkerLostError(
            f"Parameter server {self.server} was lost: {failure}", ranks=(self.server,)
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


def _pickled(method: str, args: tuple[Any, ...]) -> tuple[bytes, list[Any]]:
    """Pickle a call; its large buffers stay apart.

    Raises:
        Exception: Whatever pickling raises.
    """
    from ..devices.processes import put_apart  # it needs cloudpickle, as Dask does

    call = method, tuple(each._sent if isinstance(each, DaskState) else each for each in args)
    buffers: list[Any] = []
    with suppress(Exception):
        data: bytes = pickle.dumps(call, 5, buffer_callback=put_apart(buffers))
        if b"__main__" not in data:
            return data, buffers
    apart: list[pickle.PickleBuffer] = []  # what the other process cannot import goes by value
    data = load_dask().protocol.pickle.dumps(call, buffer_callback=apart.append, protocol=5)
    return data, [np.frombuffer(each.raw(), np.uint8) for each in apart]


def _state_on_worker(owner: str, server: int, key: str, actor: bytes) -> DaskState:
    """Return a worker's handle of a state, one for all tasks: each new actor asks the scheduler."""
    worker = closure_worker()
    return worker.once(owner, key, lambda: DaskState(owner, server, _actor_on_worker(actor)))


def _actor_on_worker(actor: bytes) -> Any:
    """Return an actor, through a client that its worker makes for the first one.

    The client takes it for an error if the scheduler tells it of something in the message that
    answers its registration (an AssertionError in distributed 2026.8): once more, it is in time.
    """
    try:
        return pickle.loads(actor)
    except AssertionError:
        return pickle.loads(actor)


def closure_worker(worker: Any = None) -> ClosureWorker:
    name = str((load_dask().get_worker() if worker is None else worker).name)
    return REGISTRY.once(f"closure_worker:{name}", lambda: ClosureWorker(name))
