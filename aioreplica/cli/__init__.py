"""The command line, `python -m aioreplica`."""

from .._export import export_public
from ._app import main as main

__all__ = ["main"]

export_public(__name__, __all__, globals())
