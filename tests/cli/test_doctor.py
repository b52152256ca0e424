"""`doctor`: it always answers, and knows every extra that the package has."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from threadpoolctl import threadpool_info

from aioreplica.cli import _doctor, main
from aioreplica.devices import lane_table

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
EXTRAS = set(SETTINGS["project"]["optional-dependencies"]) - _doctor.FOR_DEVELOPERS


def answers(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, list[str]]]:
    """Run the command; return the fields of each row by its title and first field."""
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    found: dict[str, dict[str, list[str]]] = {}
    for line in out.splitlines():
        title, first, *rest = line.split("\t")
        found.setdefault(title, {})[first] = rest
    return found


def test_doctor_lists_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys)

    assert found["here"]["python"][0].startswith(".".join(map(str, sys.version_info[:2])))
    assert found["needed"]["numpy"] == [metadata.version("numpy"), "ok"]
    assert {row[-1] for row in found["needed"].values()} == {"ok"}
    assert found["here"]["devices"] == [", ".join(f"cpu:{i}" for i in range(8))]
    assert found["backends"]["numpy"][-1] == "ok"
    assert all(int(row[1]) >= 1 for row in found["BLAS"].values())


@pytest.mark.parametrize(
    ("setting", "said"), [("auto", "divided over"), (None, "left alone"), (3, "3 threads")]
)
def test_doctor_shows_the_blas_threads_of_open_strategies(
    setting: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_table(), "blas_threads", setting)

    assert said in answers(capsys)["here"]["BLAS while a strategy is open"][0]


WARNED = (
    "The global interpreter lock (GIL) has been enabled to load module 'slowpoke._core', which has "
    "not declared that it can run safely without the GIL."
)


@pytest.mark.parametrize(
    ("is_free_threaded", "is_on", "forced", "warned", "said"),
    [
        (False, True, None, (), "on (this build has no other way)"),
        (True, False, None, (), "off"),
        (True, False, 0, (), "off, whatever is imported (PYTHON_GIL=0)"),
        (True, True, 1, (), "on (PYTHON_GIL=1 or -X gil=1)"),
        (True, True, None, (), "on: turned back on by an extension; "),
        (True, True, None, (WARNED,), "on: turned back on by slowpoke._core; "),
    ],
)
def test_doctor_says_whether_the_gil_is_on_and_who_turned_it_on(
    is_free_threaded: bool,
    is_on: bool,
    forced: int | None,
    warned: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = {"version": 0, **{(text, RuntimeWarning, 488): True for text in warned}}
    bootstrap = SimpleNamespace(__warningregistry__=registry)
    monkeypatch.setitem(sys.modules, "bootstrap of a test", bootstrap)
    monkeypatch.setattr("sysconfig.get_config_var", lambda _name: is_free_threaded)
    monkeypatch.setattr(_doctor, "has_gil", lambda: is_on)
    monkeypatch.setattr(_doctor, "_forced_gil", lambda: forced)

    assert answers(capsys)["here"]["GIL"][0].startswith(said)


def test_every_extra_of_the_package_says_what_it_brings() -> None:
    assert EXTRAS - set(_doctor.BRINGS) == set()


def test_every_extra_is_on_the_page_about_installing() -> None:
    page = (Path(__file__).parents[2] / "docs/installing.md").read_text(encoding="utf-8")
    rows = " ".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("|"))

    assert {extra for extra in EXTRAS if f"`{extra}`" not in rows} == set()


def test_bare_it_names_the_extra_that_brings_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = {"aioreplica", "anyio", "array-api-compat", "numpy", "optree", "threadpoolctl"}
    declared = [
        f"{need}; extra == '{extra}'"
        for extra, needs in {
            **SETTINGS["project"]["optional-dependencies"],
            "mpi": ["mpi4py>=4"],
            "dask": ["distributed>=2025"],
        }.items()
        for need in needs
    ]
    version = metadata.version

    def only_core(name: str) -> str:
        if name not in core:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", only_core)
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=99", *declared])
    for package in ("typer", "rich"):  # it answers without the packages of its own extra
        monkeypatch.setitem(sys.modules, package, None)

    found = answers(capsys)

    for extra in ("torch", "jax", "mpi", "dask", "cli"):
        assert found["extras"][extra] == [
            f'pip install "aioreplica[{extra}]"',
            _doctor.BRINGS[extra],
        ]
    assert set(found["extras"]) >= EXTRAS
    assert not set(found["extras"]) & _doctor.FOR_DEVELOPERS
    assert found["needed"]["numpy"][-1] == "too old, 99 is needed: pip install -U numpy"


def test_more_threads_than_cores_are_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_doctor, "_num_cores", lambda: 0)

    assert {row[-1] for row in answers(capsys)["BLAS"].values()} == {"more than the cores"}


def test_unused_avx512_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {row["architecture"] for row in threadpool_info() if "architecture" in row}
    monkeypatch.setattr(_doctor, "NARROW", chosen)
    monkeypatch.setattr(_doctor, "_num_cores", lambda: 1000)
    notes = {}
    for has_it in (True, False):
        monkeypatch.setattr(_doctor, "_has_avx512", lambda has_it=has_it: has_it)
        notes[has_it] = " ".join(row[-1] for row in answers(capsys)["BLAS"].values())

    assert ("OPENBLAS_CORETYPE" in notes[True]) is bool(chosen)
    assert "OPENBLAS_CORETYPE" not in notes[False]
