"""Trees as plain data, which one worker sends to others that do not know their structure.

What is sent is JSON and the bytes of arrays, never a pickle: nothing that comes from another worker
is executed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._across import Turn, Wire, broadcast_bytes

_SIZE_BYTES = 8


async def broadcast_tree(turn: Turn, value: Any, root: int) -> Any:
    """Return the value of one worker on all: arrays, numbers, text and None, in containers.

    Args:
        turn: Of the collective.
        value: A tree of lists, tuples and dicts with text as keys; of the others nothing is read.
        root: Whose value it is.

    Raises:
        TypeError: If the value holds something else; on the worker that sends it.
    """
    import json  # a first run needs none

    data, arrays = (b"", []) if turn.rank != root else packed_tree(value)

    async def carry(wire: Wire, slots: list[bytes]) -> Any:
        size = int.from_bytes(slots[root], "little")
        header = json.loads(await broadcast_bytes(wire, data, size, root))
        found: list[npt.NDArray[Any]] = []
        for dtype, shape in header["arrays"]:
            num_bytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
            own = arrays[len(found)].tobytes() if arrays else b""
            raw = await broadcast_bytes(wire, own, num_bytes, root)
            found.append(np.frombuffer(raw, dtype).reshape(shape))
        return _unpacked(header["tree"], found)

    return await turn.exchange(len(data).to_bytes(_SIZE_BYTES, "little"), carry)


def packed_tree(value: Any) -> tuple[bytes, list[npt.NDArray[Any]]]:
    """Return a tree as JSON, and the arrays that it names by number.

    Raises:
        TypeError: If it holds something else than arrays, numbers, text and None.

    Example:
        >>> packed_tree({"a": (1, None)})[0]
        b'{"tree": {"d": {"a": {"t": [1, null]}}}, "arrays": []}'
    """
    import json

    arrays: list[npt.NDArray[Any]] = []
    tree = _packed(value, arrays)
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    return json.dumps({"tree": tree, "arrays": described}).encode(), arrays


def _packed(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"i": str(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is list:
        return {"l": [_packed(each, arrays) for each in value]}
    if kind is tuple:
        return {"t": [_packed(each, arrays) for each in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"d": {key: _packed(each, arrays) for key, each in value.items()}}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcUS":
        arrays.append(np.ascontiguousarray(value))
        return {"a": [len(arrays) - 1, isinstance(value, np.generic), list(np.shape(value))]}
    raise TypeError(
        f"Other workers can be sent NumPy arrays, numbers, text and None in lists, tuples and "
        f"dicts, got {value!r} ({kind.__name__}). Send what it is made of."
    )


def _unpacked(tree: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "i":
        return int(content)
    if kind == "f":
        return float.fromhex(content)
    if kind == "l":
        return [_unpacked(each, arrays) for each in content]
    if kind == "t":
        return tuple(_unpacked(each, arrays) for each in content)
    if kind == "d":
        return {key: _unpacked(each, arrays) for key, each in content.items()}
    number, is_scalar, shape = content
    array = arrays[number].reshape(shape)
    return array[()] if is_scalar else array
