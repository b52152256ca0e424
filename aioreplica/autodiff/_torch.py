"""The adapter over PyTorch: functions written with tensors.

Its graphs belong to the tensors that they lead to, and whether they are recorded is a setting of
each thread, so threads do not disturb each other.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from ..context import DIFFERENTIATING
from ..devices import served_streams
from ..devices.backends import Array
from ..errors import ContextError
from ..tree import DType, Tree, flatten, map_leaves, unflatten
from ..tree import leaves as leaves_of
from ..values import IndexedSlices, Weighted
from ._adapter import (
    Adapter,
    NameGradient,
    RunOutside,
    Watch,
    finished,
    require_floating,
    require_scalar_loss,
    split_aux,
)
from ._linear import LinearCollective

_OTHER_THREAD = (
    "torch computes the gradient of {} on a thread of its own, which does not wait for the device. "
    "Use ar.autodiff.value_and_grad or minimize, or call backward() in "
    "`with torch.autograd.set_multithreading_enabled(False)`."
)


@final
class TorchAdapter(Adapter):
    """Differentiates functions of tensors; a call inside a call is a higher derivative."""

    @property
    def name(self) -> str:
        """The backend's name."""
        return "torch"

    def differentiate(
        self, fn: Callable[[Watch], Tree], *, has_aux: bool = False
    ) -> tuple[Tree, list[Array]]:
        """Run `fn` once, then go back through it; see `Adapter.differentiate`."""
        inputs: list[_TorchInput] = []

        def watch(array: Array) -> torch.Tensor:
            watched = _TorchInput(array)
            inputs.append(watched)
            return watched.tensor

        is_inner = DIFFERENTIATING.get()
        token = DIFFERENTIATING.set(True)
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                result, aux = split_aux(fn(watch), has_aux)
                total = result.total if isinstance(result, Weighted) else result
                require_scalar_loss(total)
                keep = is_inner or any(watched.is_traced for watched in inputs)
                gradients = _gradients(total, [watched.tensor for watched in inputs], keep)
        finally:
            DIFFERENTIATING.reset(token)
        is_numpy = not any(watched.is_tensor for watched in inputs) and not keep
        value = _number(total, keep, is_numpy)
        if isinstance(result, Weighted):
            value = Weighted(value, _number(result.weight, False, is_numpy))
        if has_aux:
            value = (value, aux if keep else map_leaves(_untraced, aux))
        pairs = zip(gradients, inputs, strict=True)
        return value, [watched.of_its_kind(gradient, keep) for gradient, watched in pairs]

    def constant(self, array: Array) -> torch.Tensor:
        """Return a tensor of its own: torch knows no read-only ones."""
        return array if isinstance(array, torch.Tensor) else torch.tensor(array, device="cpu")

    def perform(self, collective: LinearCollective, value: Array) -> Array:
        """Send a tensor through a collective."""
        return _TorchCollective.apply(value, collective)


@final
class _TorchInput:
    """A watched array, and the tensor that stands in for it."""

    __slots__ = ("array", "is_tensor", "is_traced", "tensor")

    def __init__(self, array: Array) -> None:
        require_floating(array)
        self.array = array
        self.is_tensor = isinstance(array, torch.Tensor)
        self.is_traced = False
        if not self.is_tensor:
            self.tensor = torch.tensor(array, device="cpu")  # a copy: NumPy's may be read-only
            self.tensor.requires_grad_()
        elif array.requires_grad:
            self.is_traced = True
            self.tensor = array.view_as(array)  # of this derivative and of those around it
        else:
            self.tensor = array.detach().requires_grad_()

    def of_its_kind(self, gradient: torch.Tensor | None, keep: bool) -> Array:
        """Return a gradient as what was watched: a tensor, or a NumPy array outside of others."""
        if gradient is None:
            gradient = torch.zeros_like(self.tensor)
        if self.is_tensor:
            return gradient if keep else gradient.detach()
        if keep and gradient.requires_grad:
            return gradient
        dtype = np.asarray(self.array).dtype
        if gradient.is_sparse:
            return _slices(gradient.detach(), dtype)
        return gradient.detach().numpy().astype(dtype, copy=False)


def _slices(gradient: torch.Tensor, dtype: DType) -> Array | IndexedSlices:
    """Return a sparse gradient as rows; as an array if it is sparse along several axes."""
    if gradient.sparse_dim() != 1:
        return gradient.to_dense().numpy().astype(dtype, copy=False)
    rows = gradient._values().numpy().astype(dtype, copy=False)
    return IndexedSlices(rows, gradient._indices()[0].numpy(), tuple(gradient.shape))


