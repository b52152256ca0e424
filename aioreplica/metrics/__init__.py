"""Metrics: every replica adds to its own totals, which are combined where they are read."""

from .._export import export_public
from ._accuracy import Accuracy as Accuracy
from ._mean import Mean as Mean
from ._metric import Metric as Metric
from ._sum import Sum as Sum

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]

export_public(__name__, __all__, globals())
