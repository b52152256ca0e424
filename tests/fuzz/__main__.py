"""Runs random programs until one goes wrong: `python -m tests.fuzz --seconds 60`.

Prints the seed of a program that goes wrong, and a smaller one that goes wrong alike. With
`--seed S --programs 1` the same program runs again. With `--threads N` so many programs run at
once, each on an event loop of its own, and share what the process has once: lanes, registries. With
`--streams` replicas bring arrays of devices with streams; this needs torch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import sys
import threading
import time
import warnings

import aioreplica as ar
from tests.fuzz.judge import shrink, try_beside_others, try_program
from tests.fuzz.program import may_stall, random_program

REAL_SHARE = 40  # every so many programs run on a real event loop


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=None, help="how many; default: any number")
    parser.add_argument("--seconds", type=float, default=None, help="for how long")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--real", action="store_true", help="all on a real event loop")
    parser.add_argument("--streams", action="store_true", help="on devices with streams; all real")
    parser.add_argument("--threads", type=int, default=1, help="event loops at once; all real")
    options = parser.parse_args()
    if options.programs is None and options.seconds is None:
        options.programs = 1000
    ar.set_logical_devices("cpu", 8)
    if options.streams:  # what is let go of too early depends on who goes on first
        sys.setswitchinterval(1e-6)
    gc.freeze()
    begun, numbers, failures = time.monotonic(), itertools.count(), list[int]()

    def run_some() -> None:
        for number in numbers:
            if len(failures) >= options.failures or number >= (options.programs or sys.maxsize):
                return
            if options.seconds is not None and time.monotonic() - begun > options.seconds:
                return
            seed = options.seed + number
            if not (check_beside_others(seed) if threads else check(seed, options)):
                failures.append(number)
            done.append(number)

    done: list[int] = []
    if options.threads > 1:
        warnings.simplefilter("ignore")
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    threads = [threading.Thread(target=run_some) for _ in range(options.threads - 1)]
    for thread in threads:
        thread.start()
    run_some()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    print(
        f"{len(done)} programs from seed {options.seed} in {took:.1f} s, {len(failures)} went wrong"
    )
    return min(len(failures), 1)


def check_beside_others(seed: int) -> bool:
    """Run the program of a seed while other threads run theirs; print what is wrong with it."""
    program = random_program(seed, real=True)
    if may_stall(program):  # the time in which it does is that of a quiet machine
        return True
    wrong = try_beside_others(program)
    if wrong is not None:
        print(f"\nThe program of seed {seed} went wrong: {wrong}", flush=True)
    return wrong is None


def check(seed: int, options: argparse.Namespace) -> bool:
    """Run the program of a seed; print what is wrong with it."""
    is_real = options.real or seed % REAL_SHARE == REAL_SHARE - 1
    program = random_program(seed, real=is_real, streams=options.streams)
    if options.streams and may_stall(program):  # these are about time
        return True
    wrong = try_program(program)
    if wrong is None:
        return True
    print(f"\nThe program of seed {seed} went wrong: {wrong}")
    smallest, wrong = shrink(program)
    print(f"So does this one: {wrong}\n{smallest}\n", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
