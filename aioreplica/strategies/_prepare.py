"""A torch training loop as it is, once per replica."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from ..values import PerReplica

if TYPE_CHECKING:
    from ..devices import Device
    from ._strategy import Strategy

M = TypeVar("M")
O = TypeVar("O")  # noqa: E741 - an optimizer, beside a module
B = TypeVar("B")


def prepare(
    module: M, optimizer: O, loader: Iterable[B], *, strategy: Strategy
) -> tuple[PerReplica[M], PerReplica[O], PerReplica[Iterable[B]]]:
    """Make a torch module, its optimizer and its batches ready for a plain loop on every replica.

    Pass the three to `strategy.run` with a plain `def`: the loop of one process, as it is. At the
    end of each `loss.backward()` the replicas meet, and `.grad` is then the mean of their
    gradients, so clipping, a GradScaler and the optimizer's step come behind as ever. Buffers are
    replaced by those of replica 0 there, as DDP does before the next call. At both ends of each
    epoch the replicas' parameters are compared.

    Args:
        module: A `torch.nn.Module`. The first replica trains this one itself, the others deep
            copies made now, so it has the result when the run is over.
        optimizer: One of `torch.optim`, made of parameters of the module; copied likewise.
        loader: A `torch.utils.data.DataLoader`, or another iterable that begins anew each time.
            It gives global batches: the first replica of a process reads them on its device
            thread, and each gets a contiguous part. Parts differ by one example at most.
        strategy: One whose replicas train. With one replica nothing is copied, split or averaged.

    Returns:
        Module, optimizer and an iterable of parts of batches for each replica; plain ones under the
        default strategy.

    Raises:
        ImportError: If torch is not installed.
        TypeError: If an argument is of another kind, the module is DDP's or has tensors that are
            sparse or not on the CPU, or the optimizer's step needs a closure.
        ValueError: If a module is lazy, the optimizer has a scheduler, hooks, or parameters of
            others, or the loader a DistributedSampler, or batches of fewer examples than replicas.
        ContextError: If called inside a replica.

    Warns:
        UserWarning: If replicas are on devices that the module, on the CPU, does not compute on.

    Cancellation:
        A run that is cancelled leaves the module in the middle of an epoch. Prepare it again then.

    Determinism:
        Bitwise the same in every run: gradients are added in replica order, and random layers of
        several replicas draw from generators of these, seeded by `ctx.rng("prepare/random")`.

    Example:
        >>> import aioreplica as ar
        >>> prepared = ar.prepare(net, sgd, loader, strategy=strategy)  # doctest: +SKIP
        >>> await strategy.run(train, args=prepared)  # doctest: +SKIP

    Source:
        torch's DistributedDataParallel (Li et al., PyTorch Distributed, 2020).
    """
    return _made(module, optimizer, loader, strategy)


def no_sync(model: object) -> AbstractContextManager[None]:
    """Leave gradients as they are in a `with` block, so that they may be accumulated.

    A `backward` in the block adds to `.grad` on this replica alone; the first one behind it
    averages all that was added. Every replica has to leave the same ones out.

    Args:
        model: The module that `ar.prepare` gave this replica, whole.

    Raises:
        ImportError: If torch is not installed.
        ValueError: If it is another one.

    Example:
        >>> import aioreplica as ar
        >>> with ar.no_sync(model):  # doctest: +SKIP
        ...     loss.backward()

    Source:
        torch.nn.parallel.DistributedDataParallel.no_sync.
    """
    block: AbstractContextManager[None] = _torch_part("no_sync", "no_sync")(model)
    return block


def _made(
    module: object, optimizer: object, loader: object, strategy: object
) -> tuple[Any, Any, Any]:
    from ._strategy import Strategy

    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"ar.prepare needs strategy=, such as an ar.MirroredStrategy, got {strategy!r}."
        )
    runtime = strategy._runtime
    runtime.require_cross_replica("prepare", None)
    if runtime.elsewhere is not None:
        raise TypeError(
            f"{strategy!r} has no replicas that meet, which ar.prepare needs. Use an "
            "ar.MirroredStrategy or ar.MultiWorkerMirroredStrategy."
        )
    replicas_of = _torch_part("replicas_of", "prepare")
    made: Any = replicas_of(
        module, optimizer, loader, runtime.num_local_replicas, runtime.num_replicas_in_sync
    )
    is_alone = runtime.num_replicas_in_sync == 1
    _warn_of_idle_devices(module, runtime.replica_devices, is_alone)
    if runtime.has_plain_values:
        modules, optimizers, batches = (column[0] for column in made)
    else:
        modules, optimizers, batches = (
            PerReplica(column, devices=runtime.device_names) for column in made
        )
    return modules, optimizers, batches


def _warn_of_idle_devices(module: Any, devices: Sequence[Device | None], is_alone: bool) -> None:
    idle = [str(device) for device in devices if device is not None and device.kind != "cpu"]
    if not idle or any(tensor.device.type != "cpu" for tensor in module.parameters()):
        return
    advice = f"Move module and batches with .to({idle[0]!r})."
    if not is_alone:
        advice = (
            "It averages the gradients of modules on the CPU only: for GPUs use "
            "ar.autodiff.torch_module, which computes where its arguments are, or one replica."
        )
    warnings.warn(
        f"Replicas are on {', '.join(idle)}, but {type(module).__name__} is on the CPU, so the "
        f"loop that ar.prepare makes ready computes on the CPU. {advice}",
        UserWarning,
        stacklevel=4,
    )


def _torch_part(name: str, caller: str) -> Any:
    try:
        from ..autodiff import _torch_replicas
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise ImportError(
            f"ar.{caller} needs the torch package, which is not installed. Run: "
            'pip install "aioreplica[torch]"',
            name="torch",
        ) from missing
    return getattr(_torch_replicas, name)
