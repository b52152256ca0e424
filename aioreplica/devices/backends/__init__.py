"""Array backends: how each kind of device holds, moves and reduces arrays."""

from ..._export import export_public
from ._backend import Array as Array
from ._backend import Backend as Backend
from ._cupy import CupyBackend as CupyBackend
from ._discover import backend_of as backend_of
from ._discover import find_backends as find_backends
from ._discover import numpy_backend as numpy_backend
from ._jax import JaxBackend as JaxBackend
from ._jax import ask_jax_for_cpus as ask_jax_for_cpus
from ._namespace import join_arrays as join_arrays
from ._namespace import reduce_in_namespace as reduce_in_namespace
from ._namespace import share_array as share_array
from ._namespace import share_parts as share_parts
from ._namespace import trace_of as trace_of
from ._namespace import untraced as untraced
from ._numpy import NumpyBackend as NumpyBackend
from ._numpy import reduce_arrays as reduce_arrays
from ._numpy import reduce_block as reduce_block
from ._numpy import reduce_into as reduce_into
from ._numpy import result_dtype as result_dtype
from ._torch import TorchBackend as TorchBackend

__all__ = [
    "Backend",
]

export_public(__name__, __all__, globals())
