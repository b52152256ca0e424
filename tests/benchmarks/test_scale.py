"""The model of reductions among many workers, compared with formulas and with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _scaling, scale
from benchmarks._scaling import ALGORITHMS, Cluster, Link, fit, hierarchical, ring, seconds_of, tree

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


def test_each_algorithm_wins_where_it_should() -> None:
    assert seconds_of(tree, FLAT, 1000, 4096) < seconds_of(ring, FLAT, 1000, 4096)
    assert seconds_of(ring, FLAT, 10**9, 64) < seconds_of(tree, FLAT, 10**9, 64)
    many = seconds_of(hierarchical, HOSTS, 10**8, 65_536)
    assert many < min(seconds_of(each, HOSTS, 10**8, 65_536) for each in (ring, tree))


@pytest.mark.slow
def test_the_command_on_recorded_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tuple(2**i for i in range(1, 11))
    monkeypatch.setattr(scale, "COUNTS", counts)
    points = [(size, LINK.seconds(size)) for size in (64, 4096, 2**20)]
    recorded = tmp_path / "recorded.json"
    recorded.write_text(
        json.dumps({"measured": {"points": points, "gamma": 1e-10, "awaited": 1e-4}})
    )
    output, picture = tmp_path / "result.json", tmp_path / "curves.png"

    scale.main(["--quick", "--points", str(recorded), "--output", str(output), "--picture",
                str(picture)])  # fmt: skip

    assert "10.0 µs and 1.00 GB/s a message" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert {row["workers"] for row in result["reductions"]} == set(counts)
    assert picture.stat().st_size > 10_000
