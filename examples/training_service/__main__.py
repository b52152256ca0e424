"""A service that trains: jobs are submitted, watched and cancelled over HTTP, and survive a crash.

    python -m examples.training_service --data training_data

After SIGTERM it saves every job and leaves with status 75, after Ctrl-C with 130. However it ended,
the next one on the same folder goes on with every job from where it was saved.
"""

import argparse
import asyncio
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE

try:
    import uvicorn

    from .jobs import UNWIND_S, Jobs
    from .programs import MEMORY_MIB
    from .store import Store
    from .web import make_app
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("examples"):
        raise
    raise SystemExit(
        f"The training service needs {missing.name}. Install it with: pip install -e '.[examples]'"
    ) from missing

ANSWER_S = 2.0
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: EXIT_CODE}


class Server(uvicorn.Server):
    """A server that leaves signals to the program: jobs have to be told, too."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: argparse.Namespace, listening: socket.socket) -> int:
    """Serve until a signal comes; return the exit status that belongs to it."""
    ended_by: list[signal.Signals] = []
    async with Store(options.data / "jobs.sqlite") as store, asyncio.TaskGroup() as tasks:
        jobs = Jobs(
            options.data,
            store,
            tasks,
            num_running=options.num_running,
            grace_s=options.grace,
            step_limit_s=options.step_limit,
            job_memory_mib=options.job_memory,
        )
        app = make_app(jobs, hosts=["127.0.0.1", "localhost", options.host, *options.name])
        longest_s = options.grace + UNWIND_S + ANSWER_S  # of an answer that waits for a job's end
        server = Server(
            uvicorn.Config(
                app, log_level="warning", lifespan="off", ws="none",
                timeout_graceful_shutdown=math.ceil(longest_s),
            )
        )  # fmt: skip

        def leave(number: signal.Signals) -> None:
            ended_by.append(number)
            server.should_exit = True
            jobs.close()

        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, leave, number)
        await jobs.resume()
        host, port = listening.getsockname()[:2]
        print(f"Training service at http://{host}:{port}, jobs in {options.data}", flush=True)
        try:
            await server.serve([listening])
        finally:
            jobs.close()
    return EXIT_CODES[ended_by[0]] if ended_by else 0


def between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, got {text}")
        return int(text)

    return number


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.training_service", description="Train jobs that come over HTTP."
    )
    parser.add_argument(
        "--data", type=Path, default=Path("training_data"), help="jobs, checkpoints"
    )
    parser.add_argument("--host", default="127.0.0.1", help="anyone who gets through may use it")
    parser.add_argument("--port", type=between(0, 65535), default=8000, help="0 takes a free one")
    parser.add_argument("--name", action="append", default=[], help="of this host, for clients")
    parser.add_argument("--devices", type=between(1, 64), help="else one per core")
    parser.add_argument("--num-running", type=between(1, 100), default=4, help="at a time")
    parser.add_argument("--grace", type=between(0, 3600), default=10, help="of a step at the end")
    parser.add_argument("--step-limit", type=between(1, 86400), default=300, help="in seconds")
    parser.add_argument("--job-memory", type=between(1, 10**6), default=MEMORY_MIB, help="in MiB")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        if options.devices is not None:
            ar.set_logical_devices("cpu", options.devices)
        with socket.create_server((options.host, options.port)) as listening:
            # Connections inherit it: an event must not wait for an acknowledgement of the last.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return asyncio.run(serve(options, listening))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
