"""Ray Train: torch's program in the workers of a TorchTrainer; the first one answers by a socket."""

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

COUNT = int(sys.argv[1])
FOLDER = str(Path(__file__).parent)
os.environ.update(
    RAY_TRAIN_V2_ENABLED="1", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_DEDUP_LOGS="0"
)


def work(settings):
    """Be one replica."""
    sys.argv[1:] = [str(settings["count"])]
    sys.path.insert(0, FOLDER)
    import torch_program

    import ray.train

    if ray.train.get_context().get_world_rank():
        torch_program.follow()
        return
    with socket.create_connection(("127.0.0.1", settings["port"])) as line:
        sys.stdin, sys.__stdout__ = line.makefile("r"), line.makefile("w")
        torch_program.lead()


def relay(found):
    """Pass requests on to the first worker, and its answers back."""
    line, _ = found.accept()
    answers, requests = line.makefile("r"), line.makefile("w")

    def ask():
        for request in sys.stdin:
            requests.write(request)
            requests.flush()
        line.shutdown(socket.SHUT_WR)

    threading.Thread(target=ask, daemon=True).start()
    for answer in answers:
        print(answer, end="", flush=True)


def main():
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with socket.create_server(("127.0.0.1", 0)) as found, TemporaryDirectory() as folder:
        ray.init(
            num_cpus=COUNT + 1, include_dashboard=False, log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
        )  # fmt: skip
        threading.Thread(target=relay, args=(found,), daemon=True).start()
        trainer = TorchTrainer(
            work,
            train_loop_config={"count": COUNT, "port": found.getsockname()[1]},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=COUNT),
            run_config=RunConfig(storage_path=folder),
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer.fit()
        ray.shutdown()


main()
