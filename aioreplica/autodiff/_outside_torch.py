"""Outside calls in functions that torch differentiates; torch is imported at use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

from ..tree import flatten, unflatten
from ._outside import NameGradients, OutsideAdapter, RunOutside


def needs_gradient(leaf: Any) -> bool:
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
        """Run the call and return its result, tracked if it is a tensor."""
        leaves, spec = flatten(list(args))
        positions = [i for i, leaf in enumerate(leaves) if needs_gradient(leaf)]

        def of_tracked(*values: Any) -> Any:
            whole = list(leaves)
            for position, value in zip(positions, values, strict=True):
                whole[position] = value
            return fn(*unflatten(spec, whole))

        outside = _Outside(run, names, name, of_tracked, is_async=inspect.iscoroutinefunction(fn))
        return outside.at([leaves[i] for i in positions])


@final
class _Outside:
    """One call: its result, and the inputs that it was made from, on the host."""

    def __init__(
        self,
        run: RunOutside,
        names: NameGradients,
        name: str,
        fn: Callable[..., Any],
        *,
        is_async: bool = False,
    ) -> None:
        self._run = run
        self._names = names
        self._name = name
        self._fn = fn
        self._is_async = is_async
        self._inputs: list[Any] = []
        self._made: Any = None
        self.value: Any = None

    def at(self, args: Sequence[Any]) -> Any:
        """Run the call outside; the result is tracked like the arguments."""
        import torch

        self._inputs = [arg.detach().requires_grad_() for arg in args]
        forward = self._forward_async if self._is_async else self._forward
        self._made = self._run(self._name, forward, tuple(self._inputs))
        if isinstance(self._made, torch.Tensor):
            self.value = self._made.detach()
        elif type(self._made) is tuple and all(isinstance(m, torch.Tensor) for m in self._made):
            self.value = tuple(made.detach() for made in self._made)
        else:
            return self._made  # nothing that has a gradient, such as None
        return _function().apply(self, *args)

    def gradient(self, cotangents: Sequence[Any], args: Sequence[Any]) -> Any:
        """Return the cotangents of all arguments; runs outside."""
        import torch

        name = self._names.gradient_of(self._name, torch._C._current_graph_task_id())
        if not torch.is_grad_enabled():  # no gradient of the gradient is wanted
            return self._run(name, self._pull_back_kept, (cotangents,))
        count = len(cotangents)

        def pull_back(*values: Any) -> Any:
            given, inputs = values[:count], values[count:]
            made = self._fn(*inputs)
            found = torch.autograd.grad(made, inputs, given, create_graph=True, allow_unused=True)
            return _filled(found, inputs)

        return _Outside(self._run, self._names, name, pull_back).at([*cotangents, *args])

    def _forward(self, *inputs: Any) -> Any:
        import torch

        with torch.enable_grad():
            return self._fn(*inputs)

    async def _forward_async(self, *inputs: Any) -> Any:
        import torch

        with torch.enable_grad():
            return await self._fn(*inputs)

    def _pull_back_kept(self, cotangents: Sequence[Any]) -> Any:
        import torch

        found = torch.autograd.grad(
            self._made, self._inputs, cotangents, retain_graph=True, allow_unused=True
        )
        return _filled(found, self._inputs)


@functools.cache
def _function() -> Any:
    """Return what the device program sees of an outside call."""
    import torch

    class OutsideFunction(torch.autograd.Function):  # type: ignore[misc]  # torch may be missing
        @staticmethod
        def forward(ctx: Any, outside: _Outside, *args: Any) -> Any:
            ctx.outside = outside
            ctx.save_for_backward(*args)
            return outside.value

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            parts = ctx.outside.gradient(cotangents, ctx.saved_tensors)
            return (None, *parts)

    return OutsideFunction


def _filled(found: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Replace the gradients of inputs that the result does not depend on."""
    import torch

    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs)
