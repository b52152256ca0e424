"""Cluster resolvers: what arguments and launchers say, on recorded environments."""

import json
import pickle
from typing import Any

import pytest

from aioreplica.cluster import ClusterResolver, resolve

WORKERS = ("a:2222", "b:2222", "c:2222")

TORCHRUN = {
    "LOCAL_RANK": "1", "RANK": "3", "GROUP_RANK": "1", "ROLE_RANK": "3", "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node-81@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "0"}
SLURM = {
    "SLURM_JOB_ID": "1234567", "SLURM_PROCID": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[08-10],login", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2", "KUBERNETES_PORT": "443"}


def tf_config(task: object, **cluster: object) -> str:
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


def test_arguments_with_a_chief() -> None:
    spec = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": []}
    second = ClusterResolver(spec, "worker", 1)

    assert (second.rank, second.num_workers, second.is_chief) == (2, 3, False)
    assert second.workers == ("a:1", "b:1", "c:1")
    assert second.coordinator_address == "a:1"
    assert ClusterResolver(spec, "chief").is_chief
    assert ClusterResolver(spec, "ps").rank is None
    assert ClusterResolver(spec, "evaluator").rank is None
    assert pickle.loads(pickle.dumps(second)) == second
    assert len({second, ClusterResolver(spec, "worker", 1)}) == 1


def test_without_a_launcher_there_is_one_worker() -> None:
    alone = resolve({"PATH": "/bin"})

    assert (alone.rank, alone.num_workers, alone.is_chief) == (0, 1, True)
    assert (alone.cluster_spec, alone.coordinator_address) == ({}, None)


@pytest.mark.parametrize("number", [0, -1])
def test_without_a_launcher_the_number_of_workers_is_looked_at_too(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_workers is 1 or more, got {number}"):
        resolve({}, num_workers=number)


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH])
def test_workers_that_mpi_has_added_come_behind_the_others(launcher: dict[str, str]) -> None:
    started = resolve(launcher)
    added = resolve({**launcher, "AIOREPLICA_WORKERS_BEFORE": "3"})

    assert (added.rank, added.num_workers) == (3 + (started.rank or 0), 5)
    assert added.source == f"{started.source}, added by strategy.grow"


def test_a_worker_that_gloo_has_added_takes_the_place_that_others_gave_it() -> None:
    added = resolve({**TORCHRUN, "TF_CONFIG": "of another", "AIOREPLICA_WORKERS_BEFORE": "2"})

    assert (added.rank, added.num_workers) == (int(TORCHRUN["RANK"]), int(TORCHRUN["WORLD_SIZE"]))
    assert added.coordinator_address is not None
    assert added.source == "added by strategy.grow"


@pytest.mark.parametrize("index", [1, "1"])
def test_tf_config(index: object) -> None:
    task = {"type": "worker", "index": index}
    found = resolve({**TORCHRUN, "TF_CONFIG": tf_config(task, worker=list(WORKERS))})

    assert (found.task_type, found.task_id, found.rank, found.num_workers) == ("worker", 1, 1, 3)
    assert (found.workers, found.coordinator_address) == (WORKERS, WORKERS[0])
    assert found.source == "TF_CONFIG"


def test_tf_config_of_a_local_program() -> None:
    assert resolve({"TF_CONFIG": "{}"}).num_workers == 1


@pytest.mark.parametrize(
    ("environment", "rank", "count", "coordinator", "source"),
    [
        (TORCHRUN, 3, 4, "node-a:29500", "torchrun"),
        (OPEN_MPI, 1, 2, None, "mpirun (Open MPI)"),
        ({**SLURM, **OPEN_MPI}, 1, 2, None, "mpirun (Open MPI)"),
        (MPICH, 0, 2, None, "mpirun (MPICH)"),
        (SLURM, 5, 7, "gpu08:24567", "srun (Slurm)"),
    ],
)
def test_launchers(
    environment: dict[str, str], rank: int, count: int, coordinator: str | None, source: str
) -> None:
    found = resolve(environment)

    assert (found.rank, found.num_workers, found.source) == (rank, count, source)
    assert found.coordinator_address == coordinator


