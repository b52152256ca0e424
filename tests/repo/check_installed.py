"""Check the wheel in an environment of its own: `python -m venv`, install it, run this with `-I`.

Only the packages that the core needs are there. How long the import takes is printed and decides
nothing.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import io
import statistics
import subprocess
import sys
import time

ROUNDS = 15


def doctor() -> dict[str, list[str]]:
    """Return the rows that `aioreplica doctor` prints, by title."""
    from aioreplica.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["doctor"])
    rows: dict[str, list[str]] = {}
    for line in out.getvalue().splitlines():
        title, _, rest = line.partition("\t")
        rows.setdefault(title, []).append(rest)
    return rows


def refused(*arguments: str) -> str:
    """Return why the command line ends."""
    from aioreplica.cli import main

    try:
        main(arguments)
    except SystemExit as end:
        return str(end.code)
    raise AssertionError("the command line did not end")


def seconds(code: str) -> float:
    """Return how long an interpreter takes that runs some code."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    return time.perf_counter() - begin


def import_times() -> str:
    """Compare imports with those of NumPy, in turns."""
    codes = {
        "nothing": "pass",
        "numpy": "import numpy",
        "aioreplica": "import aioreplica",
        "with numpy": "import numpy, aioreplica",
        "every name": "import aioreplica as ar; [getattr(ar, name) for name in ar.__all__]",
    }
    rounds = [{name: seconds(code) for name, code in codes.items()} for _ in range(ROUNDS)]
    middle = {name: statistics.median(each[name] for each in rounds) for name in codes}
    ratios = {
        name: statistics.median(each[name] / each["numpy"] for each in rounds) for name in codes
    }
    return ", ".join(f"{name} {middle[name] * 1e3:.0f} ms ({ratios[name]:.2f})" for name in codes)


async def trains() -> float:
    import numpy as np

    import aioreplica as ar

    async def step() -> float:
        ctx = ar.get_replica_context()
        return await ctx.all_reduce("sum", float(ctx.replica_id_in_sync_group))

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        return float(np.asarray(strategy.local_results(await strategy.run(step))[0]))


if __name__ == "__main__":
    import aioreplica

    assert "site-packages" in str(aioreplica.__file__), aioreplica.__file__
    assert aioreplica.__version__ == importlib.metadata.version("aioreplica")
    for package in ("rich", "torch", "typer"):
        assert importlib.util.find_spec(package) is None, f"{package} is installed here"
    assert asyncio.run(trains()) == 1.0
    found = doctor()
    for extra in ("torch", "jax", "cli"):
        assert any(f'pip install "aioreplica[{extra}]"' in row for row in found["extras"]), extra
    assert all(row.endswith("\tok") for row in found["needed"]), found["needed"]
    assert "pip install 'aioreplica[cli]'" in refused("devices")
    sys.stdout.write(f"import times, and ratios to NumPy: {import_times()}\n")
