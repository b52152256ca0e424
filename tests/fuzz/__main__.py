"""Runs random programs until one goes wrong: `python -m tests.fuzz --seconds 60`.

Prints the seed of a program that goes wrong, and a smaller one that goes wrong alike. With
`--seed S --programs 1` the same program runs again.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import aioreplica as ar
from tests.fuzz.judge import shrink, try_program
from tests.fuzz.program import random_program

REAL_SHARE = 40  # every so many programs run on a real event loop


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=None, help="how many; default: any number")
    parser.add_argument("--seconds", type=float, default=None, help="for how long")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--real", action="store_true", help="all on a real event loop")
    options = parser.parse_args()
    if options.programs is None and options.seconds is None:
        options.programs = 1000
    ar.set_logical_devices("cpu", 8)
    gc.freeze()
    begun, number, failures = time.monotonic(), 0, 0
    while options.programs is None or number < options.programs:
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            break
        failures += not check(options.seed + number, all_real=options.real)
        number += 1
        if failures >= options.failures:
            break
    took = time.monotonic() - begun
    print(f"{number} programs from seed {options.seed} in {took:.1f} s, {failures} went wrong")
    return min(failures, 1)


def check(seed: int, *, all_real: bool = False) -> bool:
    """Run the program of a seed; print what is wrong with it."""
    program = random_program(seed, real=all_real or seed % REAL_SHARE == REAL_SHARE - 1)
    wrong = try_program(program)
    if wrong is None:
        return True
    print(f"\nThe program of seed {seed} went wrong: {wrong}")
    smallest, wrong = shrink(program)
    print(f"So does this one: {wrong}\n{smallest}\n", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
