"""`aioreplica doctor`: what is installed here, and what each missing extra would bring.

It looks at versions without importing the packages, apart from NumPy, whose BLAS it asks for its
threads. It needs no package of the extra `cli`, so it answers in an environment without it too.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from .._gil import has_gil
from ..devices import lane_table, list_devices
from ..devices.backends import find_backends
from ._rows import print_rows

DISTRIBUTION = "aioreplica"

BRINGS: Mapping[str, str] = {
    "torch": "tensors on cpu and cuda devices, losses and modules of torch, its optimizers",
    "jax": "arrays on gpu and tpu devices, losses and models of jax",
    "optax": "optimizers of optax",
    "autograd": "losses written with autograd.numpy, the default backend of minimize",
    "cupy": "NumPy's functions on cuda devices",
    "mpi": "several workers over MPI",
    "dask": "parameter servers and a coordinator on a Dask cluster",
    "processes": "devices in processes of their own, for functions that hold the GIL",
    "fast": "update rules of optimizers in one pass over memory",
    "web": "the online learner behind FastAPI",
    "checkpoint": "checkpoints in object stores, and the library that looks into their files",
    "telemetry": "metrics for Prometheus and OpenTelemetry, spans, scalars for TensorBoard",
    "cli": "this command line with tables and colours, and the live view",
    "uvloop": "a faster event loop",
}
"""What users get from each extra."""

FOR_DEVELOPERS = frozenset({"bench", "dev", "docs", "examples", "test"})

THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)

NARROW = frozenset({"Haswell", "Zen"})
"""Routines of OpenBLAS without AVX-512, which it chooses by the model of the processor."""

Row: TypeAlias = tuple[str, ...]


def doctor() -> None:
    """Tell what is installed, what is missing, and what the missing part would bring."""
    print_rows(("what", "value"), list(_machine()), title="here")
    print_rows(("library", "version", "threads", "note"), list(_blas()), title="BLAS")
    rows = list(_needed())
    print_rows(("package", "version", "state"), rows, title="needed", red=_wrong(rows))
    rows = list(_backends())
    print_rows(("backend", "devices", "state"), rows, title="backends")
    rows = list(_extras())
    print_rows(("extra", "state", "brings"), rows, title="extras")


def _wrong(rows: Sequence[Row]) -> list[int]:
    return [number for number, row in enumerate(rows) if row[-1] != "ok"]


def _machine() -> Iterator[Row]:
    yield DISTRIBUTION, _version(DISTRIBUTION) or "not installed, found on the path"
    yield "found in", str(Path(__file__).parents[1])
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "interpreter", sys.executable
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "GIL", _gil()
    yield "cores", str(_num_cores())
    yield "devices", ", ".join(map(str, list_devices()))
    settings = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if name in os.environ]
    yield "thread settings", ", ".join(settings) or "none"
    yield "BLAS while a strategy is open", _blas_setting()


def _gil() -> str:
    """Say whether threads take turns, and why."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "on (this build has no other way)"
    forced = _forced_gil()
    if not has_gil():
        return "off, whatever is imported (PYTHON_GIL=0)" if forced == 0 else "off"
    if forced == 1:
        return "on (PYTHON_GIL=1 or -X gil=1)"
    culprits = ", ".join(_turned_gil_on()) or "an extension"
    return f"on: turned back on by {culprits}; PYTHON_GIL=0 leaves it off, at your risk"


def _forced_gil() -> int | None:
    return getattr(sys.flags, "gil", None)


def _turned_gil_on() -> Iterator[str]:
    """Yield the extensions that turned the GIL on: CPython warns of them once, and notes that."""
    for module in list(sys.modules.values()):
        # Not by getattr: some modules make up what they are asked for.
        for key in list(getattr(module, "__dict__", {}).get("__warningregistry__") or ()):
            found = re.search(r"\(GIL\) has been enabled to load module '([^']+)'", str(key))
            if found:
                yield found[1]


def _blas_setting() -> str:
    """Describe what open strategies do to the BLAS threads of the process."""
    threads, way_out = lane_table().blas_threads, "ar.set_lane_options(blas_threads=None)"
    if threads is None:
        return "left alone (blas_threads=None)"
    if threads == "auto":
        return f"cores divided over its CPU devices, for the whole process; else {way_out}"
    return f"{threads} threads, for the whole process (blas_threads={threads})"


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _blas() -> Iterator[Row]:
    """Yield the libraries that NumPy has loaded; strategies divide their threads over devices."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    for library in threadpool_info():
        threads = int(library["num_threads"])
        more = ""
        if threads > _num_cores():
            more = "more than the cores"
        elif library.get("architecture") in NARROW and _has_avx512():
            more = "AVX-512 is left unused: try OPENBLAS_CORETYPE=SKYLAKEX"
        yield library["internal_api"], library["version"] or "", str(threads), more


def _has_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512vl" in cpuinfo.read_text(encoding="utf-8").split()


def _needed() -> Iterator[Row]:
    for name, least, extra in _requirements():
        if not extra:
            found = _version(name)
            yield name, found or "", _state(name, found, least)


def _state(name: str, found: str | None, least: str) -> str:
    if found is None:
        return f"missing: pip install {name}"
    if least and _numbers(found) < _numbers(least):
        return f"too old, {least} is needed: pip install -U {name}"
    return "ok"


def _backends() -> Iterator[Row]:
    installed = {backend.name: backend for backend in find_backends()}
    for point in sorted(metadata.entry_points(group="aioreplica.backends"), key=lambda p: p.name):
        backend = installed.get(point.name)
        if backend is None:
            yield point.name, "", f'pip install "{DISTRIBUTION}[{point.name}]"'
            continue
        kinds = ("cpu", "cuda", "gpu", "tpu")
        counts = [(kind, backend.num_devices(kind)) for kind in kinds]
        text = ", ".join(f"{count} {kind}" for kind, count in counts if count)
        yield point.name, text or "arrays on the host", "ok"


def _extras() -> Iterator[Row]:
    """Yield the extras that this release has: their state, and what they bring."""
    needs: dict[str, list[tuple[str, str]]] = {}
    for name, least, extra in _requirements():
        if extra and extra not in FOR_DEVELOPERS and name != DISTRIBUTION:
            needs.setdefault(extra, []).append((name, least))
    order = {name: number for number, name in enumerate(BRINGS)}
    for extra in sorted(needs, key=lambda each: (order.get(each, len(order)), each)):
        found = [(name, _version(name), least) for name, least in needs[extra]]
        if all(_state(*each) == "ok" for each in found):
            state = ", ".join(f"{name} {version}" for name, version, _ in found)
        else:
            state = f'pip install "{DISTRIBUTION}[{extra}]"'
        yield extra, state, BRINGS.get(extra, "")


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield package, least version and extra of what the distribution says it needs."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        texts = []
    for text in texts:
        found, _, marker = text.partition(";")
        name = re.match(r"[\w.-]+", found)
        least = re.search(r">=\s*([\w.]+)", found)
        extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", marker)
        if name and ("sys_platform != 'win32'" not in marker or sys.platform != "win32"):
            yield name[0], least[1] if least else "", extra[1] if extra else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
