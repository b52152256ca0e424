"""Metrics: every replica adds to its own totals, which are combined where they are read."""

from .._export import export_public
from ._classification import AUC as AUC
from ._classification import Accuracy as Accuracy
from ._classification import MeanIoU as MeanIoU
from ._classification import Precision as Precision
from ._classification import Recall as Recall
from ._classification import TopKAccuracy as TopKAccuracy
from ._mean import Mean as Mean
from ._mean import MeanTensor as MeanTensor
from ._mean import Sum as Sum
from ._metric import Metric as Metric

__all__ = [
    "AUC",
    "Accuracy",
    "Mean",
    "MeanIoU",
    "MeanTensor",
    "Metric",
    "Precision",
    "Recall",
    "Sum",
    "TopKAccuracy",
]

export_public(__name__, __all__, globals())
