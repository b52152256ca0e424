"""A service that learns while it predicts, and a client that replays a stream to it.

    python -m examples.online_learning --data online_data

Ctrl-C and SIGTERM let it learn what it has taken, and save. However it ended, the next one on the
same folder has learned every example that was acknowledged, once.
"""

import argparse
import asyncio
import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE
from aioreplica.devices import set_lane_options

try:
    import uvicorn

    from aioreplica.integrations import prometheus
    from aioreplica.integrations.asgi import LOCAL_NAMES, OnlineService
    from aioreplica.online import Journal, OnlineLearner, StepLimits

    from .model import INPUT, TARGET, Model, predict
    from .progress import Progress
    from .web import make_app
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("examples"):
        raise
    raise SystemExit(
        f"The service needs {missing.name}. Install it with: pip install -e '.[web,checkpoint]'"
    ) from missing

GRACE_S = 10.0
TOKEN = os.environ.get("ONLINE_LEARNING_TOKEN") or None
OPERATOR_TOKEN = os.environ.get("ONLINE_LEARNING_OPERATOR_TOKEN") or None
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: EXIT_CODE}


class Server(uvicorn.Server):
    """A server that leaves signals to the program: streams of events have to be ended, too."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: argparse.Namespace, listening: socket.socket) -> int:
    """Serve until a signal comes; return the exit status that belongs to it."""
    ended_by: list[signal.Signals] = []
    options.data.mkdir(parents=True, exist_ok=True)
    host, port = listening.getsockname()[:2]
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.MirroredStrategy(["cpu:2"]) as second,
    ):
        model, progress = Model(strategy), Progress()
        learner = OnlineLearner(
            strategy,
            model.step,
            model.state,
            max_batch=32,
            max_delay_s=0.02,
            queue_size=1000,
            journal=Journal(options.data / "journal.sqlite"),
            checkpoints=ar.CheckpointManager(options.data / "checkpoints"),
            checkpoint_every_s=options.save_every,
            publish_to=options.data / "model",
            step_timeout_s=30.0,
            grace_s=GRACE_S,
            publish_if=StepLimits(change=10.0),
            prequential=model.prequential(),
            challengers=challengers(second, options) if options.challenger else None,
        )
        service = OnlineService(
            learner,
            predict,
            input_like=INPUT,
            target_like=TARGET,
            token=TOKEN,
            operator_token=OPERATOR_TOKEN,
            hosts=[*LOCAL_NAMES, options.host, *options.name],
            report=progress.report,
        )
        prometheus.export(strategy, registry=service.registry, name="learner")
        app = make_app(service, learner, progress)
        server = Server(
            uvicorn.Config(
                app, log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=5
            )
        )

        def leave(number: signal.Signals) -> None:
            ended_by.append(number)
            # Whatever hangs, the process ends, with the stacks of all threads on stderr.
            faulthandler.dump_traceback_later(2 * GRACE_S, exit=True)
            service.close()
            server.should_exit = True

        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, leave, number)
        print(f"Online learning at http://{host}:{port}, data in {options.data}", flush=True)
        await server.serve([listening])
    faulthandler.cancel_dump_traceback_later()
    if not server.started:
        return 1
    return EXIT_CODES[ended_by[0]] if ended_by else 0


def challengers(strategy: ar.Strategy, options: argparse.Namespace) -> dict[str, OnlineLearner]:
    """Return a second model, which learns the same examples from the journal, but more slowly."""
    model = Model(strategy, learning_rate=0.002)
    learner = OnlineLearner(
        strategy,
        model.step,
        model.state,
        max_batch=32,
        max_delay_s=0.02,
        queue_size=1000,
        checkpoints=ar.CheckpointManager(options.data / "slower"),
        checkpoint_every_s=options.save_every,
        step_timeout_s=30.0,
        prequential=model.prequential(),
    )
    return {"slower": learner}


@contextmanager
def replaying(options: argparse.Namespace, port: int) -> Iterator[None]:
    """Run the client in a process of its own for as long as the service runs."""
    if options.no_replay:
        yield
        return
    for name in ("httpx", "river"):
        if find_spec(name) is None:
            raise SystemExit(f"To replay needs {name}: pip install httpx river; or --no-replay")
    command = [sys.executable, "-m", "examples.online_learning.replay"]
    where = ["--url", f"http://127.0.0.1:{port}", "--rate", str(options.rate)]
    # The end of its input tells it that this process is gone, also if that was killed.
    with subprocess.Popen(
        [*command, *where, "--until-eof"], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def port(text: str) -> int:
    if not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text}")
    return int(text)


def rate(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.online_learning", description="Predict and learn over HTTP."
    )
    parser.add_argument("--data", type=Path, default=Path("online_data"), help="what it knows")
    parser.add_argument("--host", default="127.0.0.1", help="needs ONLINE_LEARNING_TOKEN, if other")
    parser.add_argument("--no-token", action="store_true", help="let everybody in who gets there")
    parser.add_argument("--port", type=port, default=8000, help="0 takes a free one")
    parser.add_argument("--name", action="append", default=[], help="of this host, for clients")
    parser.add_argument("--no-replay", action="store_true", help="only serve")
    parser.add_argument("--rate", type=rate, default=50.0, help="examples replayed per second")
    parser.add_argument(
        "--background",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="learn on idle cores only; beside processes that keep every core busy, say no",
    )
    parser.add_argument(
        "--challenger", action="store_true", help="a second model beside, which may be promoted"
    )
    parser.add_argument("--save-every", type=float, default=10.0, help="seconds")
    options = parser.parse_args(arguments)
    if not (options.host in LOCAL_NAMES or options.no_token or TOKEN):
        parser.error(
            f"at --host {options.host} others can predict, teach, and read what was sent. Set "
            "ONLINE_LEARNING_TOKEN, or say --no-token"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        ar.set_logical_devices("cpu", 3)
        set_lane_options(background=options.background)
        with socket.create_server((options.host, options.port)) as listening:
            # Connections inherit it: an event must not wait for an acknowledgement of the last.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with replaying(options, listening.getsockname()[1]):
                return asyncio.run(serve(options, listening))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
