"""Devices: names, lanes that run ops off the event loop, and array backends."""

from .._export import export_public
from ._completion import CompletionQueue as CompletionQueue
from ._cores import num_cores as num_cores
from ._gate import Gate as Gate
from ._lane import Lane as Lane
from ._lane import LaneStatistics as LaneStatistics
from ._lane import ProcessStatistics as ProcessStatistics
from ._lane import Publication as Publication
from ._lane import follow_others as follow_others
from ._lane import served_streams as served_streams
from ._lane import synchronise_lane as synchronise_lane
from ._lane_table import COLLECTIVES as COLLECTIVES
from ._lane_table import HOST as HOST
from ._lane_table import LaneTable as LaneTable
from ._lane_table import lane_table as lane_table
from ._lane_table import lend_lane as lend_lane
from ._lane_table import name_of_served_lane as name_of_served_lane
from ._lane_table import new_gate as new_gate
from ._lane_table import set_lane_options as set_lane_options
from ._logical import current_device as current_device
from ._logical import device as device
from ._logical import is_process_device as is_process_device
from ._logical import list_devices as list_devices
from ._logical import require_device as require_device
from ._logical import require_threads as require_threads
from ._logical import set_logical_devices as set_logical_devices
from ._loop import is_ctrl_c as is_ctrl_c
from ._loop import is_interrupted as is_interrupted
from ._loop import require_loop as require_loop
from ._loop import running_loop as running_loop
from ._loop import wait_shielded as wait_shielded
from ._loop import wait_until_done as wait_until_done
from ._op import Op as Op
from ._op import OpTracker as OpTracker
from ._op import UnfinishedOp as UnfinishedOp
from ._owned_task import OwnedTask as OwnedTask
from ._run import INLINE_BYTES as INLINE_BYTES
from ._run import OwnLane as OwnLane
from ._run import device_op as device_op
from ._run import num_collective_streams as num_collective_streams
from ._run import run_on_host as run_on_host
from ._run import run_on_lane as run_on_lane
from ._run import run_together as run_together
from ._run import submit_gang as submit_gang
from ._spec import Device as Device
from ._spec import DeviceSpec as DeviceSpec

__all__ = [
    "Device",
    "DeviceSpec",
    "LaneStatistics",
    "Op",
    "ProcessStatistics",
    "current_device",
    "device",
    "device_op",
    "list_devices",
    "run_on_host",
    "set_lane_options",
    "set_logical_devices",
]

export_public(__name__, __all__, globals())
