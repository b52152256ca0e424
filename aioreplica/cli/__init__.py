"""The command line, `python -m aioreplica`."""

from ._app import main as main

__all__ = ()
