"""The jax backend: arrays on the host, on GPUs and on TPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import final

import numpy as np
from array_api_compat import is_jax_array

from ...typing import ReduceOp
from ._backend import Array, Backend
from ._discover import may_have_gpu, may_have_tpu, require_installed
from ._namespace import reduce_in_namespace

NUM_CPUS = "JAX_NUM_CPU_DEVICES"
FORCED = "xla_force_host_platform_device_count"


@final
class JaxBackend(Backend):
    """Arrays of JAX, which is imported when the first one is made or asked for.

    Raises:
        ModuleNotFoundError: If jax is not installed.
    """

    def __init__(self) -> None:
        require_installed("jax")

    @property
    def name(self) -> str:
        """The entry point's name."""
        return "jax"

    @property
    def has_streams(self) -> bool:
        """False: an array is waited for by whatever reads it, on devices and on the host."""
        return False

    def num_devices(self, kind: str) -> int:
        """Return the GPUs or TPUs, 0 for other kinds: the host's CPUs are NumPy's to count."""
        if not (kind == "gpu" and may_have_gpu()) and not (kind == "tpu" and may_have_tpu()):
            return 0
        import jax

        try:
            return len(jax.devices(kind))
        except RuntimeError:  # jax was built without that kind, or finds none
            return 0

    def owns(self, value: object) -> bool:
        """Tell whether `value` is a JAX array, or a tracer of one."""
        return bool(is_jax_array(value))

    def put(self, value: Array, device: str) -> Array:
        """Return `value` as an array on a device. What is 64 bits wide keeps them only if jax may.

        That is a setting of the process: `jax.config.update("jax_enable_x64", True)`.
        """
        import jax

        return jax.device_put(value, _jax_device(device))

    def get(self, array: Array) -> Array:
        """Return an array's numbers as a NumPy array, without a copy on the host."""
        return np.asarray(array)

    def scope(self, device: str) -> AbstractContextManager[None]:
        """Make a device the one that jax puts new arrays on."""
        import jax

        scope: AbstractContextManager[None] = jax.default_device(_jax_device(device))
        return scope

    def synchronise(self, device: str) -> None:
        """Wait for what was put on a device: its ops end in the order they were put."""
        import jax

        jax.device_put(0, _jax_device(device)).block_until_ready()

    def keep(self, array: Array) -> None:
        """Do nothing: there is no stream."""

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine arrays left to right, on the device of the first."""
        import jax

        device = next(iter(arrays[0].devices())) if arrays else None
        return reduce_in_namespace(op, [jax.device_put(array, device) for array in arrays])


def ask_jax_for_cpus(count: int) -> None:
    """Ask jax to have at least `count` CPU devices, without importing it.

    A jax that has run an operation keeps the number that it has.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        if int(os.environ.get(NUM_CPUS) or 0) < count and FORCED not in os.environ.get(
            "XLA_FLAGS", ""
        ):
            os.environ[NUM_CPUS] = str(count)
        return
    if jax.config.jax_num_cpu_devices < count:
        with suppress(RuntimeError):  # it is in use
            jax.config.update("jax_num_cpu_devices", count)


def _jax_device(name: str) -> object:
    """Return jax's device: all logical CPU devices are its first CPU."""
    import jax

    kind, _, index = name.partition(":")
    return jax.devices(kind)[0 if kind == "cpu" else int(index or 0)]
