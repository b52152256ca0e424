"""Waits of a run in progress, read from outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from ..telemetry import ReplicaWait
from ._group import ReplicaGroup


def waits_of(group: ReplicaGroup) -> Iterator[ReplicaWait]:
    """Yield what each replica of a run waits for: collectives, then ops, then what else."""
    point = group.point
    devices = point.everyone.device_names
    for replica, device in zip(group.replicas, devices, strict=True):
        replica_id = replica.replica_id
        with point.lock or nullcontext():
            waits = point.rendezvous.waits(replica_id)
        for generation in waits:
            yield ReplicaWait(
                group.step,
                replica_id,
                device,
                generation.describe(),
                generation.missing_members(),
                generation.call_of(replica_id).site,
            )
        for op in group.ops.unfinished(replica_id):
            state = "runs" if op.is_running else "is queued"
            what = f"{op.fn_name}, which {state} on {op.device_name or device}"
            yield ReplicaWait(group.step, replica_id, device, what, (), op.where)
        if group.is_blocking and replica.activity is not None:
            yield ReplicaWait(group.step, replica_id, device, replica.activity, (), "-")
