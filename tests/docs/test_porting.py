"""The page for users of tf.distribute: every public name there has a row."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/porting.md").read_text(encoding="utf-8")

# The public interface of tf.distribute in TensorFlow 2.16, but for its parameter servers.
NAMES = re.findall(
    r"\w+",
    """
    CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
    HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
    MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice
    ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
    experimental_set_strategy get_replica_context get_strategy has_strategy
    in_cross_replica_context ClusterResolver GCEClusterResolver KubernetesClusterResolver
    SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver
    UnionResolver CentralStorageStrategy CollectiveCommunication CollectiveHints
    CommunicationImplementation CommunicationOptions PreemptionCheckpointHandler
    PreemptionWatcher TerminationConfig ValueContext Client cluster_resolver
    distribute_datasets_from_function experimental_distribute_dataset
    experimental_distribute_values_from_function experimental_local_results extended gather
    num_replicas_in_sync reduce run scope experimental_assign_to_logical_device
    experimental_replicate_to_logical_devices experimental_split_to_logical_devices all_gather
    all_reduce merge_call replica_id_in_sync_group strategy get_next get_next_as_optional
    element_spec batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with
    experimental_require_static_shapes non_slot_devices parameter_devices read_var reduce_to
    should_checkpoint should_save_summary update update_non_slot value_container
    variable_created_in_scope worker_devices
    """,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_row(name: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]

    assert any(re.search(rf"\b{name}\b", row.split(" | ")[0]) for row in rows), name


# What people from tf.distribute look for besides, with its twin or the reason why there is none.
FURTHER = re.findall(
    r"\w+",
    """
    variable_creator_scope get_host_cpu_device get_slot get_slot_names get_loss_reduction
    _get_non_slot_variable components distribution_strategy replica input_api Estimator
    compute_gradients callbacks replica
    """,
)


@pytest.mark.parametrize("name", FURTHER)
def test_what_is_looked_for_besides_has_a_row(name: str) -> None:
    test_every_name_has_a_row(name)


@pytest.mark.parametrize(
    "text",
    [
        "Under the default strategy, too, a dataset becomes a `DistributedDataset`",
        "A source can be distributed again",
        "It cannot be made: it is the replica of a run",
        "an optimizer made in each replica",
        "a communicator that was given is none",
        "| `Adam`, `AdamW`: default of `epsilon` | 1e-7 | 1e-8 |",
        "| `SGD` with momentum | the rate goes into the velocity |",
    ],
)
def test_reasons_are_told(text: str) -> None:
    assert text in PAGE
