"""Description of the cluster that launchers put into environment variables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from ._resolver import ClusterResolver

SLURM_FIRST_PORT = 20_000
SLURM_NUM_PORTS = 10_000
KUBERNETES_PORT = 2222
MAX_HOSTS = 1_000_000

WORKERS_BEFORE = "AIOREPLICA_WORKERS_BEFORE"
"""The variable that tells workers which were added how many there were before."""

MEETING = "AIOREPLICA_MEETING"
"""The variable that tells workers which were added with Gloo where in the store the others wait."""

TORCH_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})

ADDED = "added by strategy.grow"


def resolve(
    environment: Mapping[str, str] | None = None, *, num_workers: int | None = None
) -> ClusterResolver:
    """Return what the launcher of this process said of the cluster; one worker if none did.

    The first of these that is there counts: `TF_CONFIG`; torchrun; mpirun of Open MPI, then of
    MPICH and its relatives; a step of Slurm (`srun`); an indexed job of Kubernetes.

    Args:
        environment: The variables; None takes those of the process.
        num_workers: How many workers there are, where the launcher does not say: Kubernetes.

    Returns:
        The resolver. Its `cluster_spec` is empty under torchrun, mpirun and Kubernetes, which do
        not tell addresses of others; mpirun has no `coordinator_address` either.

    Raises:
        ValueError: If variables are missing or malformed; names them.
        TypeError: If `TF_CONFIG` holds values of wrong types.

    Example:
        >>> resolver = resolve({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
        >>> resolver.rank, resolver.num_workers, resolver.source
        (1, 4, 'mpirun (Open MPI)')
    """
    values = dict(os.environ if environment is None else environment)
    if values.keys() >= {WORKERS_BEFORE, *TORCH_VARIABLES}:  # the rest is of who has started it
        return _from_torchrun(values, ADDED)
    if values.get("TF_CONFIG", "").strip():
        return _from_tf_config(values["TF_CONFIG"])
    if values.keys() >= TORCH_VARIABLES:
        return _from_torchrun(values, "torchrun")
    for source, rank, size in _MPI:
        if rank in values:
            return _of_mpi(values, rank, size, source)
    if {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= values.keys():
        return _from_slurm(values)
    if "JOB_COMPLETION_INDEX" in values:
        return _from_kubernetes(values, num_workers)
    count = 1 if num_workers is None else num_workers
    return ClusterResolver(num_workers=count, source="no launcher")


_MPI = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE"),
)


def is_added(resolver: ClusterResolver) -> bool:
    """Tell whether others have started this worker, and wait for it in `strategy.grow`."""
    return resolver.source.endswith(ADDED)


def _of_mpi(values: Mapping[str, str], rank: str, size: str, source: str) -> ClusterResolver:
    """Read the variables of mpirun, which count those only that were started together."""
    if WORKERS_BEFORE not in values:
        return _ranked(values, rank, size, source)
    before = _number(values, WORKERS_BEFORE, source)
    return ClusterResolver(
        task_id=before + _number(values, rank, source),
        num_workers=before + _number(values, size, source),
        source=f"{source}, {ADDED}",
    )


def _from_tf_config(text: str) -> ClusterResolver:
    """Read what tf.distribute reads: the "cluster", and the "type" and "index" of this "task"."""
    source = "TF_CONFIG"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG is not JSON: {error}. It is {_short(text)}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG is a JSON object, got {_short(text)}.")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not isinstance(task, dict):
        raise ValueError(f'"task" in TF_CONFIG is an object, got {task!r}.')
    if cluster and not {"type", "index"} <= task.keys():
        raise ValueError(
            f'"task" in TF_CONFIG has to have "type" and "index" to say which task of the cluster '
            f"this process is, got {task!r}."
        )
    index = task.get("index", 0)
    if isinstance(index, str) and index.strip().isdecimal():
        index = int(index)  # TensorFlow takes both
    return ClusterResolver(cluster, str(task.get("type", "worker")), index, source=source)


def _from_torchrun(values: Mapping[str, str], source: str) -> ClusterResolver:
    return _ranked(
        values, "RANK", "WORLD_SIZE", source,
        address=f"{values['MASTER_ADDR']}:{values['MASTER_PORT']}",
    )  # fmt: skip


def _from_slurm(values: Mapping[str, str]) -> ClusterResolver:
    """Read the variables of one step: hosts, tasks of each, and a port that follows from the job.

    Raises:
        ValueError: If a variable is malformed, or the counts do not agree.
    """
    source = "srun (Slurm)"
    hosts = expand_hosts(values["SLURM_STEP_NODELIST"])
    count = _number(values, _first(values, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), source)
    per_host = values.get("SLURM_STEP_TASKS_PER_NODE")
    tasks = [count // len(hosts)] * len(hosts) if per_host is None else _counts(per_host)
    if len(tasks) != len(hosts) or sum(tasks) != count:
        raise ValueError(
            f"Slurm says {count} tasks, on {len(hosts)} hosts {tasks}: these do not agree. "
            f"({source}: SLURM_STEP_NODELIST={values['SLURM_STEP_NODELIST']!r}, "
            f"SLURM_STEP_TASKS_PER_NODE={per_host!r})"
        )
    job = _number(values, "SLURM_JOB_ID", source) if "SLURM_JOB_ID" in values else 0
    port = SLURM_FIRST_PORT + job % SLURM_NUM_PORTS
    pairs = zip(hosts, tasks, strict=True)
    workers = [f"{host}:{port + i}" for host, number in pairs for i in range(number)]
    rank = _number(values, "SLURM_PROCID", source)
    return ClusterResolver({"worker": workers}, task_id=rank, source=source)


def _from_kubernetes(values: Mapping[str, str], num_workers: int | None) -> ClusterResolver:
    """Read the index of a job's pod; how many there are is not told to it."""
    source = "an indexed job of Kubernetes"
    if num_workers is None:
        if "AIOREPLICA_NUM_WORKERS" not in values:
            raise ValueError(
                "Kubernetes tells a pod its index (JOB_COMPLETION_INDEX), not how many there are. "
                "Pass num_workers, or set AIOREPLICA_NUM_WORKERS to the job's completions."
            )
        num_workers = _number(values, "AIOREPLICA_NUM_WORKERS", source)
    rank = _number(values, "JOB_COMPLETION_INDEX", source)
    host, suffix = values.get("HOSTNAME", ""), f"-{rank}"
    subdomain = values.get("AIOREPLICA_SUBDOMAIN")
    address = None
    if subdomain and host.endswith(suffix):
        address = f"{host.removesuffix(suffix)}-0.{subdomain}:{KUBERNETES_PORT}"
    return ClusterResolver(
        task_id=rank, num_workers=num_workers, coordinator_address=address, source=source
    )


def _ranked(
    values: Mapping[str, str], rank: str, size: str, source: str, address: str | None = None
) -> ClusterResolver:
    return ClusterResolver(
        task_id=_number(values, rank, source),
        num_workers=_number(values, size, source),
        coordinator_address=address,
        source=source,
    )


def _first(values: Mapping[str, str], *names: str) -> str:
    return next((name for name in names if name in values), names[0])


def _number(values: Mapping[str, str], name: str, source: str) -> int:
    text = values.get(name)
    if text is None or not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise ValueError(f"{name} has to be a whole number, got {text!r}. ({source})")
    return int(text)


def _counts(text: str) -> list[int]:
    """Read how many tasks each host has, such as "2(x3),1"."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is like '2(x3),1', got {text!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it, in order.

    Raises:
        ValueError: If it is malformed, or has more than a million hosts.

    Example:
        >>> expand_hosts("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']

    Source:
        The format that `scontrol show hostnames` reads.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text or not parts:
        raise ValueError(f"A list of hosts is like 'node[01-04,7],other', got {text!r}.")
    hosts: list[str] = []
    for part in parts:
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [plain] if plain else _range(ranges, text)
            if len(names) * len(ends) + len(hosts) > MAX_HOSTS:
                raise ValueError(f"The list of hosts {_short(text)} has more than {MAX_HOSTS}.")
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _range(ranges: str, text: str) -> list[str]:
    ends: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"A list of hosts is like 'node[01-04,7],other', got {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MAX_HOSTS:
            raise ValueError(f"The list of hosts {_short(text)} has more than {MAX_HOSTS}.")
        ends += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return ends


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:76]}...'"