def _untraced(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _gradients(total: Array, tensors: list[torch.Tensor], keep: bool) -> list[torch.Tensor | None]:
    if not tensors or not isinstance(total, torch.Tensor) or not total.requires_grad:
        return [None] * len(tensors)
    # On this thread for GPUs, too: torch's own know no replica, and nobody waits for their work.
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(total, tensors, allow_unused=True, create_graph=keep))


def _number(total: Array, keep: bool, is_numpy: bool) -> Array:
    if not isinstance(total, torch.Tensor) or keep:
        return total
    total = total.detach()
    if not is_numpy:
        return total
    return (total.float() if total.dtype == torch.bfloat16 else total).cpu().numpy()[()]


@final
class _TorchCollective(torch.autograd.Function):  # type: ignore[misc]  # torch's own base is untyped
    """A collective as torch sees it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, collective: LinearCollective) -> torch.Tensor:
        """Meet the other replicas."""
        ctx.collective = collective
        ctx.streams = served_streams()
        return collective.perform(value.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Meet them again, with the gradient."""
        if served_streams() is not ctx.streams:
            raise ContextError(_OTHER_THREAD.format(ctx.collective.caller.name))
        return _TorchCollective.apply(gradient, ctx.collective.transposed()), None


def needs_gradient(leaf: object) -> bool:
    """Tell whether torch tracks a value."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


@final
class TorchCall:
    """One call: its result, and the inputs that it was made from, on the host."""

    def __init__(
        self, run: RunOutside, gradient_of: NameGradient, name: str, fn: Callable[..., object]
    ) -> None:
        self._run = run
        self._gradient_of = gradient_of
        self._name = name
        self._fn = fn
        self._inputs: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []
        self.value: tuple[torch.Tensor, ...] = ()

    def at(self, args: Sequence[torch.Tensor]) -> Tree:
        """Run the call outside; the result is tracked like the arguments."""
        self._inputs = [arg.detach().requires_grad_() for arg in args]
        made = self._run(self._name, self._forward, tuple(self._inputs))
        leaves, spec = flatten(made)
        positions = [i for i, leaf in enumerate(leaves) if needs_gradient(leaf)]
        if not positions:
            return made  # nothing that has a gradient, such as None
        self._made = [leaves[i] for i in positions]
        self.value = tuple(tensor.detach() for tensor in self._made)
        for position, result in zip(positions, _function().apply(self, *args), strict=True):
            leaves[position] = result
        return unflatten(spec, leaves)

    def gradient(self, cotangents: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> Tree:
        """Return the cotangents of all arguments; runs outside."""
        name = self._gradient_of(self._name, torch._C._current_graph_task_id())
        if not torch.is_grad_enabled():  # no gradient of the gradient is wanted
            return self._run(name, self._pull_back_kept, (cotangents,))
        count = len(cotangents)

        def pull_back(*values: torch.Tensor) -> object:
            given, inputs = values[:count], values[count:]

            def back(made: Tree) -> tuple[torch.Tensor, ...]:
                tensors = [leaf for leaf in leaves_of(made) if needs_gradient(leaf)]
                found = torch.autograd.grad(
                    tensors, inputs, given, create_graph=True, allow_unused=True
                )
                return _filled(found, inputs)

            return finished(self._fn(*inputs), back)

        return TorchCall(self._run, self._gradient_of, name, pull_back).at([*cotangents, *args])

    def _forward(self, *inputs: torch.Tensor) -> object:
        with torch.enable_grad():
            made = self._fn(*inputs)
        return _with_gradients(made) if isinstance(made, Awaitable) else made

    def _pull_back_kept(self, cotangents: Sequence[torch.Tensor]) -> object:
        found = torch.autograd.grad(
            self._made, self._inputs, cotangents, retain_graph=True, allow_unused=True
        )
        return _filled(found, self._inputs)


async def _with_gradients(made: Awaitable[object]) -> object:
    with torch.enable_grad():
        return await made


@functools.cache
def _function() -> Tree:
    """Return what the device program sees of an outside call."""

    class OutsideFunction(torch.autograd.Function):  # type: ignore[misc]  # torch may be missing
        @staticmethod
        def forward(ctx: Any, outside: TorchCall, *args: torch.Tensor) -> object:
            ctx.outside = outside
            ctx.streams = served_streams()
            ctx.save_for_backward(*args)
            return outside.value

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> object:
            if served_streams() is not ctx.streams:
                raise ContextError(_OTHER_THREAD.format("outside_compilation"))
            parts = ctx.outside.gradient(cotangents, ctx.saved_tensors)
            return (None, *parts)

    return OutsideFunction


def _filled(
    found: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Replace the gradients of inputs that the result does not depend on."""
    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs)
