"""Predictions over HTTP while the same process trains, beside other ways of training there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ._online_server import IN_BACKGROUND
from ._row import Row, Target, compared_row

OURS = ("array steps", f"array steps{IN_BACKGROUND}")
WAYS = (
    *OURS, "autograd steps", "pure Python steps", "step in the handler", "asyncio.to_thread",
    "torch in a thread",
)  # fmt: skip
PROMISED = {"p50": 1.3, "p99": 1.5}  # ratios to the idle windows around
MAX_LAG_MS = 10.0
RATE = 100.0


def measure_http(*, is_quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Measure each way; return rows, and how many steps each took per second of training."""
    rows: list[Row] = []
    counts: dict[str, Any] = {}
    for name in WAYS:
        num_rounds = 1 if is_quick else 20 if name in OURS else 7
        rounds = run_way(name, num_rounds, seconds=0.5 if is_quick else 3.0)
        steps = median(training["num_steps"] for _, training, _ in rounds)
        counts[name] = {"steps_per_window": steps}
        if name in OURS:
            rows += rows_of(name, rounds, ratios=PROMISED, max_lag_ms=MAX_LAG_MS)
        else:
            rows += rows_of(name, rounds)
    return rows, counts


def rows_of(
    name: str,
    rounds: Sequence[Any],
    *,
    ratios: Mapping[str, float] | None = None,
    max_lag_ms: float | None = None,
) -> list[Row]:
    """Compare training windows with the idle ones around them, and these with each other.

    Args:
        name: The way of training.
        rounds: Its windows.
        ratios: Those promised for a percentile. If idle windows differ as much, nothing is shown.
        max_lag_ms: What is promised for the loop's lag.
    """
    rows = []
    for key in ("p50", "p99"):
        limit = (ratios or {}).get(key)
        idle, training, again = ([each[kind][key] for each in rounds] for kind in range(3))
        around = [(first + last) / 2 for first, last in zip(idle, again, strict=True)]
        calm = compared_row(
            f"/predict {key}, idle ({name})", "asyncio", 2, "ms", ours=again, against="idle",
            floor=idle,
        )  # fmt: skip
        target = None if limit is None else Target("ratio", limit)
        rows += [
            calm,
            compared_row(
                f"/predict {key}, {name}", "asyncio", 2, "ms", ours=training, against="idle",
                floor=around, target=target,
            ),
        ]  # fmt: skip
    lags = [[each[kind]["lag_p99"] for each in rounds] for kind in range(2)]
    rows.append(
        compared_row(
            f"loop lag p99, {name}", "asyncio", 2, "ms", ours=lags[1], against="idle",
            floor=lags[0], target=None if max_lag_ms is None else Target("ours", max_lag_ms),
        )
    )  # fmt: skip
    return rows


def run_way(name: str, num_rounds: int, *, seconds: float) -> list[Any]:
    """Run a server, and a client in another process; return the windows of each round."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks._online_server", name],
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError(f"The server that trains by {name} did not start.")
            command = [sys.executable, "-m", "benchmarks._online_load", port]
            done = subprocess.run(
                [*command, str(num_rounds), str(seconds), str(RATE)],
                stdout=subprocess.PIPE, text=True, check=True, timeout=1200,
            )  # fmt: skip
        finally:
            server.kill()
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    if not all(window["is_ordered"] for each in rounds for window in each):
        raise RuntimeError("A prediction came from an older version than the one before.")
    return rounds
