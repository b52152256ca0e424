"""Pickles of what goes to device processes and to workers, with large buffers apart and with names.

The pickler is cloudpickle's, with protocol 5. What an object refers to by name (`Carrier.refer`) is
not copied at all. In a parcel, buffers that pickle finds on its own (those of NumPy arrays among
them) are copied once, into extents of the sender's arena; the receiver's arrays lie there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, Literal, NamedTuple, Protocol, final

import cloudpickle
import numpy as np

from ...context import CARRIER
from ...tree import Array
from ._context_variables import reduce_var
from ._segments import SHARED_BYTES, Arena, Bytes, Extent

Reduced = tuple[Callable[..., object], tuple[object, ...]]

SEPARATE_BYTES = 64 * 1024
"""Smaller buffers go with the pickle: one apart takes Dask as long as copying so many bytes."""

PLAIN_KINDS = frozenset("biufc")  # of dtypes that a character says all of


@final
class Parcel(NamedTuple):
    """Pickled object with its buffers.

    Attributes:
        payload: The pickle, or where it lies if it is large.
        buffers: Where its buffers lie, in order.
    """

    payload: bytes | Extent
    buffers: tuple[Extent, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that were copied."""
        payload = self.payload
        first = len(payload) if isinstance(payload, bytes) else payload.num_bytes
        return first + sum(extent.num_bytes for extent in self.buffers)


class Naming(Protocol):
    """Rule of pickling for objects that go by name instead of being copied."""

    def refer(self, thing: Any) -> Reduced:
        """Name an object that asks for it; `named` gives what has that name on the other side."""

    def reduced(self, thing: Any) -> Reduced | None:
        """Name an object that does not ask; None if it is to be copied."""


class Side(Naming, Protocol):
    """One side of the way between a device and its process."""

    def view(self, extent: Extent) -> Bytes:
        """Return an extent that the other side has written as an array."""

    def find(self, name: int | str) -> object:
        """Return what a name stands for on this side."""


