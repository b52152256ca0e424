"""Connections to other programs: exporters, the live view, the pytest plugin."""

__all__ = ()
