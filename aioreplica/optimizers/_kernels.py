"""Update rules written element by element, for a compiler: one pass over memory instead of many.

Each sums the gradient, divides it, looks whether it is finite, clips it and applies the rule, some
elements at a time, so that what lies between these is never out of a core's nearest cache. They
compute what the NumPy calls compute, operation by operation, so the bits are the same.

Plain Python that nobody calls as it is. Arrays are flat, of one length and dtype, numbers are of
that dtype; outputs come behind the inputs. They have a file of their own because what is compiled
is kept on disk until this file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np

CHUNK = 1024
"""Elements that are gathered at a time: 4 KiB of float32. With 4096 it takes as long."""


@final
class Kernel(NamedTuple):
    """A rule for a compiler.

    Attributes:
        function: The rule. It takes two parts of a gradient, the second one of length 0 if there is
            no more than one; how to make the gradient of their sum, as `gather` does; the value and
            the slots; the new value and the new slots; and numbers. It returns 1 if all elements of
            the gradient are finite, and 2 more if all that it wrote is.
        num_slots: How many slots there are.
        num_numbers: How many numbers it takes.
    """

    function: Callable[..., int]
    num_slots: int
    num_numbers: int


def gather(room: Any, begin: int, first: Any, second: Any, how: Any) -> bool:
    """Make elements of a gradient from two parts, from `begin` on, as many as there is room.

    Args:
        room: Where they go.
        begin: Number of the first one.
        first: A part.
        second: What is added to it; may have no elements.
        how: What the sum is multiplied with, and divided by; what the quotient is multiplied with
            behind the check, after its magnitude was limited; the largest finite number.

    Returns:
        Whether all of them are finite before they are limited.
    """
    inverse, divisor, factor, limit, largest = how
    size = room.size
    one = first[begin : begin + size]
    if second.size:
        other = second[begin : begin + size]
        for i in range(size):
            room[i] = one[i] + other[i]
    else:
        for i in range(size):
            room[i] = one[i]
    count = 0
    if divisor == 1:
        for i in range(size):
            slope = room[i] * inverse
            count += abs(slope) <= largest
            room[i] = slope
    else:
        for i in range(size):
            slope = room[i] / divisor
            count += abs(slope) <= largest
            room[i] = slope
    if limit <= largest:
        for i in range(size):
            slope = room[i]
            if slope > limit:  # noqa: PLR1730 - what is not a number stays
                slope = limit
            if slope < -limit:  # noqa: PLR1730
                slope = -limit
            room[i] = slope
    if factor != 1:
        for i in range(size):
            room[i] = room[i] * factor
    is_finite: bool = count == size
    return is_finite


def descend(first: Any, second: Any, how: Any, value: Any, new_value: Any, rate: Any) -> int:
    """SGD without momentum."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        for i in range(slope.size):
            moved = old[i] - slope[i] * rate
            sound += abs(moved) <= largest
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def descend_with_momentum(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    total: Any,
    new_value: Any,
    new_total: Any,
    momentum: Any,
    rate: Any,
) -> int:
    """SGD along a decaying sum of gradients."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_total, made = total[begin:end], new_total[begin:end]
        for i in range(slope.size):
            direction = old_total[i] * momentum + slope[i]
            made[i] = direction
            moved = old[i] - direction * rate
            sound += abs(moved) <= largest
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def descend_with_nesterov(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    total: Any,
    new_value: Any,
    new_total: Any,
    momentum: Any,
    rate: Any,
) -> int:
    """SGD along the sum as it will be one step on."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_total, made = total[begin:end], new_total[begin:end]
        for i in range(slope.size):
            direction = old_total[i] * momentum + slope[i]
            made[i] = direction
            moved = old[i] - (direction * momentum + slope[i]) * rate
            sound += abs(moved) <= largest
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def adapt(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    m: Any,
    v: Any,
    new_value: Any,
    new_m: Any,
    new_v: Any,
    beta_1: Any,
    share_1: Any,
    beta_2: Any,
    share_2: Any,
    epsilon: Any,
    size: Any,
    kept: Any,
) -> int:
    """Adam and AdamW."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slopes = room[: end - begin]
        is_finite &= gather(slopes, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_m, made_m = m[begin:end], new_m[begin:end]
        old_v, made_v = v[begin:end], new_v[begin:end]
        for i in range(slopes.size):
            slope = slopes[i]
            mean = old_m[i] * beta_1 + slope * share_1
            square = old_v[i] * beta_2 + slope * share_2 * slope
            made_m[i] = mean
            made_v[i] = square
            moved = old[i] * kept - mean / (np.sqrt(square) + epsilon) * size
            sound += (abs(moved) <= largest) & (square <= largest)
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def accumulate(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    total: Any,
    new_value: Any,
    new_total: Any,
    epsilon: Any,
    rate: Any,
) -> int:
    """Adagrad."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_total, made = total[begin:end], new_total[begin:end]
        for i in range(slope.size):
            square = old_total[i] + slope[i] * slope[i]
            made[i] = square
            moved = old[i] - slope[i] / np.sqrt(square + epsilon) * rate
            sound += (abs(moved) <= largest) & (square <= largest)
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def divide_by_root(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    rms: Any,
    new_value: Any,
    new_rms: Any,
    rho: Any,
    share: Any,
    epsilon: Any,
    rate: Any,
) -> int:
    """RMSprop, neither centered nor with momentum."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_rms, made = rms[begin:end], new_rms[begin:end]
        for i in range(slope.size):
            square = old_rms[i] * rho + slope[i] * share * slope[i]
            made[i] = square
            moved = old[i] - slope[i] / np.sqrt(square + epsilon) * rate
            sound += (abs(moved) <= largest) & (square <= largest)
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


def divide_by_root_with_momentum(
    first: Any,
    second: Any,
    how: Any,
    value: Any,
    rms: Any,
    total: Any,
    new_value: Any,
    new_rms: Any,
    new_total: Any,
    rho: Any,
    share: Any,
    epsilon: Any,
    momentum: Any,
    rate: Any,
) -> int:
    """RMSprop with momentum, not centered."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        end = min(begin + CHUNK, value.size)
        slope = room[: end - begin]
        is_finite &= gather(slope, begin, first, second, how)
        old, new = value[begin:end], new_value[begin:end]
        old_rms, made_rms = rms[begin:end], new_rms[begin:end]
        old_total, made_total = total[begin:end], new_total[begin:end]
        for i in range(slope.size):
            square = old_rms[i] * rho + slope[i] * share * slope[i]
            made_rms[i] = square
            direction = old_total[i] * momentum + slope[i] / np.sqrt(square + epsilon)
            made_total[i] = direction
            moved = old[i] - direction * rate
            sound += (abs(moved) <= largest) & (square <= largest)
            new[i] = moved
    found: int = is_finite + 2 * (sound == value.size)
    return found


DESCEND = Kernel(descend, 0, 1)
DESCEND_WITH_MOMENTUM = Kernel(descend_with_momentum, 1, 2)
DESCEND_WITH_NESTEROV = Kernel(descend_with_nesterov, 1, 2)
ADAPT = Kernel(adapt, 2, 7)
ACCUMULATE = Kernel(accumulate, 1, 2)
DIVIDE_BY_ROOT = Kernel(divide_by_root, 1, 4)
DIVIDE_BY_ROOT_WITH_MOMENTUM = Kernel(divide_by_root_with_momentum, 2, 5)
