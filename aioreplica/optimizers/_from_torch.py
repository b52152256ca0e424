"""from_torch: an optimizer of torch.optim as an optimizer here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._optimizer import Optimizer

Array = npt.NDArray[Any]
NUM_UPDATES = "num_updates"  # a slot of our own: torch makes its state at the first update


def from_torch(optimizer_class: Any, **options: Any) -> Optimizer:
    """Make an optimizer of a class of `torch.optim`.

    Its state becomes slots, so it is colocated with the variables, written together with them and
    part of what a checkpoint saves. It is applied to each variable by itself.

    Args:
        optimizer_class: Such as `torch.optim.AdamW`.
        **options: Its arguments after the parameters, such as `lr=1e-3`.

    Raises:
        ImportError: If torch is not installed.
        TypeError: If it is no such class, refuses the options, needs a closure, or keeps state
            that is no tensor.
        ContextError: If made inside a replica.
    """
    return _FromTorch(_Rule(optimizer_class, options))


@final
class _Rule:
    """What an optimizer does to one variable; its state as named arrays."""

    def __init__(self, optimizer_class: Any, options: Mapping[str, Any]) -> None:
        try:
            import torch
        except ModuleNotFoundError as missing:
            raise ImportError(
                "from_torch needs the torch package, which is not installed. Run: "
                'pip install "aioreplica[torch]"',
                name="torch",
            ) from missing
        is_one = isinstance(optimizer_class, type)
        if not is_one or not issubclass(optimizer_class, torch.optim.Optimizer):
            raise TypeError(
                f"from_torch takes a class such as torch.optim.Adam, got {optimizer_class!r}."
            )
        self._torch = torch
        self._class = optimizer_class
        self._options = dict(options)
        self.slot_names = (NUM_UPDATES, *self.start(np.zeros(2)))

    def start(self, value: Array) -> dict[str, Array]:
        """Return the state of a variable before its first update: zeros of the right shapes."""
        _, state = self._stepped(value, np.zeros_like(value), {})
        return {name: np.zeros_like(array) for name, array in state.items()}

    def move(
        self, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Return the next value and state."""
        known = {name: slots[name] for name in self.slot_names[1:]} if slots[NUM_UPDATES] else {}
        new, state = self._stepped(value, gradient, known)
        return new, {NUM_UPDATES: slots[NUM_UPDATES] + 1, **state}

    def _stepped(
        self, value: Array, gradient: Array, state: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        tensor = self._torch.tensor  # copies: arrays are read-only, and torch writes in place
        parameter = self._torch.nn.Parameter(tensor(value))
        parameter.grad = tensor(gradient)
        optimizer = self._class([parameter], **self._options)
        if state:
            optimizer.state[parameter] = {name: tensor(a) for name, a in state.items()}
        optimizer.step()
        return parameter.detach().numpy(), self._arrays(optimizer.state[parameter])

    def _arrays(self, state: Mapping[str, Any]) -> dict[str, Array]:
        arrays = {}
        for name, part in state.items():
            if isinstance(part, self._torch.Tensor):
                arrays[name] = part.detach().numpy()
            elif part is not None:
                raise TypeError(
                    f"{self._class.__name__} keeps {name!r} as a {type(part).__name__}, but only "
                    "tensors can be slots. Use another optimizer."
                )
        return arrays


@final
class _FromTorch(Optimizer):
    """Applies torch's rule to each variable."""

    def __init__(self, rule: _Rule) -> None:
        super().__init__(1.0, slot_names=rule.slot_names)
        self._rule = rule

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start with zeros, which torch replaces at the first update."""
        if name == NUM_UPDATES:
            return np.array(0)
        return self._rule.start(variable.components[0])[name]

    def prepare(self, learning_rate: float, iteration: int) -> None:
        """Nothing: the rate is among torch's own options."""

    def update(
        self, prepared: None, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Let torch take one step."""
        return self._rule.move(value, gradient, slots)

    def finish(self, prepared: None) -> Mapping[Variable, Array]:
        """Nothing: all of the state is in slots."""
        return {}
