"""torch: a process for each replica, DistributedDataParallel and collectives over Gloo."""

import contextlib
import os
import socket
import subprocess
import sys

import _serve as peer
import torch
import torch.distributed as dist

COUNT = int(sys.argv[1])
CALLS = 50
torch.set_num_threads(max(1, (os.cpu_count() or 1) // COUNT))


def main():
    rank = int(os.environ.get("RANK", "0"))
    others = []
    if "RANK" not in os.environ:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE=str(COUNT), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        others = [
            subprocess.Popen(
                [sys.executable, __file__, str(COUNT)], env={**os.environ, "RANK": str(index)}
            )
            for index in range(1, COUNT)
        ]
    dist.init_process_group("gloo")
    if rank:
        follow()
    else:
        lead()
    dist.destroy_process_group()
    for process in others:
        process.wait()


ENDED, CALLED, MADE = range(3)


def lead():
    """Answer requests, and tell the other ranks."""
    with contextlib.suppress(BrokenPipeError):
        peer.serve(led)
    told(ENDED)


def told(what=ENDED):
    """Return what rank 0 says comes next; to be called by all ranks."""
    flag = torch.tensor([what])
    dist.broadcast(flag, 0)
    return int(flag)


def led(**settings):
    """Make a work on all ranks; each call of rank 0 is made by the others too."""
    told(MADE)
    dist.broadcast_object_list([settings])
    work = make(**settings)
    inner = work.call

    def call():
        told(CALLED)
        inner()

    work.call = call
    return work


def follow():
    work = None
    while (what := told()) != ENDED:
        if what == CALLED:
            work.call()
        else:
            work = None
            box = [None]
            dist.broadcast_object_list(box)
            work = make(**box[0])


def make(task, mode, **settings):
    return globals()[f"make_{task}"](**settings)


def make_merge():
    value = torch.ones(1)

    def call():
        for _ in range(CALLS):
            dist.all_reduce(value)

    return peer.Work(call, CALLS * COUNT)


def make_all_reduce(size):
    value = torch.ones(size // 4)

    def call():
        dist.all_reduce(value.clone())

    return peer.Work(call)


def make_train(optimizer, batch, num_parameters=0):
    images, labels = peer.batch_of(num_parameters, batch)
    split = len(images) // COUNT
    rank = dist.get_rank()
    x, y = (torch.tensor(array[rank * split :][:split]) for array in (images, labels))
    start = [torch.tensor(array) for array in peer.start_of(num_parameters)]
    model = Linear(start[0]) if num_parameters else network(start)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    rate = peer.LEARNING_RATE[optimizer]
    if optimizer == "SGD":
        rule = torch.optim.SGD(model.parameters(), lr=rate)
    else:
        rule = torch.optim.Adam(model.parameters(), lr=rate, eps=peer.EPSILON)

    def call():
        rule.zero_grad()
        found = wrapped(x)
        if num_parameters:
            loss = torch.square(found - y).mean() / 2
        else:
            loss = torch.nn.functional.cross_entropy(found, y)
        loss.backward()
        rule.step()

    def parameters():
        found = [each.detach().numpy() for each in model.parameters()]
        return [each.T if each.ndim == 2 else each for each in found]

    return peer.Work(call, parameters=parameters, images=images, labels=labels)


class Linear(torch.nn.Module):
    def __init__(self, start):
        super().__init__()
        self.weight = torch.nn.Parameter(start)

    def forward(self, x):
        return x @ self.weight


def network(start):
    layers = []
    for weight, bias in zip(start[::2], start[1::2], strict=True):
        layer = torch.nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = weight.T.contiguous(), bias
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


if __name__ == "__main__":
    main()
