"""The interpreter's lock: whether threads of this process take turns."""

from __future__ import annotations

import sys


def has_gil() -> bool:
    """Tell whether the GIL is on: always, but for free-threaded builds of CPython.

    There an extension that is not made for it turns the GIL on when it is imported, for good.
    """
    return getattr(sys, "_is_gil_enabled", lambda: True)()
