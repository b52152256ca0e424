"""Detection of accelerators without importing an array library."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
TPU_NODES = ("/dev/accel0", "/dev/vfio/0")
TPU_NAMES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR")


def require_installed(package: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        ModuleNotFoundError: If it is not.

    Example:
        >>> require_installed("numpy")
    """
    if package not in sys.modules and find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def may_have_gpu() -> bool:
    """Tell whether there may be a GPU: on Linux if a driver shows one, elsewhere always.

    Importing a library of arrays takes seconds: too long for a program that asks a machine without
    a GPU for its devices.
    """
    return not sys.platform.startswith("linux") or any(map(_exists, GPU_NODES))


def may_have_tpu() -> bool:
    """Tell whether there may be a TPU, by its device files or what its machines have set."""
    return any(name in os.environ for name in TPU_NAMES) or any(map(_exists, TPU_NODES))


def _exists(node: str) -> bool:
    return Path(node).exists()
