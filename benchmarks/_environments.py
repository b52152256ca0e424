"""Environments: one for each release of a package, made once, in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final


@final
class Environments:
    """Virtual environments under one folder, named after what is in them.

    Args:
        name: Of the folder, in the user's cache.
        python: The interpreter of the environments; this one by default.
        folder: Takes the place of the one in the cache.

    An environment is complete once its marker is written, so one that was interrupted is made
    again.
    """

    def __init__(self, name: str, python: str | None = None, folder: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        self._folder = folder or cache / "aioreplica" / name
        self._python = python or sys.executable

    def python_of(self, version: str) -> str | None:
        """Find an interpreter of exactly this version: the given one, on the path, or pyenv's."""
        short = ".".join(version.split(".")[:2])
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions" / version
        for found in (self._python, shutil.which(f"python{short}"), str(pyenv / "bin" / "python")):
            if found and Path(found).exists() and _version(found) == version:
                return found
        return None

    def make(self, package: str, version: str, needs: Sequence[str]) -> Path | None:
        """Return the interpreter of the environment of a release; make it if it is not there.

        Args:
            package: As the index names it, or "cpython" for a release of Python itself.
            version: The release.
            needs: What else it holds, with versions.

        Returns:
            The interpreter; None if it is for a Python that is not on this machine.

        Raises:
            RuntimeError: If something cannot be installed.
        """
        python: str | None = self._python
        wanted = [*needs]
        if package == "cpython":
            python = self.python_of(version)
            if python is None:
                return None
        else:
            wanted.insert(0, f"{package}=={version}")
        folder = self._folder / f"{package}-{version}-py{_version(str(python))}"
        interpreter, marker = folder / "bin" / "python", folder / "complete"
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([str(python), "-m", "venv", "--without-pip", str(folder)], check=True)
            _install(interpreter, wanted)
            marker.touch()
        return interpreter

    def add(self, interpreter: Path, tool: str) -> bool:
        """Add another tool to an environment; tell whether it is there now."""
        marker = interpreter.parents[1] / tool
        if not marker.exists():
            try:
                _install(interpreter, [tool])
            except RuntimeError:  # it has no release for this Python
                return False
            marker.touch()
        return True


def _install(interpreter: Path, wanted: Sequence[str]) -> None:
    uv = shutil.which("uv")
    pip = [uv, "pip", "install", "--python", str(interpreter)] if uv else [
        sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--no-compile",
    ]  # fmt: skip
    result = subprocess.run([*pip, "--quiet", *wanted], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"Cannot install {', '.join(wanted)}: {result.stderr.strip()[-800:]}")


def _version(python: str) -> str:
    """Return the version of an interpreter; empty if it does not start, as a shim of pyenv may."""
    code = "import platform; print(platform.python_version())"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip()
