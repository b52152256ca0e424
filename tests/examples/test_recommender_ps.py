"""The example of parameter servers, all in one process."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cloudpickle")
pytest.importorskip("sklearn")

import aioreplica as ar
from examples import recommender_ps as example


@pytest.mark.xslow
def test_it_learns_what_users_like(tmp_path: Path) -> None:
    reports: list[tuple[int, int, float]] = []
    engine = ar.cluster.LocalClosureEngine(num_workers=2)

    result = asyncio.run(
        example.train(epochs=1, address=engine, report=lambda *each: reports.append(each))
    )
    example.plot_roc(result, tmp_path / "roc.png")

    total = example.NUM_EXAMPLES * 4 // 5 // 256
    assert [each[:2] for each in reports] == [(i + 1, total) for i in range(total)]
    assert np.mean([each[2] for each in reports[-20:]]) < np.mean(
        [each[2] for each in reports[:20]]
    )
    assert result.area > 0.65
    assert result.statistics.num_finished == total
    assert result.statistics.pushes == 4 * total
    assert (tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_the_data_are_skewed() -> None:
    users, items, liked = example.make_data(0)

    views = np.sort(np.bincount(items, minlength=example.NUM_ITEMS))[::-1]
    assert 0.45 < views[: example.NUM_ITEMS // 50].sum() / len(items) < 0.55
    assert 0.4 < liked.mean() < 0.6
    assert len(np.unique(users)) == example.NUM_USERS
