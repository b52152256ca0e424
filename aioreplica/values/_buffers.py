"""Using a variable's old buffer again for its next value, when nobody can be reading it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ._variable import Variable

# From CPython 3.14 on a reference held by a local variable may not be counted, and without a GIL
# a count means nothing. There every write allocates.
CAN_COUNT_REFERENCES = (
    sys.version_info < (3, 14) and getattr(sys, "_is_gil_enabled", lambda: True)()
)


def writable_buffer(variable: Variable) -> npt.NDArray[Any]:
    """Return an array of the variable's shape and dtype to build its next value in.

    It is the array before the current one if that is provably unheld: first it is taken out of the
    variable, so no reader can come to it any more; then, if the cell that held it, the tuple in the
    cell and the array have no reference but ours, no reader has it either. Views and buffers of
    an array count as references to it.
    """
    cell = variable.store.take_previous(variable) if CAN_COUNT_REFERENCES else None
    if cell is not None:
        previous = cell.previous
        is_held = sys.getrefcount(cell) > 2
        del cell
        array = previous[0]
        shares = sum(component is array for component in previous)
        is_held = is_held or sys.getrefcount(previous) > 2 or shares != len(previous)
        if not is_held and array.flags.owndata and sys.getrefcount(array) == shares + 2:
            array.flags.writeable = True
            return array
    return np.empty(variable.shape, variable.dtype)
