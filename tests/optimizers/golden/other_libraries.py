"""Ten values of each case's path, as torch.optim and optax compute it.

`python -m tests.optimizers.golden.other_libraries` writes golden.npz anew; it needs both.
"""

from typing import Any

import numpy as np

from tests.optimizers.golden.cases import CASES, FILE, NUM_STEPS, Case, gradients, key, start

KEPT = slice(4, NUM_STEPS, 5)  # of the values after each step
DTYPES = ("float64", "float32")


def path_in_torch(case: Case, dtype: str) -> Any:
    """The values after steps 5, 10, ... as torch.optim computes them."""
    import torch

    value = torch.tensor(start().astype(dtype), requires_grad=True)
    name, numbers = case.torch
    optimizer = getattr(torch.optim, name)([value], **numbers)
    path = []
    for gradient in gradients().astype(dtype):
        value.grad = torch.tensor(gradient)
        optimizer.step()
        path.append(value.detach().numpy().copy())
    return np.array(path)[KEPT]


def path_in_optax(case: Case, dtype: str) -> Any:
    """The same as optax computes them."""
    import jax
    import optax

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        value = jax.numpy.asarray(start().astype(dtype))
        name, numbers = case.optax
        optimizer = getattr(optax, name)(**numbers)
        state = optimizer.init(value)
        path = []
        for gradient in gradients().astype(dtype):
            updates, state = optimizer.update(jax.numpy.asarray(gradient), state, value)
            value = optax.apply_updates(value, updates)
            path.append(np.asarray(value))
    return np.array(path)[KEPT]


def main() -> None:
    """Write the file."""
    found = {}
    for case in CASES:
        for dtype in DTYPES:
            found[key("torch", case, dtype)] = path_in_torch(case, dtype)
            found[key("optax", case, dtype)] = path_in_optax(case, dtype)
    np.savez_compressed(FILE, **found)
    print(f"{len(found)} paths, {FILE.stat().st_size} bytes, written to {FILE.name}.")


if __name__ == "__main__":
    main()
