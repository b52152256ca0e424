"""Reductions among up to 65,536 workers: a model fitted to messages that are measured here.

Two workers of this machine measure what a message costs inside a host; what one costs between
hosts is an option. Then the reduction of this library, and those of a ring, a tree and hierarchies,
are simulated, with stragglers. The model is checked against 2 to 16 workers of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ._scaling import ALGORITHMS, Cluster, Link, exchange, fit, seconds_of, step_starts

COUNTS = tuple(2**power for power in range(1, 17))
SIZES = (4 * 1024, 1024**2, 100 * 1024**2, 1024**3)
STEP_S = 0.2
STEP_BYTES = 100 * 1024**2
CHECKED = (2, 4, 8, 16)  # workers of this machine
SLOW = 3.0
NUM_DRAWS = 20


def main(arguments: Sequence[str]) -> None:
    """Measure, fit, simulate, print, and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--latency-us", type=float, default=10.0, help="of a message between hosts")
    parser.add_argument("--gbit", type=float, default=100.0, help="per second between hosts")
    parser.add_argument("--per-host", type=int, default=8, help="workers of a host")
    parser.add_argument("--ports", type=int, default=1, help="links of a host that they share")
    parser.add_argument("--quick", action="store_true", help="fewer draws")
    parser.add_argument("--points", type=Path, help="JSON of an earlier run: do not measure")
    parser.add_argument("--picture", type=Path, help="where to draw the curves (needs matplotlib)")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results-scale.json"))
    chosen = parser.parse_args(arguments)
    if chosen.points:
        measured = json.loads(chosen.points.read_text())["measured"]
    else:
        measured = measure(CHECKED[:2] if chosen.quick else CHECKED)
    between = Link(chosen.latency_us * 1e-6, 8e-9 / chosen.gbit)
    cluster = cluster_of(measured, between, chosen.per_host, chosen.ports)
    inside = cluster.inside
    print(
        f"measured inside a host: {inside.alpha * 1e6:.1f} µs and "
        f"{1e-9 / inside.beta:.2f} GB/s a message, {cluster.overhead * 1e6:.1f} µs each of many, "
        f"{1e-9 / cluster.gamma:.1f} GB/s of sums, {cluster.look * 1e9:.0f} ns a frame, "
        f"{cluster.software * 1e6:.0f} µs of Python a reduction in a step\n"
        f"assumed between hosts: {chosen.latency_us:g} µs, {chosen.gbit:g} Gbit/s, "
        f"{chosen.ports} for a host\n"
    )
    checks = check(cluster, measured)
    print_checks(checks)
    reductions = simulate(cluster)
    print_reductions(reductions)
    steps = simulate_steps(cluster, 3 if chosen.quick else NUM_DRAWS)
    print_steps(steps)
    result = {
        "benchmark": "scale", "measured": measured, "inside": asdict(inside),
        "between": asdict(between), "gamma": cluster.gamma, "per_host": cluster.per_host,
        "checks": checks, "reductions": reductions, "steps": steps,
    }  # fmt: skip
    chosen.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if chosen.picture:
        draw(result, chosen.picture)


def measure(counts: Sequence[int]) -> dict[str, Any]:
    """Start so many workers by mpirun, one number after the other; return what workers 0 saw."""
    launcher = Path(sys.executable).with_name("mpirun")
    if not launcher.exists():
        sys.exit('There is no mpirun beside this interpreter: pip install "aioreplica[mpi]".')
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    measured: dict[str, Any] = {"reduced": []}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "messages.json"
        worker = [sys.executable, "-m", "benchmarks._messages", str(output)]
        for count in counts:
            command = [str(launcher), "--map-by", ":OVERSUBSCRIBE", "-n", str(count), *worker]
            subprocess.run(command, env=environment, check=True, timeout=300)
            found = json.loads(output.read_text())
            rows = [(count, num_bytes, seconds) for num_bytes, seconds in found.pop("reduced")]
            measured["reduced"] += rows
            measured |= {"cores": os.cpu_count()} | {key: found[key] for key in found}
    return measured


def cluster_of(measured: dict[str, Any], between: Link, per_host: int, ports: int) -> Cluster:
    """Return the model with what was measured.

    What a small reduction of two workers takes beyond its messages and sums is software.
    """
    inside = fit([(int(size), float(seconds)) for size, seconds in measured["points"]])
    bare = Cluster(
        inside, between, float(measured["gamma"]), per_host, ports,
        overhead=float(measured["overhead"]), look=float(measured["look"]),
    )  # fmt: skip
    count, num_bytes, seconds = measured["reduced"][0]
    return replace(bare, software=max(0.0, seconds - seconds_of(exchange, bare, num_bytes, count)))


