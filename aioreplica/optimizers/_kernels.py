"""Update rules written element by element, for a compiler: one pass over memory instead of many.

A loop sums the gradient, divides it, looks whether it is finite, clips it and applies a rule, some
elements at a time, so that what lies between these is never out of a core's nearest cache. Rules
compute what the NumPy calls compute, operation by operation, so the bits are the same.

Plain Python that nobody calls as it is. Arrays are flat, of one length and dtype, numbers are of
that dtype; outputs come behind the inputs. They have a file of their own because what is compiled
is kept on disk until this file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from ..tree import Array

Numbers: TypeAlias = tuple[float, ...]

CHUNK = 1024
"""Elements that are gathered at a time: 4 KiB of float32. With 4096 it takes as long."""


@final
class Kernel(NamedTuple):
    """A rule for a compiler.

    Attributes:
        rule: Takes an element of the gradient, of the value and of each slot, and numbers. It
            returns the new element of the value, and of each slot.
        num_slots: How many slots there are.
        num_numbers: How many numbers it takes.
    """

    rule: Callable[..., Any]
    num_slots: int
    num_numbers: int

    @property
    def loop(self) -> Callable[..., int]:
        """Loop over the elements of a block, which is compiled with the rule inside.

        It takes two parts of a gradient, the second one of length 0 if there is no more than one;
        how to make the gradient of their sum, as `gather` does; the value and the slots; the new
        value and the new slots; and the numbers. It returns 1 if all elements of the gradient are
        finite, and 2 more if all that it wrote is.
        """
        return (without_slots, with_slot, with_slots)[self.num_slots]


def gather(room: Array, begin: int, first: Array, second: Array, how: Numbers) -> bool:
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


def without_slots(
    first: Array, second: Array, how: Numbers, value: Array, new: Array, numbers: Numbers
) -> int:
    """Run a rule that keeps nothing."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        slope = room[: min(CHUNK, value.size - begin)]
        is_finite &= gather(slope, begin, first, second, how)
        end = begin + slope.size
        old, made = value[begin:end], new[begin:end]
        for i in range(slope.size):
            moved = rule(slope[i], old[i], numbers)
            made[i] = moved
            sound += abs(moved) <= largest
    found: int = is_finite + 2 * (sound == value.size)
    return found


def with_slot(
    first: Array,
    second: Array,
    how: Numbers,
    value: Array,
    slot: Array,
    new: Array,
    new_slot: Array,
    numbers: Numbers,
) -> int:
    """Run a rule that keeps one slot."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        slope = room[: min(CHUNK, value.size - begin)]
        is_finite &= gather(slope, begin, first, second, how)
        end = begin + slope.size
        old, made = value[begin:end], new[begin:end]
        was, kept = slot[begin:end], new_slot[begin:end]
        for i in range(slope.size):
            moved, kept[i] = rule(slope[i], old[i], was[i], numbers)
            made[i] = moved
            sound += (abs(moved) <= largest) & (abs(kept[i]) <= largest)
    found: int = is_finite + 2 * (sound == value.size)
    return found


def with_slots(
    first: Array,
    second: Array,
    how: Numbers,
    value: Array,
    slot: Array,
    other: Array,
    new: Array,
    new_slot: Array,
    new_other: Array,
    numbers: Numbers,
) -> int:
    """Run a rule that keeps two slots."""
    room = np.empty(min(CHUNK, value.size), value.dtype)
    is_finite, sound, largest = True, 0, how[4]
    for begin in range(0, value.size, CHUNK):
        slope = room[: min(CHUNK, value.size - begin)]
        is_finite &= gather(slope, begin, first, second, how)
        end = begin + slope.size
        old, made = value[begin:end], new[begin:end]
        was, kept = slot[begin:end], new_slot[begin:end]
        was_other, kept_other = other[begin:end], new_other[begin:end]
        for i in range(slope.size):
            moved, one, two = rule(slope[i], old[i], was[i], was_other[i], numbers)
            made[i], kept[i], kept_other[i] = moved, one, two
            sound += (abs(moved) <= largest) & (abs(one) <= largest) & (abs(two) <= largest)
    found: int = is_finite + 2 * (sound == value.size)
    return found


def descend(slope: float, old: float, numbers: Numbers) -> float:
    """SGD without momentum."""
    return old - slope * numbers[0]


def descend_with_momentum(
    slope: float, old: float, total: float, numbers: Numbers
) -> tuple[float, float]:
    """SGD along a decaying sum of gradients."""
    momentum, rate = numbers
    direction = total * momentum + slope
    return old - direction * rate, direction


def descend_with_nesterov(
    slope: float, old: float, total: float, numbers: Numbers
) -> tuple[float, float]:
    """SGD along the sum as it will be one step on."""
    momentum, rate = numbers
    direction = total * momentum + slope
    return old - (direction * momentum + slope) * rate, direction


def adapt(
    slope: float, old: float, m: float, v: float, numbers: Numbers
) -> tuple[float, float, float]:
    """Adam and AdamW."""
    beta_1, share_1, beta_2, share_2, epsilon, size, kept = numbers
    mean = m * beta_1 + slope * share_1
    square = v * beta_2 + slope * share_2 * slope
    return old * kept - mean / (np.sqrt(square) + epsilon) * size, mean, square


def accumulate(slope: float, old: float, total: float, numbers: Numbers) -> tuple[float, float]:
    """Adagrad."""
    epsilon, rate = numbers
    square = total + slope * slope
    return old - slope / np.sqrt(square + epsilon) * rate, square


def divide_by_root(slope: float, old: float, rms: float, numbers: Numbers) -> tuple[float, float]:
    """RMSprop, neither centered nor with momentum."""
    rho, share, epsilon, rate = numbers
    square = rms * rho + slope * share * slope
    return old - slope / np.sqrt(square + epsilon) * rate, square


def divide_by_root_with_momentum(
    slope: float, old: float, rms: float, total: float, numbers: Numbers
) -> tuple[float, float, float]:
    """RMSprop with momentum, not centered."""
    rho, share, epsilon, momentum, rate = numbers
    square = rms * rho + slope * share * slope
    direction = total * momentum + slope / np.sqrt(square + epsilon)
    return old - direction * rate, square, direction


rule: Callable[..., Any] = descend
"""Stands for the rule in the loops above; a compiler puts the one of the kernel there."""

DESCEND = Kernel(descend, 0, 1)
DESCEND_WITH_MOMENTUM = Kernel(descend_with_momentum, 1, 2)
DESCEND_WITH_NESTEROV = Kernel(descend_with_nesterov, 1, 2)
ADAPT = Kernel(adapt, 2, 7)
ACCUMULATE = Kernel(accumulate, 1, 2)
DIVIDE_BY_ROOT = Kernel(divide_by_root, 1, 4)
DIVIDE_BY_ROOT_WITH_MOMENTUM = Kernel(divide_by_root_with_momentum, 2, 5)
