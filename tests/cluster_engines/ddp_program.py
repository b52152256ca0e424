"""The programs of tests/autodiff/prepared under DistributedDataParallel, or `prepared`.

Each rank trains on its part of every batch. Rank 0 saves the states that they end with under the
folder in the first argument.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import aioreplica as ar
from tests.autodiff.test_prepared import NAMES, made, prepared, states


class Parts:
    """The rank's part of each batch, as `prepare` splits it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        for batch in self._loader:
            yield [torch.tensor_split(tensor, size)[rank] for tensor in batch]


class NoSync:
    """In place of the library: its one name that the loops use."""

    @staticmethod
    def no_sync(model: Any) -> Any:
        return model.no_sync()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in NAMES:
        program = prepared(name)
        program["ar"] = NoSync
        model, optimizer, loader = made(program, num_workers=0)
        program["train"](DistributedDataParallel(model), optimizer, Parts(loader))
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), folder / f"{name}.{os.environ['WORLD_SIZE']}.pt")
    dist.barrier()


async def main_prepared(folder: Path) -> None:
    ar.set_logical_devices("cpu", 1)
    async with ar.MultiWorkerMirroredStrategy() as strategy:
        found = await states(strategy, num_workers=0)
    if os.environ["RANK"] == "0":
        for name, state in found.items():
            torch.save(state, folder / f"{name}.workers.pt")


if __name__ == "__main__":
    if sys.argv[2:] == ["prepared"]:
        asyncio.run(main_prepared(Path(sys.argv[1])))
    else:
        main(Path(sys.argv[1]))
    os._exit(0)  # Gloo's threads end a process that takes its time with an abort
