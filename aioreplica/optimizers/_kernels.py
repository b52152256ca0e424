"""Update rules written element by element, for a compiler: one pass over memory instead of many.

They compute what the rules' NumPy calls compute, operation by operation, so the bits are the same.
Plain Python that nobody calls as it is. Arrays are flat, of one length and dtype, numbers are of
that dtype; outputs come behind the inputs. They have a file of their own because what is compiled
is kept on disk until this file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np


@final
class Kernel(NamedTuple):
    """A rule for a compiler.

    Attributes:
        function: The rule.
        num_read: How many arrays it reads: the value, the slots, the gradient.
        num_written: How many it writes, behind those: the new value, the new slots.
        num_numbers: How many numbers it takes, behind those.
    """

    function: Callable[..., None]
    num_read: int
    num_written: int
    num_numbers: int


def descend(value: Any, gradient: Any, new_value: Any, rate: Any) -> None:
    """SGD without momentum."""
    for i in range(value.size):
        new_value[i] = value[i] - gradient[i] * rate


def descend_with_momentum(
    value: Any, total: Any, gradient: Any, new_value: Any, new_total: Any, momentum: Any, rate: Any
) -> None:
    """SGD along a decaying sum of gradients."""
    for i in range(value.size):
        direction = total[i] * momentum + gradient[i]
        new_total[i] = direction
        new_value[i] = value[i] - direction * rate


def descend_with_nesterov(
    value: Any, total: Any, gradient: Any, new_value: Any, new_total: Any, momentum: Any, rate: Any
) -> None:
    """SGD along the sum as it will be one step on."""
    for i in range(value.size):
        moved = total[i] * momentum + gradient[i]
        new_total[i] = moved
        new_value[i] = value[i] - (moved * momentum + gradient[i]) * rate


def adapt(
    value: Any,
    m: Any,
    v: Any,
    gradient: Any,
    new_value: Any,
    new_m: Any,
    new_v: Any,
    share_1: Any,
    share_2: Any,
    epsilon: Any,
    size: Any,
    kept: Any,
) -> None:
    """Adam and AdamW."""
    for i in range(value.size):
        slope = gradient[i]
        mean = m[i] + (slope - m[i]) * share_1
        square = v[i] + (slope * slope - v[i]) * share_2
        new_m[i] = mean
        new_v[i] = square
        new_value[i] = value[i] * kept - mean / (np.sqrt(square) + epsilon) * size


def accumulate(
    value: Any, total: Any, gradient: Any, new_value: Any, new_total: Any, epsilon: Any, rate: Any
) -> None:
    """Adagrad."""
    for i in range(value.size):
        square = total[i] + gradient[i] * gradient[i]
        new_total[i] = square
        new_value[i] = value[i] - gradient[i] / np.sqrt(square + epsilon) * rate


DESCEND = Kernel(descend, 2, 1, 1)
DESCEND_WITH_MOMENTUM = Kernel(descend_with_momentum, 3, 2, 2)
DESCEND_WITH_NESTEROV = Kernel(descend_with_nesterov, 3, 2, 2)
ADAPT = Kernel(adapt, 4, 3, 5)
ACCUMULATE = Kernel(accumulate, 3, 2, 2)
