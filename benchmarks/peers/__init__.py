"""The same work in TensorFlow, JAX, torch and aioreplica, in turns, with the same numbers checked.

Each peer gets an environment of its own, made once in the user's cache folder; one that cannot be
installed is left out, and a line says so. For each number of replicas every peer's program runs
once and waits while the others are measured; the samples of a round are taken one behind the other,
so a ratio compares two programs in the same second. Compiled steps start their programs anew in
each round, as the same program of XLA is up to twice as fast in one process as in the next. Losses
have to agree before a time is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from .._environments import Environments
from ._cases import FASTEST, PEERS, WIDE, Case, Peer, all_cases, named
from ._page import write_tables
from ._program import ROOT, Program
from ._results import Contender, Measured, Result, format_results, write_results

TOLERANCE = 1e-4  # of losses, relative
NUM_STARTS = 3  # rounds at most: TensorFlow alone takes seconds
ANEW = {"compiled"}
"""Tasks of which each round has programs that were started for it."""


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables, write JSON and charts."""
    options = _parse(arguments)
    rounds, seconds = (2, 0.05) if options.quick else (options.rounds, options.seconds)
    interpreters = dict(_installed(named(PEERS, options.peers.split(","))))
    cases = [case for case in all_cases(is_quick=options.quick) if _is_chosen(case, options)]
    result = Result(is_quick=options.quick)
    if options.add and options.output.exists():
        result.read(options.output)
    for size, group in groupby(cases, key=lambda case: case.num_replicas):
        for measured in _measure_all(list(group), size, interpreters, rounds, seconds):
            result.add(measured)
            print(measured.summary(), flush=True)
        write_results(options.output, result)  # now, as the next ones may take long
    print(format_results(result))
    print(f"Written to {options.output}.")
    if options.charts is not None:
        from ._charts import draw_charts

        for path in draw_charts(result.rows, options.charts):
            print(f"Drawn: {path}")
    if options.page is not None:
        write_tables(result.rows, options.page)


def _measure_all(
    cases: Sequence[Case], size: int, interpreters: dict[Peer, str], rounds: int, seconds: float
) -> Iterator[Measured]:
    """Measure the cases of one number of replicas; programs run as long as that takes."""
    for case in cases:
        if case.task == "start":
            yield from measure_starts(case, interpreters, min(rounds, NUM_STARTS))
    ours = {task for peer in interpreters if peer.name in FASTEST for task in peer.modes}
    others = [case for case in cases if case.task != "start" and case.task in ours]
    tasks = {case.task for case in others} - ANEW
    with _started(interpreters, size, tasks) as programs:
        for case in others:
            if case.task in tasks:
                yield measure(Measured(case), programs, rounds, seconds)
    for case in others:
        if case.task in ANEW:
            measured = Measured(case)
            for _ in range(rounds):
                with _started(interpreters, size, {case.task}) as programs:
                    measure(measured, programs, 1, seconds)
            yield measured


@contextmanager
def _started(
    interpreters: dict[Peer, str], size: int, tasks: Set[str]
) -> Iterator[dict[Peer, Program]]:
    """Start the program of each peer that does any of these tasks; they end with the block."""
    with ExitStack() as stack:
        yield {
            peer: stack.enter_context(Program(peer, interpreter, size))
            for peer, interpreter in interpreters.items()
            if size <= peer.max_replicas and tasks & peer.modes.keys()
        }


def measure_starts(
    case: Case, interpreters: dict[Peer, str], rounds: int
) -> tuple[Measured, Measured]:
    """Start every program anew in each round: how long that takes, and what memory it holds then.

    The memory is taken when replicas have met once, or run once, whatever it can.
    """
    times = Measured(case)
    memory = Measured(replace(case, title="memory", unit="MiB"))
    for _ in range(rounds):
        for peer, interpreter in interpreters.items():
            if "start" not in peer.modes or case.num_replicas > peer.max_replicas:
                continue
            way = Contender(peer.name, "")
            with Program(peer, interpreter, case.num_replicas) as program:
                times.samples.setdefault(way, []).append(program.start_s)
                program.make("merge", peer.modes["merge"][0], {})
                memory.samples.setdefault(way, []).append(program.memory() / 2**20)
    return times, memory


