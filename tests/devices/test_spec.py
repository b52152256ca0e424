"""Device and DeviceSpec: parsing, printing, merging, ordering, and what they reject."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.devices import Device, DeviceSpec

MAX_INDEX = 2**31 - 1
FULL_NAME = "/job:worker/replica:0/task:1/device:GPU:0"

kinds = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda kind: kind not in {"job", "replica", "task", "device"}
)
indices = st.integers(0, MAX_INDEX)
devices = st.builds(lambda kind, index: Device(f"{kind}:{index}"), kinds, indices)
specs = st.builds(
    DeviceSpec,
    job=st.none() | st.from_regex(r"[^/:*\s]{1,8}", fullmatch=True),
    replica=st.none() | indices,
    task=st.none() | indices,
    device_type=st.none() | kinds,
    device_index=st.none() | indices,
)


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("cpu", "cpu", 0),
        ("CPU:1", "cpu", 1),
        ("gpu:0", "gpu", 0),
        ("cuda:0", "cuda", 0),
        ("my_chip2:12", "my_chip2", 12),
        (f"cpu:{MAX_INDEX}", "cpu", MAX_INDEX),
        (FULL_NAME, "gpu", 0),
        ("/cpu:3", "cpu", 3),
        ("job:worker/device:TPU:2", "tpu", 2),
        ("device:MyChip:2", "mychip", 2),
        (Device("cpu:4"), "cpu", 4),
        (DeviceSpec(device_type="GPU", device_index=5), "gpu", 5),
    ],
)
def test_device_reads_every_legal_form(
    name: str | Device | DeviceSpec, kind: str, index: int
) -> None:
    device = Device(name)

    assert (device.kind, device.index) == (kind, index)
    assert str(device) == f"{kind}:{index}"
    assert repr(device) == f"Device('{kind}:{index}')"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        " cpu:0",
        "cpu:0\n",
        "cpu:",
        ":0",
        "cpu:-1",
        "cpu:+1",
        "cpu:1.0",
        "cpu:x",
        "cpu:*",
        "cpu:0:0",
        "cpu:²",
        "cpu:٣",
        "cpu:1_0",
        f"cpu:{MAX_INDEX + 1}",
        "cpu:" + "9" * 5000,
        "7:0",
        "çpu:0",
        "job",
        "job:1",
        "task:1",
        "JOB:1",
        "/job:worker",
        "/gpu",
        "/device:GPU:*",
        "/device:GPU",
        "/device:*:0",
        "/cpu:0/gpu:0",
        "/tsk:1",
    ],
)
def test_device_rejects_malformed_text_and_says_what_is_legal(name: str) -> None:
    with pytest.raises(ValueError, match='Write "cpu"') as caught:
        Device(name)

    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", [None, 0, b"cpu:0", ("cpu", 0)])
def test_device_rejects_other_types(name: object) -> None:
    with pytest.raises(TypeError, match="must be a str, a Device or a DeviceSpec, got"):
        Device(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (DeviceSpec(), "type"),
        (DeviceSpec(device_index=0), "type"),
        (DeviceSpec(job="ps", device_type="CPU"), "index"),
    ],
)
def test_device_rejects_a_spec_that_leaves_it_open(spec: DeviceSpec, missing: str) -> None:
    with pytest.raises(ValueError, match=f"does not name one device: it has no {missing}"):
        Device(spec)


def test_device_equals_only_devices_and_does_not_alias_kinds() -> None:
    assert Device("cpu") == Device("CPU:0")
    assert Device("gpu:0") != Device("cuda:0")
    others: list[object] = ["cpu:0", ("cpu", 0), DeviceSpec.from_string("/cpu:0")]
    assert Device("cpu:0") not in others
    assert len({Device("cpu"), Device("cpu:0"), Device("/cpu:0")}) == 1


def test_device_orders_by_kind_then_numeric_index() -> None:
    names = ["cuda:0", "cpu:10", "cpu:9"]

    assert [str(d) for d in sorted(map(Device, names))] == ["cpu:9", "cpu:10", "cuda:0"]
    with pytest.raises(TypeError):
        _ = Device("cpu:0") < "cpu:1"  # type: ignore[operator]


def test_device_and_spec_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Device("cpu:0").index = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        DeviceSpec().task = 1  # type: ignore[misc]


@given(devices)
def test_device_round_trips_through_text_and_spec(device: Device) -> None:
    spec = DeviceSpec(device_type=device.kind, device_index=device.index)

    assert Device(str(device)) == device
    assert Device(str(device).upper()) == device
    assert Device(spec) == device
    assert Device(spec.to_string()) == device


@given(devices | specs)
def test_copies_and_pickles_are_equal(original: Device | DeviceSpec) -> None:
    pickles = [pickle.dumps(original, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    twins = [copy.copy(original), copy.deepcopy(original), *map(pickle.loads, pickles)]

    for twin in twins:
        assert twin == original
        assert hash(twin) == hash(original)
        assert repr(twin) == repr(original)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("", ""),
        ("/", ""),
        (FULL_NAME, FULL_NAME),
        ("/job:foo/replica:0", "/job:foo/replica:0"),
        ("/replica:1/task:0/cpu:0", "/replica:1/task:0/device:CPU:0"),
        ("/gpu:2/task:3/job:muu", "/job:muu/task:3/device:GPU:2"),
        ("cpu:0", "/device:CPU:0"),
        ("/gpu", "/device:GPU:*"),
        ("/cpu:*", "/device:CPU:*"),
        ("/CUDA:1", "/device:CUDA:1"),
        ("/device:GPU:*", "/device:GPU:*"),
        ("/device:MyFunnyDevice:2", "/device:MYFUNNYDEVICE:2"),
        ("/device:*:1", "/device:*:1"),
        ("/job:*/replica:*/task:*/device:*:*", ""),
        ("/job:my-job.2//task:007/", "/job:my-job.2/task:7"),
    ],
)
def test_spec_parses_and_prints(name: str, printed: str) -> None:
    spec = DeviceSpec.from_string(name)

    assert spec.to_string() == str(spec) == printed
    assert DeviceSpec(job="ignored").parse_from_string(name) == spec


def test_spec_fields_have_their_types() -> None:
    zero: Any = np.int64(0)  # an int to __index__, but not to the type checker
    spec = DeviceSpec(job="j", replica=zero, task=True, device_type="gpu", device_index=2)

    assert spec == DeviceSpec.from_string("/job:j/replica:0/task:1/device:GPU:2")
    assert [type(index) for index in (spec.replica, spec.task)] == [int, int]
    assert spec.device_type == "GPU"
    assert DeviceSpec.from_string("/device:GPU:*").device_index is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/job:a/job:b", "The part 'job:b' gives job a second time"),
        ("/task:1/task:1", "gives task a second time"),
        ("/task:*/task:1", "gives task a second time"),
        ("/job:muu/device:GPU:2/cpu:0", "The part 'cpu:0' gives device_type a second time"),
        ("/tsk:1", "The part 'tsk:1' is unknown"),
        ("/device:GPU", "The part 'device:GPU' is unknown"),
        ("/Job:a", "The part 'Job:a' is unknown"),
        ("/foo", "The part 'foo' is unknown"),
        ("/task:-1", "task must be 1 to 10 decimal digits or '\\*', got '-1'"),
        ("/replica:", "replica must be 1 to 10 decimal digits or '\\*', got ''"),
        ("/gpu:²", "device_index must be 1 to 10 decimal digits"),
        (f"/gpu:{MAX_INDEX + 1}", f"device_index must be between 0 and {MAX_INDEX}"),
        ("/job:", "job must not be empty"),
        ("/job:a b", "got 'a b'"),
        ("/device::0", "device_type must be an ASCII letter"),
        ("/device:job:0", "none of job, replica, task and device, got 'job'"),
    ],
)
def test_spec_rejects_malformed_text_and_says_why(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        DeviceSpec.from_string(name)

    assert str(caught.value).startswith(f"{name!r} is not a full device name: ")
    assert '"/gpu:0" is short for "/device:GPU:0"' in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"job": ""}, ValueError, "job must not be empty"),
        ({"job": "*"}, ValueError, "job must not be empty nor hold"),
        ({"job": 0}, TypeError, r"job must be a str or None, got 0 \(int\)"),
        ({"device_type": "G:U"}, ValueError, "device_type must be an ASCII letter"),
        ({"device_type": 1}, TypeError, "device_type must be a str or None"),
        ({"task": "1"}, TypeError, r"task must be an int or None, got '1' \(str\)"),
        ({"replica": 1.0}, TypeError, "replica must be an int or None"),
        ({"device_index": -1}, ValueError, "device_index must be between 0 and"),
        ({"device": "GPU"}, TypeError, "device"),
    ],
)
def test_spec_rejects_bad_fields(
    fields: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        DeviceSpec(**fields)  # type: ignore[arg-type]
    with pytest.raises(error, match=reason):
        DeviceSpec().replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, b"/cpu:0", Device("cpu:0")])
def test_spec_parses_only_text(name: object) -> None:
    with pytest.raises(TypeError, match="A full device name must be a str, got"):
        DeviceSpec.from_string(name)  # type: ignore[arg-type]


@given(specs)
def test_spec_round_trips_through_text_and_repr(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_string(spec.to_string()) == spec
    assert eval(repr(spec)) == spec


@given(specs, specs, specs)
def test_merge_is_associative_with_the_empty_spec_as_identity(
    first: DeviceSpec, second: DeviceSpec, third: DeviceSpec
) -> None:
    left = first.make_merged_spec(second).make_merged_spec(third)
    right = first.make_merged_spec(second.make_merged_spec(third))

    assert left == right
    assert DeviceSpec().make_merged_spec(first) == first.make_merged_spec(DeviceSpec()) == first
    assert first.make_merged_spec(first) == first


@given(specs, specs)
def test_merge_takes_each_field_from_the_other_if_given(
    outer: DeviceSpec, inner: DeviceSpec
) -> None:
    merged = outer.make_merged_spec(inner)

    for field in dataclasses.fields(DeviceSpec):
        ours, theirs = getattr(outer, field.name), getattr(inner, field.name)
        assert getattr(merged, field.name) == (ours if theirs is None else theirs)


def test_merge_rejects_text() -> None:
    with pytest.raises(TypeError, match=r"got '/cpu:0' \(str\)\. Parse text with"):
        DeviceSpec().make_merged_spec("/cpu:0")  # type: ignore[arg-type]


def test_replace_sets_and_opens_fields() -> None:
    spec = DeviceSpec().replace(job="foo").replace(task=3, device_type="cpu", device_index=0)

    assert spec.to_string() == "/job:foo/task:3/device:CPU:0"
    assert spec.replace(task=None, replica=12).to_string() == "/job:foo/replica:12/device:CPU:0"
    assert spec.replace(device_type=None, device_index=None).to_string() == "/job:foo/task:3"
    assert spec.replace() == spec


def test_spec_equality_and_order_put_open_fields_first() -> None:
    names = ["", "/device:*:0", "/cpu:*", "/cpu:2", "/cpu:10", "/task:0", "/job:a", "/job:a/task:0"]
    ordered = [DeviceSpec.from_string(name) for name in names]

    assert sorted(ordered[4:] + ordered[:4]) == ordered
    assert len(set(ordered)) == len(ordered)
    assert ordered[0] not in list[object](names)
    with pytest.raises(TypeError):
        _ = ordered[0] < "/cpu:0"


@given(specs, specs)
def test_spec_order_is_total_and_agrees_with_equality(one: DeviceSpec, two: DeviceSpec) -> None:
    assert [one < two, one == two, one > two].count(True) == 1
    assert (one <= two) == (not two < one)
    assert (one == two) == (one.to_string() == two.to_string())
