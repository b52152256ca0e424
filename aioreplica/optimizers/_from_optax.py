"""from_optax: a gradient transformation of optax as an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any, Unpack, final

import numpy as np

from ..tree import Array
from ..values import Variable
from ._optimizer import JointOptimizer, Optimizer
from ._settings import SHARED, OptimizerOptions
from ._slots import new_variable, value_at_start, working_dtype
from ._staged_write import StagedWrite

Path = tuple[Any, ...]

_PROBE = "the only variable"


def from_optax(transformation: object, **options: Unpack[OptimizerOptions]) -> Optimizer:
    """Make an optimizer of a gradient transformation of optax.

    The transformation gets all variables as one tree, a dict by their names, in one jitted call.
    Its state becomes slots (what it keeps for each variable) and variables of the optimizer (what
    it keeps once), so it is written together with the variables and part of what a checkpoint
    saves. `learning_rate`, 1 at first, and the multipliers are factors of its updates.

    Args:
        transformation: Such as `optax.adamw(1e-3)`, its learning rate and schedule included.
        **options: As for `Optimizer`: clipping, loss scale, what to do about gradients that are
            not finite. They come before the transformation.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If it is not a gradient transformation, or an option is of the wrong type.
        ValueError: If an option is out of range; at a step, if it has other variables than the
            first one had: the state is that of one tree.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio, optax
        >>> from aioreplica import Variable
        >>> w = Variable([3.0, 4.0], dtype="float32")
        >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        >>> asyncio.run(from_optax(clipped).apply_gradients([(w.value, w)]))
        >>> w.value
        array([2.4, 3.2], dtype=float32)
    """
    for name in ("init", "update"):
        if not callable(getattr(transformation, name, None)):
            raise TypeError(
                f"from_optax takes a gradient transformation such as optax.adam(1e-3), got "
                f"{transformation!r}."
            )
    try:
        import jax
        import optax
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"from_optax needs the {missing.name} package, which is not installed. Run: "
            'pip install "aioreplica[optax]"',
            name=missing.name,
        ) from missing
    return _FromOptax(transformation, jax, optax, options)


@final
class _FromOptax(JointOptimizer):
    """Applies a transformation to the tree of all variables.

    Invariants:
        * `_places[i]` says where leaf i of the state lives: (name of the variable, name of the
          slot), or ("", number of the shared variable).
    """

    def __init__(
        self, transformation: Any, jax: Any, optax: Any, options: OptimizerOptions
    ) -> None:
        self._transformation = transformation
        self._jax, self._optax = jax, optax
        super().__init__(1.0, self._slot_names(), **options)
        self._lock = Lock()
        self._names: tuple[str, ...] = ()
        self._places: list[tuple[str, Any]] = []
        self._initial: dict[tuple[str, str], Array] = {}
        self._shared: list[Variable] = []
        self._keys: dict[int, Any] = {}  # which leaves are keys of random numbers, and of what kind
        self._step: Any = None  # jitted, made at the first step
        self._known: dict[int, tuple[Array, Any]] = {}  # ours, and the same memory as jax has it

    def start(self, variables: Sequence[Variable]) -> Sequence[Variable]:
        """Make the state of the tree at the first step; return what belongs to no variable."""
        with self._lock:  # two blocking runs may take the first step at the same time
            if self._step is None:
                self._begin(variables)
        if len(variables) != len(self._names) or {v.name for v in variables} != {*self._names}:
            raise ValueError(
                f"from_optax got gradients for {', '.join(v.name for v in variables)}, but its "
                f"state is that of {', '.join(self._names)}. Bring gradients for the same "
                "variables in every step; zeros for those without."
            )
        return self._shared

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start as the transformation does; with nothing where it keeps none for the variable."""
        return self._initial.get((variable.name, name), np.zeros(0, np.float32))

    def prepare(self, learning_rate: float, iteration: int) -> float:
        """Return the factor of the updates: the transformation counts by itself."""
        return learning_rate

    def update_all(
        self,
        prepared: Sequence[float],
        variables: Sequence[Variable],
        groups: Sequence[tuple[Variable, ...]],
        shared: Sequence[Variable],
        gradients: Sequence[Array],
        write: StagedWrite,
    ) -> None:
        """Transform the gradients and add them, for each different component of the variables."""
        everything = [*(variable for group in groups for variable in group), *shared]
        names = tuple(variable.name for variable in variables)
        factors = None
        if any(factor != 1 for factor in prepared):
            factors = list(map(np.float32, prepared))
        write.compute(everything, partial(self._moved, names, gradients, factors))
        self.is_warm = True

    def _moved(
        self,
        names: tuple[str, ...],
        gradients: Sequence[Array],
        factors: Sequence[object] | None,
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        known = self._known
        leaves = [known[id(a)][1] if id(a) in known else a for a in old]
        new = self._step(names, leaves, gradients, factors)
        arrays = tuple(map(np.asarray, new))  # waits for jax
        self._known = {id(a): (a, leaf) for a, leaf in zip(arrays, new, strict=True)}
        return arrays

    def _begin(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            if self._jax.dtypes.canonicalize_dtype(variable.dtype) != variable.dtype:
                raise TypeError(
                    f"optax got a variable of {variable.dtype}, but jax computes with 32 bits here."
                    ' Make it float32, or set jax.config.update("jax_enable_x64", True).'
                )
        asarray = self._jax.numpy.asarray
        values = {
            each.name: asarray(each.components[0].astype(working_dtype(each.dtype), copy=False))
            for each in variables
        }
        tree = self._transformation.init(values)
        paths, spec = self._jax.tree_util.tree_flatten_with_path(tree)
        strategy = variables[0].store.owner
        for index, (path, part) in enumerate(paths):
            name, owner = _named(path, values)
            leaf = part
            if self._jax.dtypes.issubdtype(part.dtype, self._jax.dtypes.prng_key):
                self._keys[index] = self._jax.random.key_impl(part)
                leaf = self._jax.random.key_data(part)
            if owner is not None and name in self.slot_names:
                self._places.append((owner, name))
                self._initial[owner, name] = np.array(leaf)
            else:
                self._places.append(("", len(self._shared)))
                restored = self.settings.restored.get(f"{SHARED}.{len(self._shared)}")
                label = name or str(index)
                value = value_at_start(label, np.asarray(leaf), restored)
                self._shared.append(new_variable(strategy, value, label))
        self._names = tuple(values)
        self.settings.shared = tuple(self._shared)
        self.settings.restored = {}
        self._step = self._compiled(spec)

    def _compiled(self, spec: Any) -> object:
        """Return the step as jax runs it: lists go in and out, so that no tree is built twice."""
        tree_util, update = self._jax.tree_util, self._transformation.update
        apply_updates, places = self._optax.apply_updates, self._places
        keys, random = self._keys, self._jax.random
        slots = {name: 1 + index for index, name in enumerate(self.slot_names)}
        width = 1 + len(slots)

        def step(
            names: tuple[str, ...], leaves: list[Any], gradients: list[Any], factors: Any
        ) -> list[Any]:
            starts = {name: index * width for index, name in enumerate(names)}
            own = [
                starts[owner] + slots[which] if owner else len(names) * width + which
                for owner, which in places
            ]
            values = {name: leaves[start] for name, start in starts.items()}
            parts = [leaves[index] for index in own]
            for at, kind in keys.items():
                parts[at] = random.wrap_key_data(parts[at], impl=kind)
            state = tree_util.tree_unflatten(spec, parts)
            updates, state = update(dict(zip(names, gradients, strict=True)), state, values)
            if factors is not None:
                of_each = dict(zip(names, factors, strict=True))
                updates = {name: update * of_each[name] for name, update in updates.items()}
            new = list(leaves)
            for name, value in apply_updates(values, updates).items():
                new[starts[name]] = value
            for at, (index, leaf) in enumerate(zip(own, tree_util.tree_leaves(state), strict=True)):
                new[index] = random.key_data(leaf) if at in keys else leaf
            return new

        return self._jax.jit(step, static_argnums=0)

    def _slot_names(self) -> tuple[str, ...]:
        """Look what the transformation keeps for a variable, on one that is all alone."""
        try:
            state = self._transformation.init({_PROBE: self._jax.numpy.zeros(())})
        except (KeyError, ValueError):  # such as a mask that names variables
            return ()
        paths, _ = self._jax.tree_util.tree_flatten_with_path(state)
        found = [_named(path, (_PROBE,)) for path, _ in paths]
        return tuple(dict.fromkeys(name for name, owner in found if owner is not None))


def _named(path: Path, names: Any) -> tuple[str, str | None]:
    """Name a leaf of the state, such as "0/mu", and the variable it belongs to, if to one."""
    keys = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    owner = next((key for key in keys if isinstance(key, str) and key in names), None)
    return "/".join(str(key) for key in keys if owner is None or key != owner), owner
