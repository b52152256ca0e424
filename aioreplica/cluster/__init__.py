"""Clusters: which workers there are, and which one this process is."""

from .._export import export_public
from ._environment import resolve as resolve
from ._resolver import ClusterResolver as ClusterResolver

__all__ = ["ClusterResolver", "resolve"]

export_public(__name__, __all__, globals())