def test_slurm_gives_each_task_an_address() -> None:
    found = resolve(SLURM)

    hosts = ["gpu08", "gpu08", "gpu09", "gpu09", "gpu10", "gpu10", "login"]
    assert [worker.partition(":")[0] for worker in found.workers] == hosts
    assert len(set(found.workers)) == 7


def test_kubernetes_is_told_how_many_there_are() -> None:
    found = resolve(KUBERNETES, num_workers=4)
    named = resolve(
        {**KUBERNETES, "AIOREPLICA_NUM_WORKERS": "4", "AIOREPLICA_SUBDOMAIN": "train-svc"}
    )

    assert (found.rank, found.num_workers, found.coordinator_address) == (2, 4, None)
    assert named.coordinator_address == "train-0.train-svc:2222"


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ("{cluster: 1}", ValueError, "TF_CONFIG is not JSON"),
        ("[1, 2]", ValueError, "TF_CONFIG is a JSON object"),
        ('{"cluster": ["a:1"]}', ValueError, 'has to have "type" and "index"'),
        ('{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}', TypeError, "mapping"),
        ('{"cluster": {"worker": ["a:1"]}, "task": 3}', ValueError, '"task" in TF_CONFIG'),
        (tf_config({}, worker=["a:1"]), ValueError, 'has to have "type" and "index"'),
        (tf_config({"type": "boss", "index": 0}, worker=["a:1"]), ValueError, "'boss'"),
        (tf_config({"type": "worker", "index": 1}, worker=["a:1"]), ValueError, "worker 1, but"),
        (tf_config({"type": "worker", "index": "x"}, worker=["a:1"]), TypeError, "task_id is an"),
        (tf_config({"type": "worker", "index": -1}, worker=["a:1"]), ValueError, "0 or more"),
        (tf_config({"type": "worker", "index": 0}, worker="a:1"), TypeError, "list of addresses"),
        (tf_config({"type": "worker", "index": 0}, worker=["a"]), ValueError, "'host:port'"),
        (tf_config({"type": "worker", "index": 0}, worker=["a:99999"]), ValueError, "65535"),
        (tf_config({"type": "worker", "index": 0}, worker=[3]), TypeError, "is text"),
        (tf_config({"type": "worker", "index": 0}, worker=["a:1"] * 2), ValueError, "same address"),
        (tf_config({"type": "chief", "index": 0}, chief=["a:1", "b:1"]), ValueError, "one chief"),
        (tf_config({"type": "worker", "index": 0}, cook=["a:1"]), ValueError, "Unknown task type"),
    ],
)
def test_malformed_tf_config(config: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        resolve({"TF_CONFIG": config})


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**TORCHRUN, "RANK": "four"}, "RANK has to be a whole number"),
        ({**TORCHRUN, "RANK": "4"}, "task_id is 4, but there are 4 workers"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "coordinator_address"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE has to be a whole number, got None"),
        ({**MPICH, "PMI_SIZE": "0"}, "num_workers is 1 or more"),
        ({**MPICH, "AIOREPLICA_WORKERS_BEFORE": "no"}, "WORKERS_BEFORE has to be a whole number"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[8"}, "A list of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[9-8]"}, "A list of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[0-9999999]"}, "more than 1000000"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "is like"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,2"}, "do not agree"),
        (KUBERNETES, "Pass num_workers"),
    ],
)
def test_malformed_variables(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(environment)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_workers": 3, "cluster_spec": {"worker": ["a:1"]}}, ValueError, "the cluster has 1"),
        ({"num_workers": 2, "task_id": 2}, ValueError, "counted from 0"),
        ({"num_workers": True}, ValueError, "1 or more"),
        ({"num_workers": 2.0}, TypeError, "is an int"),
        ({"coordinator_address": "a b:1"}, ValueError, "'host:port'"),
        ({"task_type": "chief", "task_id": 1}, ValueError, "one chief"),
        ({"cluster_spec": [("worker", ["a:1"])]}, TypeError, "mapping"),
        (
            {"cluster_spec": {"worker": {"a:1", "b:1"}}},
            TypeError,
            "a list of addresses",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ClusterResolver(**arguments)
