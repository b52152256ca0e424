"""Copies of a torch module and its optimizer for replicas that run a plain loop.

The engine calls a hook of a parameter when its gradient is there, and what hooks have queued when
the whole of `backward` is done: there the replicas meet, once, with the gradients as they lie. In
the optimizer's step it would be too late: clipping and a GradScaler look at gradients before.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from ..context import PLACE
from ..errors import ContextError, OutOfSyncError
from ..replica import RunningReplica
from ._torch_batches import Batches, require_loader
from ._torch_random import SeededDraws, may_draw

RANDOM_STREAM = "prepare/random"
STAND_INS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}
"""Dtypes that others are summed in: NumPy has no bfloat16, and halves overflow."""
_BATCHES_DIFFER = (
    "Workers read different batches, but ar.prepare gives each of their replicas a part of one "
    "global batch. Make the loader the same on all workers: one data set in one order, shuffled by "
    "torch (whose generators are set as on worker 0) and by nothing else."
)


@final
class Averaging:
    """Averages the gradients of one replica's module with those of the others.

    It is found among the module's hooks. A copy of the module, and a pickled one, get an empty one.

    Args:
        module: The replica's; None makes an empty one.
        replica_id: The replica, among those of its worker.
        seeds_draws: Whether random layers draw from a generator of the replica.

    Attributes:
        module: The replica's; None if detached, or in a copy.
        is_on: False in `no_sync`.
    """

    def __init__(
        self, module: nn.Module | None = None, *, replica_id: int = 0, seeds_draws: bool = False
    ) -> None:
        self.module = module
        self.is_on = True
        self._replica_id = replica_id
        self._seeds_draws = seeds_draws
        self._draws: tuple[object, int, SeededDraws] | None = None  # of which run and step
        self._call: _Seeded | None = None
        self._inner: Callable[..., Any] | None = None
        self._entered: list[AbstractContextManager[object]] = []
        self._backward = -1
        self._has_begun = False  # with the parameters that all have
        self._seen = 0
        self._handles: list[Any] = []

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Averaging, ()

    @classmethod
    def of(cls, module: nn.Module) -> Averaging | None:
        """Return that of a module, None if `prepare` did not give it."""
        hooks = getattr(module, "_forward_pre_hooks", {}).values()
        return next((h for h in hooks if type(h) is cls and h.module is module), None)

    def attach(self, *, averages: bool) -> None:
        """Register the hooks; those of parameters only if there is something to average."""
        assert self.module is not None
        self._handles.append(self.module.register_forward_pre_hook(self))
        if self._seeds_draws:
            # Hooks would not do: torch calls none when a run is cancelled in a forward pass. This
            # is where `module.compile` puts its function, and torch leaves it out of copies.
            self._inner = self.module._compiled_call_impl
            self._call = self.module._compiled_call_impl = _Seeded(self.module)
            leave = self.module.register_forward_hook(self._leave_draws, always_call=True)
            self._handles.append(leave)
        for parameter in self.module.parameters() if averages else ():
            if not _can_have_gradient(parameter):
                continue
            with _thawed(parameter):
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            self._handles.append(handle)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.module is not None and self.module._compiled_call_impl is self._call is not None:
            self.module._compiled_call_impl = self._inner
        self.module = self._call = self._inner = None

    def saw(self, fingerprint: int) -> None:
        """Remember what was read since the replicas were compared; it has to be so on all workers.

        Args:
            fingerprint: Of a batch, at most 32 bits.
        """
        self._seen = zlib.crc32(fingerprint.to_bytes(8, "little", signed=True), self._seen)

    # ---- forward: random numbers ---------------------------------------------------------

    def __call__(self, module: nn.Module, _args: object) -> None:
        """Draw from that generator too where `module.compile` was called after `prepare`."""
        if self._call is not None and module._compiled_call_impl is not self._call:
            draws = self._drawing()
            draws.__enter__()
            self._entered.append(draws)

    def _leave_draws(self, _module: nn.Module, _args: object, _result: object) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def call(self, *args: object, **kwargs: object) -> Any:
        """Call the module; what it draws comes from a generator of this replica and run."""
        assert self.module is not None
        with self._drawing():
            return (self._inner or self.module._call_impl)(*args, **kwargs)

    def _drawing(self) -> AbstractContextManager[object]:
        replica = PLACE.get().replica
        if not isinstance(replica, RunningReplica):
            return nullcontext()
        run, step = replica.state, replica.step
        if self._draws is None or self._draws[:2] != (run, step):
            rng = replica.rng(RANDOM_STREAM)
            self._draws = (run, step, SeededDraws(lambda: int(rng.integers(2**63))))
        return self._draws[2]

    def _own_replica(self) -> RunningReplica | None:
        """Return the replica that runs; None if none does, or this is of a copy.

        Raises:
            ContextError: If it is not the one whose module this is.
        """
        replica = PLACE.get().replica
        if self.module is None or not isinstance(replica, RunningReplica):
            return None
        if replica.local_replica_id != self._replica_id:
            raise ContextError(
                f"Replica {replica.local_replica_id} uses the module of replica "
                f"{self._replica_id}: ar.prepare has made one for each. Let the step function take "
                "what it returned, `def train(module, optimizer, loader)`, and call "
                "`strategy.run(train, args=ar.prepare(module, optimizer, loader))`."
            )
        return replica

    # ---- backward: gradients -------------------------------------------------------------

    def _gradient_is_there(self, _parameter: torch.Tensor) -> None:
        """Have gradients averaged at the end of this `backward`."""
        # By its number and not by a flag: one that an error has ended calls nothing back.
        number = torch._C._current_graph_task_id()
        if self.is_on and number != self._backward:
            self._backward = number
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        replica = self._own_replica()
        if replica is None:
            return
        assert self.module is not None
        blocking = replica.blocking
        num_replicas = blocking.num_replicas_in_sync
        if num_replicas == 1:
            return
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TypeError(_sparse_text(name))
        is_first = replica.replica_id_in_sync_group == 0
        buffers = list(self.module.buffers())
        grads = [parameter.grad is not None for _, parameter in named]
        told = [self._seen, self._has_begun, *grads]
        totals, states, told = blocking.reduce_as(
            "backward",
            (
                [_summand(parameter, parameter.grad) for _, parameter in named],
                [_summand(buffer, buffer if is_first else None) for buffer in buffers],
                np.array(told, np.int64),
            ),
            _users_frame(),
        )
        if told[0] != num_replicas * self._seen:
            raise ValueError(_BATCHES_DIFFER)
        self._seen = 0
        if told[1] < num_replicas:  # no batch of its loader was read
            self.check_in_sync(replica, "first backward")
        for (_, parameter), total, count in zip(named, totals, told[2:], strict=True):
            if count:  # one that no replica has stays None
                mean = parameter.grad
                if mean is None:
                    mean = parameter.grad = torch.empty_like(parameter)
                _put(mean, total, num_replicas)
        for buffer, state in zip(buffers, states, strict=True):
            if not is_first:
                _put(buffer, state)

    # ---- epochs --------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Forget what was read, which a run that was cancelled has not compared."""
        self._seen = 0

    def _take_first_values(self, replica: RunningReplica) -> None:
        """Take the parameters and buffers of replica 0, as DDP does when it is made."""
        assert self.module is not None
        is_first = replica.replica_id_in_sync_group == 0
        tensors = [*self.module.parameters(), *self.module.buffers()]
        own = [_summand(tensor, tensor if is_first else None) for tensor in tensors]
        states = replica.blocking.reduce_as("beginning of an epoch", own, _users_frame())
        for tensor, state in zip(tensors, states, strict=True):
            _put(tensor, state)  # on replica 0, too: a sum with zeros has no -0.0
        self._has_begun = True

    def check_in_sync(
        self, replica: RunningReplica, when: str, *, takes_first_values: bool = False
    ) -> None:
        """Compare the parameters of all replicas, and what they have read; a collective.

        Args:
            replica: Whose module it is.
            when: It is, such as "end of an epoch".
            takes_first_values: Take those of replica 0 instead, if it is the first epoch.

        Raises:
            OutOfSyncError: If parameters differ.
            ValueError: If workers have read different batches.
        """
        assert self.module is not None
        named = list(self.module.named_parameters())
        own = [self._seen, self._has_begun, *(_checksum(parameter) for _, parameter in named)]
        blocking = replica.blocking
        table = np.zeros((blocking.num_replicas_in_sync, len(own)), np.int64)
        table[replica.replica_id_in_sync_group] = own
        table = blocking.reduce_as(when, table, _users_frame())
        if (table[:, 0] != table[0, 0]).any():
            raise ValueError(_BATCHES_DIFFER)
        self._seen = 0
        if takes_first_values and not table[:, 1].all():  # it is one for all if it is for any
            self._take_first_values(replica)
            return
        differs = np.argwhere(table[:, 2:] != table[0, 2:])
        if len(differs):
            replica_id, index = map(int, differs[0])
            name = named[index][0]
            raise OutOfSyncError(
                f"Parameter {name!r} of replica {replica_id} differs from that of replica 0 at the "
                f"{when}. Read the batches that ar.prepare gave with it, where workers take the "
                "values of worker 0; step the optimizers of all replicas alike, outside of "
                "ar.no_sync at last; and load states before ar.prepare or on every replica.",
                variable=name,
                replica_id=replica_id,
            )
        self._has_begun = True


