"""What `import aioreplica` and the testing kit load, and that nothing is lost by it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aioreplica

PACKAGE = Path(aioreplica.__file__).parent
PLAIN_PROGRAM = """
import sys
import asyncio
import aioreplica.testing as art

async def main():
    await asyncio.gather(asyncio.to_thread(int), asyncio.sleep(1))

art.explore(main, schedules=20).check()
art.cancel_everywhere(main).check()
print(*sys.modules)
"""

FIRST_RUN = """
import sys
import asyncio
import aioreplica as ar

async def step():
    await ar.get_replica_context().all_reduce("sum", 1.0)

async def main():
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ar.Variable(1.0)
        await strategy.run(step)

asyncio.run(main())
print(*sys.modules)
"""
WHEN_USED = (  # packages and modules of the library, and what the standard library is slow to load
    "aioreplica.autodiff", "aioreplica.checkpoint", "aioreplica.cluster", "aioreplica.device_loop",
    "aioreplica.input", "aioreplica.metrics", "aioreplica.online", "aioreplica.optimizers",
    "aioreplica.strategies._loop_watch", "aioreplica.strategies._multi_worker",
    "aioreplica.strategies._run_steps", "aioreplica.strategies._tpu",
    "aioreplica.strategies.parameter_server", "aioreplica.telemetry._trace", "importlib.metadata",
    "json",
)  # fmt: skip


def stubbed() -> dict[str, str]:
    """Return the names of the stub, and the package that each comes from."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    return {
        alias.name: node.module or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def modules_after(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_stub_names_every_export() -> None:
    homes = stubbed()

    assert sorted(homes) == aioreplica.__all__
    for name, home in homes.items():
        package = getattr(aioreplica, home)
        found = getattr(aioreplica, name)
        assert found is (package if name == home else getattr(package, name)), name
    assert set(homes) <= set(dir(aioreplica))


def test_the_stub_of_strategies_names_what_is_exported() -> None:
    strategies = aioreplica.strategies
    stub = ast.parse((PACKAGE / "strategies" / "__init__.pyi").read_text(encoding="utf-8"))
    named = [a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names]

    assert sorted(named) == strategies.__all__
    for name in named:
        assert getattr(strategies, name) is getattr(aioreplica, name, getattr(strategies, name))


def test_a_first_run_loads_what_it_uses() -> None:
    loaded = modules_after(FIRST_RUN)

    assert "aioreplica.strategies._mirrored" in loaded
    assert [name for name in WHEN_USED if name in loaded] == []


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"'aioreplica' has no attribute 'Strategie'"):
        _ = aioreplica.Strategie  # type: ignore[attr-defined]


def test_the_kit_alone_loads_no_arrays() -> None:
    loaded = modules_after(PLAIN_PROGRAM)

    assert "aioreplica.testing" in loaded
    assert not {"numpy", "optree", "aioreplica.devices", "hypothesis"} & loaded


def test_the_plugin_alone_loads_no_kit() -> None:
    plugin = "aioreplica.integrations._pytest_plugin"
    loaded = modules_after(f"import sys, {plugin}\nprint(*sys.modules)")

    ours = {name for name in loaded if name.startswith("aioreplica")}
    suite = "aioreplica.integrations._pytest_plugin"
    assert ours == {"aioreplica", "aioreplica._export", "aioreplica.integrations", plugin, suite}


@pytest.mark.xslow
def test_the_library_may_be_imported_by_the_program_itself() -> None:
    program = """
import aioreplica.testing as art

async def main():
    import aioreplica as ar
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        return str(await strategy.run(lambda: 3))

assert art.run(main) == "PerReplica({cpu:0: 3})"
"""
    modules_after(program)
