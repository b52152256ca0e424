"""Array backends: how each kind of device holds, moves and reduces arrays."""

from ..._export import export_public
from ._backend import Backend as Backend
from ._discover import backend_of as backend_of
from ._discover import find_backends as find_backends
from ._numpy import NumpyBackend as NumpyBackend
from ._numpy_reduce import reduce_arrays as reduce_arrays
from ._numpy_reduce import reduce_block as reduce_block
from ._numpy_reduce import reduce_into as reduce_into
from ._numpy_reduce import result_dtype as result_dtype

__all__ = [
    "Backend",
    "NumpyBackend",
    "backend_of",
    "find_backends",
    "reduce_arrays",
    "reduce_block",
    "reduce_into",
    "result_dtype",
]

export_public(__name__, __all__, globals())