@final
class _Seeded:
    """Calls a module that was prepared; once it no longer is, as it is.

    A copy, and a pickled module, have None in its place, also those that pickle all attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: object, **kwargs: object) -> Any:
        averaging = Averaging.of(self._module)
        if averaging is None:
            return self._module._call_impl(*args, **kwargs)
        return averaging.call(*args, **kwargs)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return type(None), ()


def replicas_of(
    module: Any, optimizer: Any, loader: object, num_local: int, num_replicas: int
) -> tuple[list[Any], list[Any], list[Batches]]:
    """Return modules, optimizers and batches for the replicas of this process.

    The first replica has the module and the optimizer themselves.

    Args:
        module: A `torch.nn.Module`.
        optimizer: One of `torch.optim`, made of its parameters.
        loader: What yields batches.
        num_local: How many replicas this process has.
        num_replicas: How many there are on all workers.

    Raises:
        TypeError: If these are of other kinds, or cannot be taken.
        ValueError: If they do not fit together.
    """
    _require_module(module, num_replicas)
    _require_optimizer(optimizer, module)
    require_loader(loader, num_replicas)
    earlier = Averaging.of(module)
    if earlier is not None:
        earlier.detach()
    seeds_draws = num_replicas > 1 and may_draw(module)
    pairs = [(module, optimizer), *(_copied(module, optimizer) for _ in range(num_local - 1))]
    averagings = [
        Averaging(own, replica_id=i, seeds_draws=seeds_draws) for i, (own, _) in enumerate(pairs)
    ]
    for averaging in averagings:
        averaging.attach(averages=num_replicas > 1)
    for _, own in pairs:
        if _refuse_closure not in own._optimizer_step_pre_hooks.values():
            own.register_step_pre_hook(_refuse_closure)
    modules, optimizers = zip(*pairs, strict=True)
    return (
        list(modules),
        list(optimizers),
        [Batches(loader, each, num_local) for each in averagings],
    )


def _copied(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copy both, and the hooks of parameters, which a copy of torch does not have."""
    made = copy.deepcopy((module, optimizer))
    for own, copied in zip(module.parameters(), made[0].parameters(), strict=True):
        for hook in (own._backward_hooks or {}).values():
            with _thawed(copied):
                copied.register_hook(hook)
    return made


