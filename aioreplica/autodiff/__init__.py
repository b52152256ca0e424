"""Gradients: adapters of libraries that differentiate, losses that read variables, models."""

from .._export import export_public
from ._adapter import Adapter as Adapter
from ._adapter import Watch as Watch
from ._collectives import all_gather as all_gather
from ._collectives import all_reduce as all_reduce
from ._collectives import broadcast as broadcast
from ._collectives import reduce_scatter as reduce_scatter
from ._linear import LinearCollective as LinearCollective
from ._models import jax_key as jax_key
from ._models import jax_variables as jax_variables
from ._models import torch_generator as torch_generator
from ._models import torch_module as torch_module
from ._value_and_grad import find_adapter as find_adapter
from ._value_and_grad import run_outside as run_outside
from ._value_and_grad import value_and_grad as value_and_grad
from ._variables import VariableReads as VariableReads
from ._variables import differentiate_variables as differentiate_variables
from ._variables import embedding_lookup as embedding_lookup
from ._variables import embedding_lookup_sparse as embedding_lookup_sparse

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "differentiate_variables",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "jax_key",
    "jax_variables",
    "reduce_scatter",
    "torch_generator",
    "torch_module",
    "value_and_grad",
]

export_public(__name__, __all__, globals())
