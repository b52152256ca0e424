"""The example of many workers, started by the lines that its text gives."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aioreplica as ar

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/train_digits_multiworker.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--map-by", ":OVERSUBSCRIBE", "-n", "2"]
LAUNCHERS = {
    "mpirun": [*MPIRUN, sys.executable, "-m", "mpi4py", SCRIPT],
    "torchrun": [*TORCHRUN, SCRIPT],
}


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def launch(launcher: str, *arguments: Any, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start the example, with more options of the launcher."""
    *begin, script = LAUNCHERS[launcher]
    line = [*begin, *options, script, *map(str, arguments)]
    return subprocess.Popen(
        line, cwd=ROOT, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def workers_of(folder: Path) -> list[int]:
    """Return the processes of the workers that save into a folder; not their launcher."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,args="], check=True, capture_output=True, text=True
    ).stdout
    ours = [line for line in listing.splitlines() if str(folder) in line]
    return [
        int(line.split()[0])
        for line in ours
        if not any(name in line for name in ("mpirun", "prterun", "torch.distributed.run"))
    ]


def test_a_killed_worker_ends_the_job_and_the_same_line_goes_on(tmp_path: Path) -> None:
    """Of mpirun; torchrun's starts all again by itself, see test_elastic.py."""
    with launch("mpirun", "--epochs", 1000, "--checkpoints", tmp_path) as process:
        assert process.stdout is not None
        begin = []
        for line in process.stdout:
            begin.append(line)
            if line.startswith("epoch 2"):
                break
        assert sum(line.startswith("epoch 1:") for line in begin) == 1, begin
        victims = workers_of(tmp_path)
        assert len(victims) == 2, victims
        os.kill(victims[-1], signal.SIGKILL)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert time.monotonic() - began < 60

    epochs = 1 + max(ar.CheckpointManager(tmp_path).steps())
    with launch("mpirun", "--epochs", epochs, "--checkpoints", tmp_path) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"goes on from checkpoint {epochs - 1}" in output
    assert f"epoch {epochs}:" in output
    assert "replicas: 4" in output
