"""Outside calls in functions that torch differentiates; torch is imported at use."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from ..tree import Tree, flatten, unflatten
from ..tree import leaves as leaves_of
from ._outside import NameGradients, OutsideAdapter, RunOutside, finished

if TYPE_CHECKING:
    import torch


def needs_gradient(leaf: object) -> bool:
    """Tell whether torch tracks a value."""
    import torch

    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


@final
class TorchOutside(OutsideAdapter):
    """Makes outside calls functions of torch.autograd."""

    def call(
        self,
        run: RunOutside,
        names: NameGradients,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run the call and return its result, tracked where it depends on the arguments."""
        leaves, spec = flatten(list(args))
        positions = [i for i, leaf in enumerate(leaves) if needs_gradient(leaf)]

        def of_tracked(*values: torch.Tensor) -> Any:
            whole = list(leaves)
            for position, value in zip(positions, values, strict=True):
                whole[position] = value
            return fn(*unflatten(spec, whole))

        outside = _TorchCall(run, names, name, of_tracked)
        return outside.at([leaves[i] for i in positions])


@final
class _TorchCall:
    """One call: its result, and the inputs that it was made from, on the host."""

    def __init__(
        self, run: RunOutside, names: NameGradients, name: str, fn: Callable[..., Any]
    ) -> None:
        self._run = run
        self._names = names
        self._name = name
        self._fn = fn
        self._inputs: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []
        self.value: tuple[torch.Tensor, ...] = ()

    def at(self, args: Sequence[torch.Tensor]) -> Any:
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

    def gradient(self, cotangents: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> Any:
        """Return the cotangents of all arguments; runs outside."""
        import torch

        name = self._names.gradient_of(self._name, torch._C._current_graph_task_id())
        if not torch.is_grad_enabled():  # no gradient of the gradient is wanted
            return self._run(name, self._pull_back_kept, (cotangents,))
        count = len(cotangents)

        def pull_back(*values: torch.Tensor) -> Any:
            given, inputs = values[:count], values[count:]

            def back(made: Tree) -> tuple[torch.Tensor, ...]:
                tensors = [leaf for leaf in leaves_of(made) if needs_gradient(leaf)]
                found = torch.autograd.grad(
                    tensors, inputs, given, create_graph=True, allow_unused=True
                )
                return _filled(found, inputs)

            return finished(self._fn(*inputs), back)

        return _TorchCall(self._run, self._names, name, pull_back).at([*cotangents, *args])

    def _forward(self, *inputs: torch.Tensor) -> Any:
        import torch

        with torch.enable_grad():
            made = self._fn(*inputs)
        return _with_gradients(made) if isinstance(made, Awaitable) else made

    def _pull_back_kept(self, cotangents: Sequence[torch.Tensor]) -> Any:
        import torch

        found = torch.autograd.grad(
            self._made, self._inputs, cotangents, retain_graph=True, allow_unused=True
        )
        return _filled(found, self._inputs)


async def _with_gradients(made: Awaitable[Any]) -> Any:
    import torch

    with torch.enable_grad():
        return await made


@functools.cache
def _function() -> Any:
    """Return what the device program sees of an outside call."""
    import torch

    class OutsideFunction(torch.autograd.Function):  # type: ignore[misc]  # torch may be missing
        @staticmethod
        def forward(ctx: Any, outside: _TorchCall, *args: torch.Tensor) -> Any:
            ctx.outside = outside
            ctx.save_for_backward(*args)
            return outside.value

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
            parts = ctx.outside.gradient(cotangents, ctx.saved_tensors)
            return (None, *parts)

    return OutsideFunction


def _filled(
    found: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Replace the gradients of inputs that the result does not depend on."""
    import torch

    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs)
