"""Models of torch and jax: the functions that make one, each library imported at that moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..context import PLACE, TRACE, CurrentReplica
from ..errors import ContextError

if TYPE_CHECKING:
    from ._jax_variables import JaxVariables
    from ._torch_module import TorchModule


def torch_module(module: Any, *, name: str | None = None) -> TorchModule:
    """Make variables of the parameters and buffers of a `torch.nn.Module`.

    Call it in `strategy.scope()`, and call what it returns in the losses and steps of all
    replicas: every call computes with the values that the variables have there, on a copy of the
    module that no other thread uses. The module itself is left alone; `copy_to` is the way back.

    Args:
        module: Any module on the CPU. State that is neither parameter nor buffer is copied now,
            and not shared between replicas.
        name: First part of the variables' names, "name/fc.weight"; None takes the name of the
            module's class, with a number where that is taken.

    Raises:
        ImportError: If torch is not installed.
        TypeError: If it is not a module, is compiled, a tensor's dtype has no NumPy counterpart, or
            a parameter has a hook of `register_post_accumulate_grad_hook`.
        ValueError: If a parameter has no shape yet (lazy modules), or a variable of that name
            exists.
        ContextError: If called inside a replica.

    Determinism:
        In a replica random layers draw from a generator per call, seeded with the next of
        `ctx.rng(f"{model.name}/random").integers(2**63)`: bitwise the same in every run. Elsewhere
        they draw from torch's own.

    Example:
        >>> import aioreplica as ar
        >>> async def train(batches, labels_of):  # doctest: +SKIP
        ...     async with ar.MirroredStrategy() as strategy:
        ...         with strategy.scope():
        ...             model = ar.autodiff.torch_module(torch.nn.Linear(4, 2))
        ...             sgd = ar.optimizers.SGD(0.1)
        ...
        ...         async def step(images, labels):
        ...             def loss():
        ...                 total = cross_entropy(model(images), torch.tensor(labels))
        ...                 return ar.Weighted(total, len(labels))
        ...
        ...             return await sgd.minimize(loss, model.variables)
    """
    try:
        from ._torch_module import TorchModule
    except ModuleNotFoundError as missing:
        raise _not_installed("torch_module", "torch", missing) from missing
    return TorchModule(module, name)


def jax_variables(tree: object, *, trainable: bool = True, name: str = "params") -> JaxVariables:
    """Make variables of the arrays of a jax pytree, such as the parameters of a flax module.

    Call it in `strategy.scope()`; `.value` is the pytree with the values that the variables have
    where it is read, traced in a loss.

    Args:
        tree: Any pytree that jax knows: nested dicts, an equinox module. Leaves that become no
            variables stay in it as they are.
        trainable: True makes variables of the floating-point arrays. False is for state, such as
            the running statistics of flax: every replica writes its own, and elsewhere the mean
            is read (of integers what the first replica has).
        name: First part of the variables' names, "params/dense/kernel".

    Raises:
        ImportError: If jax is not installed.
        TypeError: If an array's dtype has no NumPy counterpart.
        ValueError: If no leaf becomes a variable, or one of that name exists.
        ContextError: If called inside a replica.
    """
    try:
        from ._jax_variables import JaxVariables
    except ModuleNotFoundError as missing:
        raise _not_installed("jax_variables", "jax", missing) from missing
    return JaxVariables(tree, trainable, name)


def torch_generator(name: str, device: str = "cpu") -> Any:
    """Return a `torch.Generator` seeded from `ctx.rng(name)`, for this replica and step.

    Args:
        name: As for `ctx.rng`: one per purpose.
        device: Where tensors are drawn.

    Raises:
        ContextError: If called outside a replica.
        ImportError: If torch is not installed.

    Determinism:
        Keyed by (seed, step, replica id, name), as `ctx.rng`.
    """
    rng = _replica("torch_generator").rng(name)
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise _not_installed("torch_generator", "torch", missing) from missing
    return torch.Generator(device).manual_seed(int(rng.integers(2**63)))


def jax_key(name: str, *, shared: bool = False) -> Any:
    """Return a `jax.random.key` seeded from `ctx.rng(name)`, for this replica and step.

    Args:
        name: As for `ctx.rng`: one per purpose.
        shared: Whether it is the same on all replicas, seeded from `ctx.shared_rng(name)`.

    Raises:
        ContextError: If called outside a replica.
        ImportError: If jax is not installed.

    Determinism:
        Keyed by (seed, step, replica id, name), as `ctx.rng`; the same in a compiled step.
    """
    if (trace := TRACE.get()) is not None:
        return trace.jax_key(name, shared)
    replica = _replica("jax_key")
    rng = replica.context.shared_rng(name) if shared else replica.rng(name)
    try:
        import jax
    except ModuleNotFoundError as missing:
        raise _not_installed("jax_key", "jax", missing) from missing
    return jax.random.key(int(rng.integers(2**31)))


def _replica(name: str) -> CurrentReplica:
    place = PLACE.get()
    if place.replica is not None:
        return place.replica
    raise ContextError(
        f"ar.autodiff.{name} was called in {place.describe()}, but its numbers are those of a "
        "replica and its step. Call it in a step."
    )


def _not_installed(name: str, library: str, missing: ModuleNotFoundError) -> BaseException:
    if missing.name not in {library, f"{library}lib"}:
        return missing
    return ImportError(
        f"ar.autodiff.{name} needs the {library} package, which is not installed. Run: "
        f'pip install "aioreplica[{library}]"',
        name=library,
    )