def measure(
    measured: Measured, programs: dict[Peer, Program], rounds: int, seconds: float
) -> Measured:
    """Measure one case, or more of it: every way of every peer once per round, behind one another.

    Raises:
        SystemExit: If the losses of two peers differ.
    """
    case = measured.case
    task = "train" if case.task == "small" else case.task
    ways = [
        (Contender(peer.name, mode), program)
        for peer, program in programs.items()
        for mode in peer.modes.get(case.task, ())
    ]
    for way, program in ways:
        made = program.make(task, way.mode, case.settings)
        _require_same(measured, way, made["checks"])
        if made["report"]:
            measured.reports[way] = made["report"].replace(f"{ROOT}/", "")
    for _ in range(rounds):
        for way, program in ways:
            measured.samples.setdefault(way, []).append(program.sample(way.mode, seconds))
    for program in dict.fromkeys(program for _, program in ways):
        program.drop()
    return measured


def _require_same(measured: Measured, way: Contender, losses: list[float]) -> None:
    if not losses:
        return
    measured.losses[way] = losses
    first = next(iter(measured.losses.values()))
    if not np.allclose(losses, first, rtol=TOLERANCE, atol=0):
        case = measured.case
        raise SystemExit(
            f"{case.title}, N = {case.num_replicas}: {way} has the losses {losses}, not {first}."
        )


def _installed(peers: Sequence[Peer]) -> Iterator[tuple[Peer, str]]:
    environments = Environments("peers")
    for peer in peers:
        if peer.library and find_spec(peer.library) is None:
            print(f"{peer.name}: left out. {peer.library} is not installed here.")
            continue
        if peer.name == WIDE and not _would_be_wider():
            print(f"{peer.name}: left out. OpenBLAS chooses by itself, or there is no AVX-512.")
            continue
        if not peer.package:
            yield peer, sys.executable
            continue
        try:
            interpreter = environments.make(peer.package, peer.version, peer.needs)
        except RuntimeError as error:
            print(f"{peer.name}: left out. {error}")
        else:
            if interpreter is not None:
                yield peer, str(interpreter)


def _would_be_wider() -> bool:
    """Tell whether the processor has AVX-512 and OpenBLAS took something narrower."""
    cpuinfo = Path("/proc/cpuinfo")
    has_it = cpuinfo.exists() and "avx512vl" in cpuinfo.read_text(encoding="utf-8").split()
    chosen = {library.get("architecture") for library in threadpool_info()}
    return has_it and bool(chosen & {"Haswell", "Zen"})


def _is_chosen(case: Case, options: argparse.Namespace) -> bool:
    return (not options.tasks or case.task in options.tasks.split(",")) and (
        not options.replicas or case.num_replicas in options.replicas
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="few cases, two short rounds: does it run")
    add("--peers", default=",".join(peer.name for peer in PEERS), metavar="NAMES",
        help="default: %(default)s")  # fmt: skip
    add("--tasks", metavar="NAMES",
        help="some of start,merge,run,all_reduce,train,small,compiled,failure")  # fmt: skip
    add("--replicas", type=int, action="append", metavar="N", help="only so many; repeatable")
    add("--rounds", type=int, default=7, help="default: %(default)s")
    add("--seconds", type=float, default=0.3, help="of one sample; default: %(default)s")
    add("--page", type=Path, metavar="FILE", help="write the tables into this page of Markdown")
    add("--charts", type=Path, metavar="FOLDER", help="draw PNG charts into this folder")
    add(
        "--add",
        action="store_true",
        help="keep what the output file has of other cases, as a long run can be taken in parts",
    )
    add("--output", type=Path, default=Path("benchmark-results-peers.json"), metavar="PATH")
    return parser.parse_args(arguments)
