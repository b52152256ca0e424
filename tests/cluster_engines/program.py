"""What each worker of a launch does: `python program.py SCENARIO [ARGUMENT]`, one line of JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import aioreplica as ar
from aioreplica.cluster import (
    ClusterResolver,
    Communicator,
    MpiCommunicator,
    TorchCommunicator,
    _mpi,
    connect,
)
from aioreplica.cluster._engine import EngineCommunicator
from aioreplica.cluster._transport import Link
from aioreplica.errors import StallError, WorkerLostError
from tests.cluster import communicator_contract

warnings.simplefilter("error")
TIMEOUT_S = 20.0
AT_END: list[tuple[str, Communicator, Path]] = []


async def contract(c: Communicator, argument: str) -> Any:
    """The checks that every communicator passes; "collectives": with those of MPI itself."""
    for check in communicator_contract.CHECKS:
        await check(c)
        await c.barrier()
    return len(communicator_contract.CHECKS)


async def late(c: Communicator, argument: str) -> Any:
    """Worker 1 is two seconds late; the others say how often they have looked by then."""
    await c.barrier()
    turns, look = 0, Link.look

    def counted(lane: Link, visit: Any) -> None:
        nonlocal turns
        turns += 1
        look(lane, visit)

    Link.look = counted  # type: ignore[method-assign]
    began = time.monotonic()
    if c.rank == 1:
        await until_said(argument, 1)
        await asyncio.sleep(2.0)
    else:
        Path(argument, str(c.rank)).touch()
    await c.all_reduce(np.ones(1000))
    return {"turns": turns, "waited": time.monotonic() - began}


async def absent(c: Communicator, argument: str) -> Any:
    """Worker 1 comes when the timeout has told the others, and is told so as well."""
    await c.barrier()
    c._timeout = 1.5  # not before: processes may start further apart
    if c.rank == 1:
        await until_said(argument, c.size - 1)
    error = await _error_of(c)
    Path(argument, str(c.rank)).touch()
    return error


async def frozen(c: Communicator, argument: str) -> Any:
    """A worker is stopped, "before" a call or "inside" it, with its bytes half sent."""
    victim, where = int(os.environ["TEST_VICTIM"]), os.environ["TEST_WHERE"]
    pid_file = Path(argument, "pid")
    await c.barrier()
    if c.rank == victim:
        pid_file.write_text(str(os.getpid()), encoding="utf-8")
        if where == "inside":  # its lane stops after the first message, where it has waited
            assert isinstance(c, EngineCommunicator)
            tell = c.link.transport.tell
            c.link.transport.tell = lambda note: (tell(note), Path(argument, "told").touch())[0]  # type: ignore[method-assign]
            await c.all_gather_then_reduce([1.0], lambda _: stop(), [np.ones(1000)], "sum")
        stop()
    while where == "inside" and not Path(argument, "told").exists():
        await asyncio.sleep(0.01)
    start = time.monotonic()
    AT_END.append((argument, c, pid_file))
    try:
        await c.all_gather_then_reduce([1.0], lambda _: True, [np.ones(1000)], "sum")
    except Exception as error:
        return {**row_of(error), "after": time.monotonic() - start}
    return "no error"


def stop() -> bool:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60.0)  # another thread may take the signal first
    return True


async def end_the_frozen(folder: str, c: Communicator, pid_file: Path) -> None:
    """The first survivor kills the worker that is stopped, when all have told what they know."""
    Path(folder, f"said{c.rank}").touch()
    if c.rank == min({0, 1} - {int(os.environ["TEST_VICTIM"])}):
        is_inside = os.environ["TEST_WHERE"] == "inside"
        await until_said(folder, c.size + is_inside)  # the others, and what the victim wrote
        os.kill(int(pid_file.read_text(encoding="utf-8")), signal.SIGKILL)


async def until_said(folder: str, count: int) -> None:
    """Wait until so many workers have left their files in a folder."""
    while len(list(Path(folder).iterdir())) < count:
        await asyncio.sleep(0.01)


async def aborting(c: Communicator, argument: str) -> Any:
    await c.barrier()
    if c.rank == 1:
        await until_said(argument, c.size - 1)
        c.abort("the disk is full")
    else:
        Path(argument, str(c.rank)).touch()
    return await _error_of(c)


async def raising(c: Communicator, argument: str) -> Any:
    await c.barrier()
    if c.rank == 1:
        await until_said(argument, c.size - 1)  # an end may overtake the last of a barrier
        raise ValueError("bad batch")
    Path(argument, str(c.rank)).touch()
    return await _error_of(c)


async def closing(c: Communicator, argument: str) -> Any:
    await c.barrier()
    if c.rank == 1:
        await c.aclose()
        await until_said(argument, c.size - 1)  # it has not ended when the others find out
        return "closed"
    error = await _error_of(c)
    Path(argument, str(c.rank)).touch()
    return error


async def leaving(c: Communicator, argument: str) -> Any:
    """Worker 1 closes with a split open, in which the others wait for it, without a timeout."""
    split = c.split(range(c.size))
    split._timeout = None
    await split.barrier()
    if c.rank == 1:
        await c.aclose()
    error = await _error_of(split)
    Path(argument, str(c.rank)).touch()
    await until_said(argument, c.size)  # it has not ended when the others find out
    return error


async def dead_before(c: Communicator, argument: str) -> Any:
    """Worker 1 is killed before the first use of a split, without a timeout."""
    split = c.split(range(c.size))
    split._timeout = None
    await c.barrier()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return await _error_of(split)


async def many_splits(c: Communicator, argument: str) -> Any:
    """Return how many threads there are more after many splits than after a few."""
    counts = []
    for _ in range(8):
        for _ in range(3):
            async with c.split(range(c.size)) as split:
                await split.all_reduce(1)
            await c.barrier()
        counts.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return counts[-1] - counts[1]


async def kill(c: Communicator, argument: str) -> Any:
    """One worker is killed in the middle of many reductions."""
    victim = int(argument)
    await c.barrier()
    for step in range(1000):
        if step == 20 and c.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20:
            start = time.monotonic()
        try:
            await c.all_reduce(np.ones(100_000))
        except ar.errors.WorkerLostError as error:
            again = await _error_of(c)
            return {**row_of(error), "after": time.monotonic() - start, "again": again["error"]}
    return "nobody died"


async def shrinking(c: Communicator, argument: str) -> Any:
    lost = await kill(c, argument)
    smaller = await c.shrink()
    total = await smaller.all_reduce(c.rank)
    await smaller.aclose()
    return {"size": smaller.size, "total": int(total), "lost": lost["ranks"]}


async def slow(c: Communicator, argument: str) -> Any:
    """Worker 2 dies while worker 0 computes for longer than the others wait for its word."""
    await c.barrier()
    if c.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if c.rank == 0:
        time.sleep(4.5)  # noqa: ASYNC251 - stands for what it computes
    error = await _error_of(c)
    smaller = await c.shrink()
    total = await smaller.all_reduce(1.0)
    await smaller.aclose()
    return {"error": error["error"], "size": int(total)}


async def beside(c: Communicator, argument: str) -> Any:
    """Worker 1 dies, and the program has a group of its own, which is not for that."""
    import torch.distributed as dist

    is_own = dist.get_rank() == c.rank
    lost = await kill(c, "1")
    smaller = await c.shrink()
    total = await smaller.all_reduce(1.0)
    await smaller.aclose()
    return {"own": is_own and dist.is_initialized(), "lost": lost["ranks"], "size": int(total)}


async def twice(c: Communicator, argument: str) -> Any:
    try:
        await connect(timeout=5.0)
    except ar.errors.ContextError as error:
        await c.barrier()
        return str(error)


async def forked(c: Communicator, argument: str) -> Any:
    await c.barrier()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            c.all_reduce(1)
        except ar.errors.ContextError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)  # noqa: ASYNC222 - it ends by itself, at once
    text = os.read(reader, 10_000).decode()
    await c.barrier()
    return text


async def reconnecting(c: Communicator, argument: str) -> Any:
    await c.barrier()
    await c.aclose()
    async with await connect(timeout=TIMEOUT_S) as second:
        return int(await second.all_reduce(1))


async def often(c: Communicator, argument: str) -> Any:
    """Return how many threads of the engine are left after five connections."""
    await c.barrier()
    await c.aclose()
    for _ in range(4):
        async with await connect(timeout=TIMEOUT_S) as again:
            await again.all_reduce(1)
        del again
    end, names = time.monotonic() + TIMEOUT_S, ("aioreplica torch", "aioreplica mpi")
    while (left := sum(t.name.startswith(names) for t in threading.enumerate())) > 2:
        if time.monotonic() > end:
            break
        gc.collect()
        await asyncio.sleep(0.01)
    return left


async def several(c: Communicator, argument: str) -> Any:
    """Use two strategies, and two splits, in opposite orders; one hangs while the others work."""
    if isinstance(c, MpiCommunicator):
        second: Communicator = await MpiCommunicator.connect(timeout=TIMEOUT_S)
    else:
        second = await TorchCommunicator.connect(ar.cluster.resolve(), timeout=TIMEOUT_S)
    splits = [c.split(range(c.size)) for _ in range(2)]
    totals = []
    for pair in ((c, second), splits):
        calls = {each: each.all_reduce(each.rank) for each in pair[:: 1 - 2 * c.rank]}
        totals += [int(await calls[each]) for each in pair]
    hanging = c.barrier() if c.rank == 0 else None
    for number in range(50):
        totals.append(int(await second.all_reduce(number)))
        totals.append(int(await splits[number % 2].all_reduce(number)))
    start = time.monotonic()
    await second.aclose()
    took, failure = time.monotonic() - start, second.statistics().failure
    names = ("aioreplica torch.distributed", "aioreplica mpi")
    num_lanes = sum(each.name.startswith(names) for each in threading.enumerate())
    is_early = hanging is not None and not hanging.done()
    if hanging is not None:
        Path(argument, "0").touch()
    await until_said(argument, 1)
    await (hanging or c.barrier())
    return {"totals": totals, "early": is_early, "took": took, "failure": failure,
            "lanes": num_lanes}  # fmt: skip


async def waiting(c: Communicator, argument: str) -> Any:
    """Wait for a worker that does not come, until the launcher is interrupted."""
    await c.barrier()
    say(c.rank, "waiting")
    if c.rank == 1:
        await asyncio.sleep(60.0)
    return await _error_of(c)


async def _error_of(c: Communicator) -> Any:
    start = time.monotonic()
    try:
        await c.all_reduce(np.ones(1000))
    except Exception as error:
        return {**row_of(error), "after": time.monotonic() - start}
    return "no error"


def row_of(error: BaseException) -> dict[str, Any]:
    ranks = list(getattr(error, "ranks", ()))
    return {"error": type(error).__name__, "text": str(error), "ranks": ranks}


async def left_behind(c: Communicator, argument: str) -> Any:
    """The last worker is killed, and another one is so late to shrink that the others go on."""
    folder, late = argument.split("@")
    await c.barrier()
    if c.rank == c.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = [(await _error_of(c))["error"]]
    c._timeout = 4.0  # in which the others have to come
    if c.rank == int(late):
        await until_said(folder, c.size - 2)
    while len(told) < 3:
        try:
            smaller = await c.shrink()
        except (StallError, WorkerLostError) as error:
            told.append(f"{type(error).__name__} {list(error.ranks)}")
        else:
            told.append(f"{await smaller.all_reduce(1.0):g} workers")
            await smaller.aclose()
            break
    Path(folder, str(c.rank)).touch()
    await until_said(folder, c.size - 1)  # whose stores are looked into
    return told


async def cancelled(c: Communicator, argument: str) -> Any:
    """Work with worker 0, which is cancelled before this one comes, see `cancel_connect`."""
    error = await _error_of(c)
    async with await c.shrink() as smaller:
        Path(argument, str(c.rank)).touch()
        return {**error, "left": int(await smaller.all_reduce(1))}


async def cancel_connect(argument: str) -> None:
    connecting = asyncio.ensure_future(connect(engine="torch"))
    while not any("torch.connect" in each.name for each in threading.enumerate()):
        await asyncio.sleep(0.01)
    connecting.cancel()
    await asyncio.wait([connecting])
    Path(argument, "0").touch()
    await until_said(argument, 2)


def say(rank: int, result: Any) -> None:
    """Write a line in one piece: workers share a pipe, and unbuffered `print` writes two."""
    sys.stdout.write(json.dumps({"rank": rank, "result": result}) + "\n")
    sys.stdout.flush()


async def main(scenario: str, argument: str) -> None:
    if argument == "collectives":
        _mpi.PAIRS = 1
    timeout = float(os.environ.get("TEST_TIMEOUT", TIMEOUT_S))
    resolver = None
    if "TEST_SIZE" in os.environ:  # what this worker is told of the others
        size, address = int(os.environ["TEST_SIZE"]), os.environ.get("TEST_ADDRESS")
        rank = int(os.environ["TEST_RANK"])
        resolver = ClusterResolver(
            task_id=rank, num_workers=size, coordinator_address=address, source="the test"
        )
    rank = resolver.rank if resolver is not None else ar.cluster.resolve().rank
    if scenario == "beside":
        import torch.distributed as dist

        place = {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{argument}", **place)
    if scenario == "never" and rank == 1:
        await until_said(argument, 2)
        return
    if scenario == "cancelled":
        if rank == 0:
            await cancel_connect(argument)
            return
        await until_said(argument, 1)
    try:
        c = await connect(resolver, engine=os.environ.get("TEST_ENGINE"), timeout=timeout)
    except Exception as error:
        result = row_of(error)
    else:
        async with c:
            result = await globals()[scenario](c, argument)
    say(rank, result)
    if scenario == "never":
        Path(argument, str(rank)).touch()
        await until_said(argument, 2)  # a launcher may end all when the first one leaves
    for work in AT_END:
        await end_the_frozen(*work)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