@contextmanager
def _thawed(parameter: nn.Parameter) -> Iterator[None]:
    """Let hooks be registered, which wait for the day the parameter is no longer frozen."""
    needs_gradient = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(needs_gradient)


def _can_have_gradient(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """Do not average gradients of a module that `prepare` gave, inside a `with` block.

    Raises:
        ValueError: If it is another module.
    """
    averaging = Averaging.of(module)
    if averaging is None:
        raise ValueError(
            f"ar.no_sync takes a module that ar.prepare gave, got {type(module).__name__}. Pass "
            "the whole one that the step function was given."
        )
    was_on, averaging.is_on = averaging.is_on, False
    try:
        yield
    finally:
        averaging.is_on = was_on


def _users_frame() -> FrameType:
    """Return the innermost frame of code that is neither torch's nor the library's."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "aioreplica"):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


# ---- refusals ----------------------------------------------------------------------------


def _require_module(module: object, num_replicas: int) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"ar.prepare takes a torch.nn.Module, got {module!r:.80} ({type(module).__name__})."
        )
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TypeError(
            f"ar.prepare takes the module itself, got a {type(module).__name__} of it. Pass "
            "model.module."
        )
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise TypeError(_sparse_text(f"{name}.weight" if name else "weight"))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} has no shape yet: its module is lazy. Call the module once with a batch."
            )
        if num_replicas > 1 and (tensor.device.type != "cpu" or tensor.is_sparse):
            kind = "a sparse tensor" if tensor.is_sparse else f"on {tensor.device}"
            raise TypeError(
                f"{name!r} is {kind}, but ar.prepare averages over replicas what is dense and on "
                "the CPU. Move the module with module.cpu()."
            )
        hooks = (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()
        if num_replicas > 1 and not all(map(_is_averaging, hooks)):
            raise ValueError(
                f"{name!r} has a hook of register_post_accumulate_grad_hook, which would be called "
                "before gradients are averaged, and on the first replica only. Use register_hook, "
                "or look at `.grad` in the step function, behind backward()."
            )


def _is_averaging(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), Averaging)


def _require_optimizer(optimizer: object, module: nn.Module) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"ar.prepare takes an optimizer of torch.optim, got {optimizer!r:.80} ({kind})."
        )
    if isinstance(optimizer, LBFGS):
        raise TypeError(_closure_text(kind))
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"A scheduler was made of this {kind} before ar.prepare, and would move on that of one "
            "replica only. Make the scheduler in the step function, of the optimizer it is given."
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(),
             *optimizer._optimizer_step_post_hooks.values()]  # fmt: skip
    if any(hook is not _refuse_closure for hook in hooks):
        raise ValueError(
            f"This {kind} has step hooks, which copies of it would not have. Register them in the "
            "step function, on the optimizer it is given."
        )
    own = set(map(id, module.parameters()))
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise ValueError(
            f"{strangers} of the parameters of this {kind} are not in {type(module).__name__}, so "
            "their gradients would not be averaged. Put both in one module, such as an "
            "nn.ModuleDict."
        )


def _refuse_closure(optimizer: object, args: Sequence[object], kwargs: Any) -> None:
    given = [*args[1:], *kwargs.values()]
    if any(map(callable, given)):
        raise TypeError(_closure_text(type(optimizer).__name__))


def _closure_text(kind: str) -> str:
    return (
        f"{kind}.step(closure) may call the closure any number of times, on each replica another, "
        "so ar.prepare takes no optimizer that is stepped so. Call backward() and step()."
    )


def _sparse_text(name: str) -> str:
    return (
        f"The gradient of {name!r} is sparse, which ar.prepare does not average. Use sparse=False, "
        "or ar.autodiff.torch_module, which takes sparse gradients."
    )


def _summand(like: torch.Tensor, tensor: torch.Tensor | None) -> Any:
    """Return what is added up of a tensor: its own memory, if NumPy knows its dtype."""
    dtype = STAND_INS.get(like.dtype, like.dtype)
    if tensor is None:
        return torch.zeros(like.shape, dtype=dtype, device="cpu").numpy()
    return tensor.detach().to(dtype).numpy()


def _put(tensor: torch.Tensor, total: Any, divisor: int = 1) -> None:
    """Write a total into a tensor, divided."""
    tensor = tensor.detach()
    if tensor.dtype in STAND_INS:
        whole = np.array(total) if divisor == 1 else np.asarray(np.divide(total, divisor))
        tensor.copy_(torch.from_numpy(whole))
    elif divisor == 1:
        np.copyto(tensor.numpy(), total)
    else:
        np.divide(total, divisor, out=tensor.numpy())


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.detach().contiguous().view(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().data) if values.numel() else 0