def pack(thing: object, arena: Arena, side: Side) -> Parcel:
    """Pickle an object into a parcel; on failure nothing stays in the arena.

    Raises:
        NoSharedMemoryError: If there is no shared memory for it.
        Exception: Whatever pickling raises.
    """
    extents: list[Extent] = []

    def put(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SHARED_BYTES:
            return True  # goes with the pickle
        extents.append(arena.put(raw))
        return False

    try:
        data = dumps(thing, side, put)
        if len(data) < SHARED_BYTES:
            return Parcel(data, tuple(extents))
        payload = arena.put(data)
        return Parcel(payload, tuple(extents))
    except BaseException:
        for extent in extents:
            arena.free(extent)
        raise


def unpack(parcel: Parcel, side: Side) -> Any:
    """Build the objects of a parcel anew."""
    payload = parcel.payload
    data: object = payload if isinstance(payload, bytes) else side.view(payload)
    return loads(data, [side.view(extent) for extent in parcel.buffers], side)


def loads(data: Any, buffers: Iterable[object], side: Any) -> object:
    """Build an object anew; names in it stand for what they do on this side."""
    token = CARRIER.set(side)
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        CARRIER.reset(token)


def loads_pair(data: bytes, buffers: Iterable[object], side: Any) -> tuple[Any, Any]:
    """Build anew what `dumps_pair` has pickled, from its parts in one piece."""
    token = CARRIER.set(side)
    try:
        unpickler = pickle.Unpickler(io.BytesIO(data), buffers=buffers)
        return unpickler.load(), unpickler.load()
    finally:
        CARRIER.reset(token)


def named(name: int | str) -> Any:
    """Return what a name in a parcel stands for, on the side that unpacks it."""
    side: Any = CARRIER.get()
    return side.find(name)


def dumps(
    thing: object, side: Naming, put: Callable[[pickle.PickleBuffer], bool] | None = None
) -> bytes:
    """Pickle an object; without `put` buffers are left out, which tells whether it can be."""
    file = io.BytesIO()
    token = CARRIER.set(side)
    try:
        _Pickler(file, put or (lambda _buffer: False), side).dump(thing)
    finally:
        CARRIER.reset(token)
    return file.getvalue()


def dumps_pair(
    first: object, second: object, side: Naming, put: Callable[[pickle.PickleBuffer], bool]
) -> tuple[bytes, bytes]:
    """Pickle two objects in a part each; what both refer to is one object on the other side.

    The first part does not depend on the second object.
    """
    file = io.BytesIO()
    token = CARRIER.set(side)
    try:
        pickler = _Pickler(file, put, side)
        pickler.dump(first)
        end = file.tell()
        pickler.dump(second)
    finally:
        CARRIER.reset(token)
    data = file.getvalue()
    return data[:end], data[end:]


def put_apart(buffers: list[Any]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a callback of pickling that keeps large buffers here, not in the pickle."""

    def put(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SEPARATE_BYTES:
            return True
        buffers.append(np.frombuffer(raw, np.uint8))
        return False

    return put


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles functions by value where their module cannot be imported, and some things by name."""

    def __init__(
        self,
        file: io.BytesIO,
        put: Callable[[pickle.PickleBuffer], bool],
        side: Naming,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=put)
        self._reduced = side.reduced

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled, where that is not the usual way."""
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if obj is _restore_plain:
            return NotImplemented  # cloudpickle would look for it in a slower way
        reduced = self._reduced(obj)
        if reduced is not None:
            return reduced
        if kind is ContextVar:
            return reduce_var(obj)
        if kind is CodeType:  # of a function that goes by value
            make, parts, *_ = self.dispatch_table[CodeType](obj)
            return _restore_code, (make, parts, obj.co_filename)
        return super().reducer_override(obj)


def _restore_code(
    make: Callable[..., CodeType], parts: tuple[object, ...], filename: str
) -> CodeType:
    """Build code with the name of its file, which cloudpickle 3.1.3 and later leave out.

    Tracebacks, warnings and log records of an op name the line that the user wrote.
    """
    return make(*parts).replace(co_filename=filename)


def _reduce_array(array: Array) -> object:
    """Return how an array is pickled: plain ones in fewer parts than NumPy makes of them."""
    flags = array.flags
    if flags.c_contiguous or flags.f_contiguous:
        dtype = array.dtype
        if dtype.kind not in PLAIN_KINDS or not dtype.isnative or not array.size:
            return NotImplemented
        order = "C" if flags.c_contiguous else "F"
        buffer: Any = array  # NumPy's types do not say that it is one
        return _restore_plain, (pickle.PickleBuffer(buffer), dtype.char, array.shape, order)
    return NotImplemented if array.dtype.hasobject else _reduce_strided(array)


def _restore_plain(data: Any, char: str, shape: tuple[int, ...], order: Literal["C", "F"]) -> Array:
    return np.frombuffer(data, char).reshape(shape, order=order)


def _reduce_strided(array: Array) -> Reduced:
    """Send an array with gaps as one without, in the order in which its elements lie.

    That order is the one in which NumPy adds them up, so results stay the same bit by bit.
    """
    forward = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)
    packed = np.copy(array[forward], order="K")
    order = tuple(sorted(range(array.ndim), key=lambda axis: -packed.strides[axis]))
    flat = np.ascontiguousarray(packed.transpose(order))
    flat.flags.writeable = array.flags.writeable
    steps = tuple(each.step for each in forward)
    return _restore_order, (flat, tuple(np.argsort(order).tolist()), steps)


def _restore_order(flat: Array, order: tuple[int, ...], steps: tuple[int, ...]) -> Array:
    return flat.transpose(order)[tuple(slice(None, None, step) for step in steps)]


def obstacle(things: Mapping[str, object], side: Naming, error: Exception) -> tuple[str, Exception]:
    """Say which of some objects cannot be pickled, and return what pickling it raised.

    Args:
        things: The objects, by what they are called.
        side: Names objects, as it did when they were pickled.
        error: What was raised then.
    """
    found = _find_obstacle(things, side)
    if found is None:  # each of them can
        return f"it cannot be pickled: {error}", error
    where, thing, reason = found
    kind = type(thing)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where} (a {module}{kind.__qualname__}) cannot be pickled: {reason}", reason


def _find_obstacle(
    things: Mapping[str, object], side: Naming, depth: int = 6
) -> tuple[str, object, Exception] | None:
    """Return where the obstacle is, in words; the innermost object; and what pickling it raised."""
    for name, thing in things.items():
        try:
            dumps(thing, side)
        except Exception as error:  # noqa: BLE001 - whatever a `__reduce__` raises
            inner = _find_obstacle(_parts(name, thing), side, depth - 1) if depth else None
            return inner or (name, thing, error)
    return None


def _parts(name: str, thing: object) -> dict[str, object]:
    """Return what an object holds, by what a person would call it."""
    code = getattr(thing, "__code__", None)
    if isinstance(code, CodeType):
        return _captured(thing, code)
    if isinstance(thing, Mapping):
        return {f"{name}[{key!r}]": value for key, value in thing.items()}
    if isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
        return {f"{name}[{i}]": value for i, value in enumerate(thing)}
    function = getattr(thing, "__func__", getattr(thing, "func", None))
    parts = {} if function is None else {f"the function of {name}": function}
    owner = getattr(thing, "__self__", None)
    if owner is not None:
        parts[f"the object of {name}"] = owner
    for attribute, value in getattr(thing, "__dict__", {}).items():
        parts[f"{name}.{attribute}"] = value
    return parts


def _captured(function: Any, code: CodeType) -> dict[str, object]:
    parts = {}
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts[f"captured variable {variable!r}"] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    space = function.__globals__
    for variable in sorted(_global_names(code)):
        if variable in space:
            parts[f"global variable {variable!r}"] = space[variable]
    for i, default in enumerate(function.__defaults__ or ()):
        parts[f"default argument {i}"] = default
    return parts


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names
