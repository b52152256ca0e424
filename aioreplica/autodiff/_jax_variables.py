"""jax pytrees whose arrays are variables: parameters and state of flax, equinox and the like."""

from __future__ import annotations

from typing import Any, final

import jax
import numpy as np

from ..context import TRACE
from ..tree import Array
from ..values import Variable
from ._jax import as_jax, require_not_compiling
from ._variables import ModelVariables, new_state, require_outside_replicas, write_state


@final
class JaxVariables:
    """A pytree whose arrays are variables; made by `jax_variables`.

    Args:
        tree: The pytree.
        trainable: Whether to make variables that optimizers update, or state that every replica
            writes for itself.
        name: First part of the variables' names.

    Attributes:
        name: First part of the variables' names.
        variables: One per array, in the order of `jax.tree.leaves`.
    """

    def __init__(self, tree: object, trainable: bool, name: str) -> None:
        require_outside_replicas("jax_variables")
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.name = name
        self._is_state = not trainable
        kinds = "f" if trainable else "fiub"
        arrays = [_array(leaf, path, kinds) for path, leaf in pairs]
        if all(array is None for array in arrays):
            wanted = "floating-point array" if trainable else "array of numbers"
            raise ValueError(f"No leaf of {name!r} is a {wanted}, so there are no variables.")
        self._leaves: list[object] = []
        for array, (path, leaf) in zip(arrays, pairs, strict=True):
            label = f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            if array is None:
                self._leaves.append(leaf)
            elif trainable:
                self._leaves.append(Variable(array, name=label))
            else:
                self._leaves.append(new_state(array, label))
        self.variables = ModelVariables(
            [leaf for leaf in self._leaves if isinstance(leaf, Variable)], "jax"
        )

    @property
    def value(self) -> Any:
        """The pytree, of jax arrays: the values that the variables have here, traced in a loss.

        TypeError in a function that jax compiles: read it outside, and pass it as an argument.
        """
        require_not_compiling()
        leaves = [as_jax(x.value) if isinstance(x, Variable) else x for x in self._leaves]
        return jax.tree_util.tree_unflatten(self._treedef, leaves)

    def set_value(self, tree: object) -> None:
        """Set the variables from a pytree of the same structure, as one write.

        In a replica, state only: its own component. Leaves that are not variables are passed over.

        Raises:
            ValueError: If the structure, a shape or a dtype does not fit.
            ContextError: In a replica, of parameters: the optimizer writes those.
        """
        if not self._is_state:
            require_outside_replicas(f"set_value of {self.name!r}, which is trainable,")
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        if treedef != self._treedef:
            raise ValueError(
                f"{self.name!r} has the structure {self._treedef}, got {treedef}. Pass a pytree "
                "like the one it was made of."
            )
        pairs = zip(self._leaves, leaves, strict=True)
        if (trace := TRACE.get()) is not None:
            for leaf, new in pairs:
                if isinstance(leaf, Variable):
                    trace.assign(leaf, "assign", new)
            return
        write_state({x: np.asarray(new) for x, new in pairs if isinstance(x, Variable)})

    def __repr__(self) -> str:
        kind = "state" if self._is_state else "trainable"
        return f"<JaxVariables {self.name} | {len(self.variables)} variables, {kind}>"


def _array(leaf: object, path: object, kinds: str) -> Array | None:
    """Return a leaf as what a variable starts with; None if it becomes none."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None  # such as a key for random numbers
    array: Array = np.asarray(leaf)
    if array.dtype.kind == "V" or array.dtype.kind not in "fiubc":
        raise TypeError(
            f"The leaf {jax.tree_util.keystr(path)} has dtype {array.dtype}, which NumPy lacks. "
            "Convert it to float32 first; compute in another dtype inside the loss."
        )
    return array if array.dtype.kind in kinds else None
