"""Names of the calls that leave a device program, and of their gradients."""

from __future__ import annotations

from collections import deque
from typing import final

KEPT_CALLS = 4  # gradient calls that may be under way inside each other


@final
class ClusterNames:
    """Names the outside calls of one step: "0", "1", and so on.

    The gradient of a call belongs to one gradient call (one pass backwards), whose uid is added to
    the name: "uid" for the first one of the step, then "uid_1". All outside calls that one pass
    goes back through share its uid; a gradient of a gradient has both.

    Example:
        >>> names, first, second = ClusterNames(), object(), object()
        >>> names.new_root(), names.new_root()
        ('0', '1')
        >>> names.gradient_of("1", first), names.gradient_of("0", first)
        ('1.uid', '0.uid')
        >>> names.gradient_of("0.uid", second)
        '0.uid.uid_1'

    Attributes:
        num_roots: How many calls of the step have a name.

    Source:
        tf.tpu's gradient_uid of outside compilation clusters.
    """

    __slots__ = ("_gradient_calls", "_num_gradient_calls", "num_roots")

    def __init__(self) -> None:
        self._gradient_calls: deque[tuple[object, str]] = deque(maxlen=KEPT_CALLS)
        self.restart()

    def restart(self) -> None:
        """Begin a step: number from 0 again."""
        self.num_roots = 0
        self._num_gradient_calls = 0
        self._gradient_calls.clear()

    def new_root(self) -> str:
        """Name a call of the step."""
        name = str(self.num_roots)
        self.num_roots += 1
        return name

    def gradient_of(self, name: str, gradient_call: object) -> str:
        """Name the gradient of a call; `gradient_call` is one object for one pass backwards."""
        for known, uid in self._gradient_calls:
            if known is gradient_call or known == gradient_call:  # torch numbers its passes
                return f"{name}.{uid}"
        number = self._num_gradient_calls
        self._num_gradient_calls += 1
        uid = f"uid_{number}" if number else "uid"
        self._gradient_calls.append((gradient_call, uid))
        return f"{name}.{uid}"
