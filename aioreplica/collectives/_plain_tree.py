"""Trees as plain data, which one worker sends to others that do not know their structure.

What is sent is JSON and the bytes of arrays, never a pickle: nothing that comes from another worker
is executed.
"""

from __future__ import annotations

import numpy as np

from ..tree import Array, Tree, decode, encode
from ._across import Turn, Wire, broadcast_bytes

_SIZE_BYTES = 8


async def broadcast_tree(turn: Turn, value: Tree, root: int) -> Tree:
    """Return the value of one worker on all: arrays, numbers, text, bytes and None, in containers.

    Args:
        turn: Of the collective.
        value: A tree of lists, tuples and dicts; of the others nothing is read.
        root: Whose value it is.

    Raises:
        TypeError: If the value holds something else; on the worker that sends it.
    """
    import json  # a first run needs none

    data, arrays = (b"", []) if turn.rank != root else packed_tree(value)

    async def carry(wire: Wire, slots: list[bytes]) -> object:
        size = int.from_bytes(slots[root], "little")
        header = json.loads(await broadcast_bytes(wire, data, size, root))
        found: list[Array] = []
        for dtype, shape in header["arrays"]:
            num_bytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
            own = arrays[len(found)].tobytes() if arrays else b""
            raw = await broadcast_bytes(wire, own, num_bytes, root)
            found.append(np.frombuffer(raw, dtype).reshape(shape))
        return decode(header["tree"], found)

    return await turn.exchange(len(data).to_bytes(_SIZE_BYTES, "little"), carry)


def packed_tree(value: Tree) -> tuple[bytes, list[Array]]:
    """Return a tree as JSON, and the arrays that it names by number.

    Raises:
        TypeError: If it holds something else than arrays, numbers, text, bytes and None.

    Example:
        >>> packed_tree({"a": (1, None)})[0]
        b'{"tree": {"a": {"$tuple": [1, null]}}, "arrays": []}'
    """
    import json

    arrays: list[Array] = []

    def leaf(each: object) -> object:
        if type(each) is complex:
            return {"$complex": repr(each)}
        if not isinstance(each, (np.ndarray, np.generic)) or each.dtype.kind not in "biufcUS":
            raise TypeError(
                f"Other workers can be sent NumPy arrays, numbers, text, bytes and None in lists, "
                f"tuples and dicts, got {each!r} ({type(each).__name__}). Send what it is made of."
            )
        arrays.append(np.asarray(each, order="C"))
        return {"$scalar" if isinstance(each, np.generic) else "$tensor": len(arrays) - 1}

    tree = encode(value, leaf)
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    return json.dumps({"tree": tree, "arrays": described}).encode(), arrays
