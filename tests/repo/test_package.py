"""What is published: one version, in every place that names it, and classifiers that are true."""

import re
import tomllib
from pathlib import Path

import aioreplica

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_in_one_place() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")

    assert SETTINGS["project"]["dynamic"] == ["version"]
    assert SETTINGS["tool"]["hatch"]["version"]["path"] == "aioreplica/__init__.py"
    assert re.findall(r"^version: (.*)$", citation, re.M) == [aioreplica.__version__]


def test_the_classifiers_say_what_is_checked() -> None:
    classifiers = SETTINGS["project"]["classifiers"]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (others,) = re.findall(r"^versions=\((.*)\)$", script, re.M)
    least = SETTINGS["project"]["requires-python"].removeprefix(">=")

    claimed = {c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)}
    assert claimed == {least, *others.split()}
    assert ("Typing :: Typed" in classifiers) == (ROOT / "aioreplica/py.typed").exists()
    assert SETTINGS["project"]["license"] == "Apache-2.0"


def test_examples_are_short() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "examples").glob("*.py")
    }

    assert lengths
    assert {name: length for name, length in lengths.items() if length >= 150} == {}


def test_every_example_is_on_the_page_of_examples() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    found = {*(ROOT / "examples").glob("*.*"), *(ROOT / "examples").glob("[!_]*/")}

    assert {path.name for path in found if path.name not in page} == set()
