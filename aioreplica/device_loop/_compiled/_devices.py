"""The jax devices of a strategy: one for each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ...devices import list_devices
from ...devices.backends import ask_jax_for_cpus
from ...errors import DeviceError


def jax_devices(names: Sequence[str]) -> list[Any]:
    """Return jax's device for each of some devices; "-" is its first CPU.

    Raises:
        DeviceError: If jax has fewer, or two replicas are on one.
    """
    wanted = ["cpu:0" if name == "-" else name for name in names]
    indices = [int(name.partition(":")[2]) for name in wanted if name.startswith("cpu:")]
    if indices:
        ask_jax_for_cpus(max(len(list_devices("cpu")), 1 + max(indices)))
    found = []
    for name in wanted:
        kind, _, index = name.partition(":")
        available = jax.devices(kind)
        if int(index) >= len(available):
            need = 1 + max(indices)
            raise DeviceError(
                f"jax has {len(available)} {kind} devices, but the strategy uses {name}. Their "
                "number is fixed at jax's first operation: call ar.set_logical_devices('cpu', "
                f"{need}) before it (or set JAX_NUM_CPU_DEVICES={need} in the environment).",
                device=name,
            )
        found.append(available[int(index)])
    if len(set(wanted)) < len(wanted):
        raise DeviceError(
            f"A compiled step needs a jax device for each replica, but the strategy has replicas "
            f"on {', '.join(wanted)}. Give each replica a device of its own."
        )
    return found
