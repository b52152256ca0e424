"""Device loops that jax compiles; imported when one is asked for, as it needs jax."""

from ._devices import Gang as Gang
from ._loop import CompiledLoop as CompiledLoop
from ._programs import CompiledSteps as CompiledSteps

__all__ = ()
