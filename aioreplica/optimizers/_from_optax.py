"""from_optax: a gradient transformation of optax as an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._optimizer import Optimizer

Array = npt.NDArray[Any]


def from_optax(transformation: Any) -> Optimizer:
    """Make an optimizer of a gradient transformation of optax.

    Its state becomes slots, so it is colocated with the variables, written together with them and
    part of what a checkpoint saves. It is applied to each variable by itself.

    Args:
        transformation: Such as `optax.adamw(1e-3)`, its learning rate and schedule included.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If it is no gradient transformation.
        ValueError: If it looks at several variables at once, as clipping by the global norm does.
        ContextError: If made inside a replica.
    """
    for name in ("init", "update"):
        if not callable(getattr(transformation, name, None)):
            raise TypeError(
                f"from_optax takes a gradient transformation such as optax.adam(1e-3), got "
                f"{transformation!r}."
            )
    return _FromOptax(_Rule(transformation))


@final
class _Rule:
    """What a transformation does to one variable; its state as a flat list of named arrays."""

    def __init__(self, transformation: Any) -> None:
        try:
            import jax
            import optax
        except ModuleNotFoundError as missing:
            raise ImportError(
                f"from_optax needs the {missing.name} package, which is not installed. Run: "
                'pip install "aioreplica[optax]"',
                name=missing.name,
            ) from missing
        self._transformation = transformation
        self._jax = jax
        self._apply = optax.apply_updates
        paths, self._spec = jax.tree_util.tree_flatten_with_path(
            transformation.init(jax.numpy.zeros(()))
        )
        self.slot_names = tuple(_name(path, index) for index, (path, _) in enumerate(paths))
        self._require_separable()

    def start(self, value: Array) -> dict[str, Array]:
        """Return the first state of a variable."""
        return self._named(self._transformation.init(self._own(value)))

    def move(
        self, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Return the next value and state."""
        jnp = self._jax.numpy
        leaves = [jnp.asarray(slots[name]) for name in self.slot_names]
        state = self._jax.tree_util.tree_unflatten(self._spec, leaves)
        own = self._own(value)
        updates, state = self._transformation.update(jnp.asarray(gradient), state, own)
        return np.asarray(self._apply(own, updates)), self._named(state)

    def _own(self, value: Array) -> Any:
        if self._jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            raise TypeError(
                f"optax got a variable of {value.dtype}, but jax computes with 32 bits here. Make "
                'it float32, or set jax.config.update("jax_enable_x64", True).'
            )
        return self._jax.numpy.asarray(value)

    def _named(self, state: Any) -> dict[str, Array]:
        leaves = map(np.asarray, self._jax.tree_util.tree_leaves(state))
        return dict(zip(self.slot_names, leaves, strict=True))

    def _require_separable(self) -> None:
        """Check on two small arrays that neither has a say in the other's update."""
        jnp = self._jax.numpy
        both = {"a": jnp.asarray([3.0, -4.0]), "b": jnp.asarray([[50.0]])}
        transform = self._transformation
        together = transform.update(both, transform.init(both), both)[0]
        for name, value in both.items():
            alone = transform.update(value, transform.init(value), value)[0]
            if not np.allclose(alone, together[name], rtol=1e-4):  # but for rounding
                raise ValueError(
                    "from_optax got a transformation that looks at several variables at once, "
                    "such as optax.clip_by_global_norm, but it is applied to each one by itself. "
                    "Leave that part out, and clip the gradients before apply_gradients."
                )


@final
class _FromOptax(Optimizer):
    """Applies a transformation to each variable."""

    def __init__(self, rule: _Rule) -> None:
        super().__init__(1.0, slot_names=rule.slot_names)
        self._rule = rule

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start as the transformation does."""
        return self._rule.start(variable.components[0])[name]

    def prepare(self, learning_rate: float, iteration: int) -> None:
        """Nothing: the transformation counts by itself."""

    def update(
        self, prepared: None, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Transform the gradient and add it."""
        return self._rule.move(value, gradient, slots)

    def finish(self, prepared: None) -> Mapping[Variable, Array]:
        """Nothing: all of the state is in slots."""
        return {}


def _name(path: Any, index: int) -> str:
    """Name a part of the state, such as "0/mu"; its number alone if jax has no path for it."""
    keys = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    return "/".join(map(str, keys)) or str(index)
