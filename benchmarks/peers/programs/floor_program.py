"""The floor: one future, blocked NumPy, bare threads; nothing is checked."""

import contextlib
import os
import sys
from functools import partial

import _serve as peer
import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks._bare_threads import BareThreads
from benchmarks._blocked_sum import sum_blocks
from benchmarks._floors import OneFutureBarrier, pass_barrier, run_task_group

COUNT = int(sys.argv[1])
MERGES = 100
STEPS = 10


def make(task, mode, **settings):
    return globals()[f"make_{task}"](**settings)


def make_merge():
    def call():
        return pass_barrier(OneFutureBarrier(COUNT), COUNT, num_times=MERGES)

    return peer.Work(call, MERGES * COUNT)


def make_run():
    async def nothing():
        pass

    return peer.Work(lambda: run_task_group(nothing, COUNT))


def make_all_reduce(size):
    values = [np.ones(size // 4, np.float32) for _ in range(COUNT)]
    total = np.empty_like(values[0])
    return peer.Work(lambda: sum_blocks(values, total))


def make_train(optimizer, batch):
    return peer.Work(partial(BareThreads(optimizer, COUNT, batch).run, STEPS), STEPS)


share = max(1, (os.cpu_count() or 1) // COUNT)
with threadpool_limits(share, user_api="blas"), contextlib.suppress(BrokenPipeError):
    peer.serve(make)
