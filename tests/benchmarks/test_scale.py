"""The model of reductions among many workers, compared with formulas and with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aioreplica.cluster._frame import FRAME_BYTES
from benchmarks import _scaling, scale
from benchmarks._scaling import (
    ALGORITHMS,
    Cluster,
    Link,
    exchange,
    fit,
    hierarchical,
    ring,
    seconds_of,
    to_all,
    tree,
)

LINK = Link(1e-5, 1e-9)
FLAT = Cluster(LINK, LINK, 1e-10, per_host=1)
HOSTS = Cluster(Link(1e-6, 1e-10), LINK, 1e-10, per_host=8)


def test_a_fit_finds_what_the_points_were_made_of() -> None:
    rng = np.random.default_rng(0)
    points = [(4**i, LINK.seconds(4**i) * rng.normal(1.0, 0.02)) for i in range(3, 13)]

    link = fit(points)

    assert link.alpha == pytest.approx(LINK.alpha, rel=0.05)
    assert link.beta == pytest.approx(LINK.beta, rel=0.05)
    with pytest.raises(ValueError, match="two sizes"):
        fit(points[:1])


@pytest.mark.parametrize("count", [1, 2, 8, 64, 512])
def test_without_stragglers_the_simulation_gives_the_known_formulas(count: int) -> None:
    m, rounds = 1_000_000, (count - 1).bit_length()
    part = m / count
    expected_ring = (count - 1) * (2 * LINK.seconds(part) + FLAT.gamma * part)
    expected_tree = rounds * (2 * LINK.seconds(m) + FLAT.gamma * m)

    assert seconds_of(ring, FLAT, m, count) == pytest.approx(expected_ring)
    assert seconds_of(tree, FLAT, m, count) == pytest.approx(expected_tree)
    for algorithm in ALGORITHMS.values():
        late = np.zeros(count)
        late[-1] = 1.0
        extra = algorithm(FLAT, m, late).max() - 1.0
        assert 0.0 <= extra <= seconds_of(algorithm, FLAT, m, count) + 1e-9


def test_the_formula_of_long_rings_is_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = np.ones(300)
    slow[150] = 3.0
    start = np.random.default_rng(1).random(300) * 1e-3
    for cluster, tolerance in ((FLAT, 1e-9), (replace(FLAT, slow=slow), 0.02)):
        simulated = seconds_of(ring, cluster, 10_000_000, 300, start)
        with monkeypatch.context() as patch:
            patch.setattr(_scaling, "MAX_SIMULATED_RING", 10)
            formula = seconds_of(ring, cluster, 10_000_000, 300, start)
        assert formula == pytest.approx(simulated, rel=tolerance)


def test_messages_to_all_cost_their_bytes_and_one_latency() -> None:
    hosts = replace(HOSTS, overhead=1e-6)
    start = np.zeros(64)
    start[5] = 1e-3

    ready = to_all(hosts, 1000, start)

    shared = LINK.beta * 8  # the workers of a host send at once
    expected = 1e-3 + LINK.alpha + 63e-6 + 1000 * (7 * HOSTS.inside.beta + 56 * shared)
    assert ready == pytest.approx(np.full(64, expected))
    assert to_all(hosts, 1000, np.zeros(1)) == [0.0]


def test_the_reduction_of_the_library_sends_frames_and_then_parts() -> None:
    cluster = replace(FLAT, overhead=1e-6, look=1e-7, software=1e-4)

    def all_messages(num_bytes: float, count: int) -> float:
        return LINK.alpha + (count - 1) * (1e-6 + num_bytes * LINK.beta)

    looked = 1e-4 + 16e-7
    small = all_messages(FRAME_BYTES + 4096, 16) + looked + 16 * 4096 * FLAT.gamma
    assert seconds_of(exchange, cluster, 4096, 16) == pytest.approx(small)
    large = all_messages(FRAME_BYTES, 16) + looked + 2 * all_messages(2**20 / 16, 16)
    large += 2**20 * FLAT.gamma
    assert seconds_of(exchange, cluster, 2**20, 16) == pytest.approx(large)
    two = all_messages(FRAME_BYTES, 2) + 1e-4 + 2e-7 + all_messages(2**20, 2)
    two += 2 * 2**20 * FLAT.gamma
    assert seconds_of(exchange, cluster, 2**20, 2) == pytest.approx(two)


def test_what_a_model_is_checked_with_is_not_what_it_was_made_of() -> None:
    points = [(size, LINK.seconds(size)) for size in (64, 4096, 2**20)]
    measured = {
        "points": points, "gamma": 1e-10, "overhead": 1e-6, "look": 1e-7, "cores": 2,
        "reduced": [(2, 4096, 5e-4), (16, 4096, 1e-2)],
    }  # fmt: skip

    cluster = scale.cluster_of(measured, LINK, per_host=8, ports=1)
    two, sixteen = scale.check(cluster, measured)

    assert two["simulated"] == pytest.approx(5e-4)  # which says how much is software
    assert sixteen["simulated"] > 8 * 5e-4  # eight workers take turns on a core
    assert sixteen["measured"] == 1e-2


def test_each_algorithm_wins_where_it_should() -> None:
    assert seconds_of(tree, FLAT, 1000, 4096) < seconds_of(ring, FLAT, 1000, 4096)
    assert seconds_of(ring, FLAT, 10**9, 64) < seconds_of(tree, FLAT, 10**9, 64)
    many = seconds_of(hierarchical, HOSTS, 10**8, 65_536)
    assert many < min(seconds_of(each, HOSTS, 10**8, 65_536) for each in (ring, tree))


@pytest.mark.xslow
def test_the_command_on_recorded_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tuple(2**i for i in range(1, 11))
    monkeypatch.setattr(scale, "COUNTS", counts)
    points = [(size, LINK.seconds(size)) for size in (64, 4096, 2**20)]
    recorded = tmp_path / "recorded.json"
    measured = {
        "points": points, "gamma": 1e-10, "overhead": 1e-6, "look": 1e-7, "cores": 2,
        "reduced": [[2, 4096, 3e-4], [4, 4096, 8e-4]],
    }  # fmt: skip
    recorded.write_text(json.dumps({"measured": measured}))
    output, picture = tmp_path / "result.json", tmp_path / "curves.png"

    scale.main(["--quick", "--points", str(recorded), "--output", str(output), "--picture",
                str(picture)])  # fmt: skip

    assert "10.0 µs and 1.00 GB/s a message" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert {row["workers"] for row in result["reductions"]} == set(counts)
    assert picture.stat().st_size > 10_000
