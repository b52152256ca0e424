"""Gradients of functions that run elsewhere: the seam between outside calls and the adapters."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ..tree import leaves


class RunOutside(Protocol):
    """Runs a function on the host for a device program, and waits for it."""

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run `fn(*args)` in the cluster `name`; an async function is awaited there."""


class NameGradients(Protocol):
    """Names the gradients of outside calls."""

    def gradient_of(self, name: str, gradient_call: object) -> str:
        """Name the gradient of the call `name` in one pass backwards."""


class OutsideAdapter(ABC):
    """Makes outside calls part of what one library differentiates."""

    @abstractmethod
    def call(
        self,
        run: RunOutside,
        names: NameGradients,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run `fn(*args)` outside in the cluster `name`; its gradient will run outside too.

        Args:
            run: Does the call.
            names: Names the clusters of gradients.
            name: Cluster of the call.
            fn: A plain or async function.
            args: Its arguments; some leaf of them is traced.
        """


def find_outside_adapter(args: Any) -> OutsideAdapter | None:
    """Return the adapter of the library that traces a leaf of `args`; None if none does.

    A library that was not imported traces nothing, so nothing is imported here.
    """
    if "autograd" not in sys.modules and "torch" not in sys.modules:
        return None
    found = leaves(args)
    if "autograd" in sys.modules:
        from ._outside_autograd import AutogradOutside, is_traced

        if any(map(is_traced, found)):
            return AutogradOutside()
    if "torch" in sys.modules:
        from ._outside_torch import TorchOutside, needs_gradient

        if any(map(needs_gradient, found)):
            return TorchOutside()
    return None


def finished(value: Any, use: Callable[[Any], Any]) -> Any:
    """Return `use(value)`; if the value has to be awaited, an awaitable of that."""
    if not isinstance(value, Awaitable):
        return use(value)

    async def later() -> Any:
        return use(await value)

    return later()
