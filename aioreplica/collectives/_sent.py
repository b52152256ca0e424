"""Leaves as they go to other workers: how they are described, and the cells of small ones.

What decides the bytes on the wire and what workers compare are one description, `sent_text`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj
from array_api_compat import device as device_of

from ..devices.backends import backend_of
from ..tree import Array
from ..values import IndexedSlices
from ._kind import half_dtype, narrowed

SLOT_BYTES = 384
"""What a frame has room for."""

NUMBERS = (bool, int, float, complex)
CELL = struct.Struct("<c16s")
_NUMBER_BYTES = 16


def sent_text(leaf: Any) -> str:
    """Describe a leaf by what decides the bytes that are sent of it: kind, dtype and shape.

    Python numbers, and the scalars of NumPy that are such numbers too (float64, complex128), are
    all sent with their kind in cells of one size.

    Example:
        >>> import numpy as np
        >>> sent_text(2), sent_text(np.float64(2)), sent_text(np.float32(2)), sent_text(np.ones(3))
        ('number', 'number', 'float32[]', 'float64[3]')
    """
    if type(leaf) is np.ndarray:
        return form_text(leaf.dtype, leaf.shape)
    if isinstance(leaf, NUMBERS):
        return "number"
    if isinstance(leaf, IndexedSlices):
        return f"IndexedSlices of {leaf.dtype}{list(leaf.dense_shape)}"
    array = np.asarray(leaf)
    return form_text(array.dtype, array.shape)


@lru_cache(maxsize=1024)
def form_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Describe an array by dtype and shape."""
    return f"{dtype}{list(shape)}"


def joined_form(array: Array, axis: int) -> str:
    """Describe an array whose size along an axis may differ."""
    shape = list(array.shape)
    shape[axis] = -1
    return f"{array.dtype}{shape}"


def sent_form(leaf: Any) -> Any:
    """Return a leaf as it is sent: a number, a NumPy array or an IndexedSlices."""
    if isinstance(leaf, (*NUMBERS, IndexedSlices)):
        return leaf
    array = leaf if type(leaf) is np.ndarray else host_array(leaf)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def host_array(leaf: Any) -> Array:
    """Return an array of any library as one of NumPy."""
    if is_array_api_obj(leaf) and not isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(backend_of(leaf).get(leaf))
    return np.asarray(leaf)


def as_before(new: Any, leaf: Any) -> Any:
    """Return a result in the library, on the device and in the half precision of what was sent."""
    if type(leaf) is np.ndarray:
        return new
    if isinstance(leaf, np.generic):
        return np.asarray(new)[()]
    if type(new) is not np.ndarray or not is_array_api_obj(leaf) or isinstance(leaf, np.ndarray):
        return new
    own = array_namespace(leaf).asarray(new.copy(), device=device_of(leaf))
    half = half_dtype(leaf)  # bfloat16 of torch, which NumPy lacks, was sent as float32
    return own if half is None else narrowed(own, half)


def bytes_of(array: Array) -> Array:
    """Return a copy of an array's bytes."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def indices_in_slot(sent: Sequence[Any]) -> list[int]:
    """Return which leaves go in the slot: all if it has room for them, else the numbers."""
    numbers = [i for i, leaf in enumerate(sent) if isinstance(leaf, NUMBERS)]
    size = len(numbers) * CELL.size
    if size > SLOT_BYTES:
        return []
    for leaf in sent:
        if isinstance(leaf, IndexedSlices):
            return numbers
        size += leaf.nbytes if type(leaf) is np.ndarray else 0
    return list(range(len(sent))) if size <= SLOT_BYTES else numbers


def as_bytes(leaf: Any) -> bytes:
    """Return what goes into a slot for an array or a number."""
    return leaf.tobytes() if type(leaf) is np.ndarray else cell_of(leaf)


def unpacked(slot: bytes, like: Sequence[Any]) -> list[Any]:
    """Take apart what another worker has put into its slot for the same leaves."""
    found: list[Any] = []
    start = 0
    for leaf in like:
        if type(leaf) is np.ndarray:
            stop = start + leaf.nbytes
            found.append(np.frombuffer(slot[start:stop], leaf.dtype).reshape(leaf.shape))
        else:
            stop = start + CELL.size
            found.append(_number(slot[start:stop]))
        start = stop
    return found


def cell_of(number: Any) -> bytes:
    """Return a Python number with its kind in a few bytes."""
    if isinstance(number, bool):
        return CELL.pack(b"b", bytes([number]))
    if isinstance(number, int):
        try:
            return CELL.pack(b"i", number.to_bytes(_NUMBER_BYTES, "little", signed=True))
        except OverflowError:
            raise OverflowError(
                f"{number} has more than {8 * _NUMBER_BYTES} bits, which do not go to other "
                "workers. Pass a float."
            ) from None
    if isinstance(number, float):
        return CELL.pack(b"f", struct.pack("<d", number))
    return CELL.pack(b"c", struct.pack("<dd", number.real, number.imag))


def _number(cell: bytes) -> Any:
    kind, data = CELL.unpack(cell)
    if kind == b"b":
        return bool(data[0])
    if kind == b"i":
        return int.from_bytes(data, "little", signed=True)
    if kind == b"f":
        return struct.unpack("<d", data[:8])[0]
    return complex(*struct.unpack("<dd", data))