def check(cluster: Cluster, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what reductions of all workers of this machine took, and should take.

    Workers that share a core take turns on it.
    """
    one_host = replace(cluster, per_host=max(COUNTS))
    return [
        {
            "workers": count, "bytes": num_bytes, "measured": seconds,
            "simulated": max(1.0, count / measured["cores"])
            * seconds_of(exchange, one_host, num_bytes, count),
        }
        for count, num_bytes, seconds in measured["reduced"]
    ]  # fmt: skip


def print_checks(rows: Sequence[dict[str, Any]]) -> None:
    """Print what was measured beside what is simulated."""
    print(f"{'all_reduce in a step':<24}{'workers':>8}{'measured':>12}{'simulated':>12}  ms")
    for row in rows:
        print(
            f"{_in_words(row['bytes']):<24}{row['workers']:>8}{row['measured'] * 1e3:>12.3g}"
            f"{row['simulated'] * 1e3:>12.3g}"
        )
    print()


def simulate(cluster: Cluster) -> list[dict[str, Any]]:
    """Return seconds of every algorithm for every size and number of workers.

    "slow" is with one worker, in the middle, whose messages take three times as long.
    """
    rows = []
    for num_bytes in SIZES:
        for count in COUNTS:
            slow = np.ones(count)
            slow[count // 2] = SLOW
            for name, algorithm in ALGORITHMS.items():
                rows.append({
                    "algorithm": name, "bytes": num_bytes, "workers": count,
                    "seconds": seconds_of(algorithm, cluster, num_bytes, count),
                    "slow": seconds_of(
                        algorithm, replace(cluster, slow=slow), num_bytes, count
                    ),
                })  # fmt: skip
    return rows


def simulate_steps(cluster: Cluster, num_draws: int) -> list[dict[str, Any]]:
    """Return how long a step and its reduction take, with workers that are not equally fast."""
    rows = []
    for count in COUNTS:
        starts = [step_starts(count, STEP_S, np.random.default_rng([count, i]))
                  for i in range(num_draws)]  # fmt: skip
        waits = float(np.mean([each.max() for each in starts]))
        for name, algorithm in ALGORITHMS.items():
            ends = [algorithm(cluster, STEP_BYTES, each).max() for each in starts]
            rows.append({
                "algorithm": name, "workers": count, "seconds": float(np.mean(ends)),
                "waiting": waits - STEP_S,
            })  # fmt: skip
    return rows


def print_reductions(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table per size; the fastest of each line is marked."""
    for num_bytes in SIZES:
        print(f"all_reduce of {_in_words(num_bytes)}, ms (with a worker of slow messages)")
        print(f"{'workers':>8}" + "".join(f"{name:>24}" for name in ALGORITHMS))
        for count in COUNTS[::3]:
            found = {
                row["algorithm"]: row
                for row in rows
                if row["bytes"] == num_bytes and row["workers"] == count
            }
            best = min(found, key=lambda name: found[name]["seconds"])
            cells = [
                f"{row['seconds'] * 1e3:.3g} ({row['slow'] * 1e3:.3g})" + "* "[name != best]
                for name, row in found.items()
            ]
            print(f"{count:>8}" + "".join(f"{cell:>24}" for cell in cells))
        print()


def print_steps(rows: Sequence[dict[str, Any]]) -> None:
    """Print the time of a step, and how much of it is work."""
    print(f"a step of {STEP_S * 1e3:g} ms and a reduction of {_in_words(STEP_BYTES)}, ms")
    print(f"{'workers':>8}{'waiting':>10}" + "".join(f"{name:>24}" for name in ALGORITHMS))
    for count in COUNTS[::3]:
        found = {row["algorithm"]: row for row in rows if row["workers"] == count}
        cells = [
            f"{row['seconds'] * 1e3:.0f} ({STEP_S / row['seconds']:.0%} work)"
            for row in found.values()
        ]
        waiting = found["ring"]["waiting"] * 1e3
        print(f"{count:>8}{waiting:>10.0f}" + "".join(f"{cell:>24}" for cell in cells))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the curves of a result to a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    shown = (SIZES[0], STEP_BYTES)
    for axis, num_bytes in zip(axes, shown, strict=False):
        for name in ALGORITHMS:
            rows = [
                row
                for row in result["reductions"]
                if row["algorithm"] == name and row["bytes"] == num_bytes
            ]
            counts = [row["workers"] for row in rows]
            (line,) = axis.loglog(counts, [row["seconds"] * 1e3 for row in rows], label=name)
            axis.loglog(counts, [row["slow"] * 1e3 for row in rows], ":", color=line.get_color())
        axis.set_title(f"all_reduce of {_in_words(num_bytes)} (dotted: one slow worker)")
        axis.set_ylabel("ms")
    for name in ALGORITHMS:
        rows = [row for row in result["steps"] if row["algorithm"] == name]
        work = [100 * STEP_S / row["seconds"] for row in rows]
        axes[2].semilogx([row["workers"] for row in rows], work, label=name)
    axes[2].set_title(f"work in a step of {STEP_S * 1e3:g} ms, {_in_words(STEP_BYTES)} reduced")
    axes[2].set_ylabel("% of the time")
    for axis in axes:
        axis.set_xlabel("workers")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def _in_words(num_bytes: int) -> str:
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"
