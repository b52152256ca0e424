"""Seeds out of seeds, the same in every process."""

from __future__ import annotations

from typing import Final

MASK: Final = (1 << 64) - 1
SEED_BITS: Final = 40  # what a token carries


def mix(*numbers: int) -> int:
    """Mix integers into one of `SEED_BITS` bits.

    Example:
        >>> mix(0, 1) != mix(1, 0)
        True

    Source:
        The finaliser of splitmix64 (Steele, Lea and Flood, 2014), once for each 64 bits.
    """
    state = 0
    for number in numbers:
        rest = abs(number) * 2 + (number < 0)
        while True:
            state = (state + (rest & MASK) + 0x9E3779B97F4A7C15) & MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
            state ^= state >> 31
            rest >>= 64
            if not rest:
                break
    return state >> (64 - SEED_BITS)
