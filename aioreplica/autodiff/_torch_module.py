"""torch modules whose parameters and buffers are variables, called by all replicas at once.

A module keeps its tensors in dicts of its own, so two threads cannot call one module with different
tensors. Each call takes a shell instead: a copy of the module whose tensors are put in before. In
a loss one shell is kept until the gradients are there, because what torch runs again on the way
back (`torch.utils.checkpoint`) looks into the module once more.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import nn

from ..context import OVERRIDES, PLACE
from ..replica import RunningReplica
from ..tree import Array, leaves, map_leaves
from ..values import Variable, local_value
from ._torch_random import SeededDraws, may_draw
from ._variables import ModelVariables, new_state, require_outside_replicas, write_state

CPU = torch.device("cpu")  # not the default device that a program may have set


@final
class TorchModule:
    """A module whose parameters and buffers are variables; made by `torch_module`.

    Calling it calls the module with the values that its variables have here, and gives what the
    module gives, on the device of its first tensor argument: the variables are copied there, and
    gradients back. NumPy arrays among the arguments become tensors of their own, there too.
    Buffers that a call changes, such as running statistics, are written to their variables when it
    returns. Hooks that its parameters have, of `register_hook`, are called with the gradient of
    each replica's loss.

    Args:
        module: The module.
        name: First part of the variables' names; None chooses one.

    Attributes:
        name: First part of the variables' names.
        variables: One per parameter that requires a gradient, in the module's order; a tied
            parameter is one.
        frozen: One per other parameter: not trainable.
        buffers: One per buffer: not trainable, and every replica writes its own. Elsewhere the
            mean over the replicas is read, of integers and the like what the first replica has.
    """

    def __init__(self, module: nn.Module, name: str | None) -> None:
        _require_module(module)
        require_outside_replicas("torch_module")
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        arrays = {key: _checked_array(key, t) for key, t in [*parameters.items(), *buffers.items()]}
        self.name = _free_name(type(module).__name__, arrays) if name is None else name
        self._parameters: dict[str, Variable] = {}
        self._buffers: dict[str, Variable] = {}
        for key, tensor in parameters.items():
            label, trains = f"{self.name}/{key}", tensor.requires_grad
            self._parameters[key] = Variable(arrays[key], name=label, trainable=trains)
        for key in buffers:
            self._buffers[key] = new_state(arrays[key], f"{self.name}/{key}")
        members = self._parameters.values()
        self.variables = ModelVariables([v for v in members if v.trainable], "torch")
        self.frozen = ModelVariables([v for v in members if not v.trainable], "torch")
        self.buffers = ModelVariables(list(self._buffers.values()), "torch")
        self._hooks = {key: _checked_hooks(key, tensor) for key, tensor in parameters.items()}
        self._pristine = _Shell.of(module, {**parameters, **buffers})
        self._may_draw = may_draw(module)
        self._idle: dict[int | None, list[_Shell]] = {}
        self._modes: tuple[bool, ...] = tuple(part.training for part in module.modules())
        self._sets_modes = any(map(_sets_modes, module.modules()))
        self._lock = threading.Lock()

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            TypeError: If it is called in a loss that another library differentiates.
            RuntimeError: If the module changes a parameter in place.
            Exception: What the module raises.

        Cancellation:
            None between its operations: it runs to its end.
        """
        return self._call("__call__", args, kwargs)

    def call(self, method: str, /, *args: object, **kwargs: object) -> Any:
        """Call another method of the module, such as "encode", in the same way."""
        return self._call(method, args, kwargs)

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self._modes[0]

    def train(self, mode: bool = True) -> TorchModule:
        """Set the training mode of the whole module, for all replicas; return this object.

        Raises:
            ContextError: Inside a replica: others may be calling it meanwhile.
        """
        return self._set_modes("train()", bool(mode), lambda module: module.train(bool(mode)))

    def eval(self) -> TorchModule:
        """Set the evaluation mode of the whole module, as `train` sets the other."""
        return self._set_modes("eval()", False, lambda module: module.eval())

    def _set_modes(
        self, what: str, mode: bool, change: Callable[[nn.Module], object]
    ) -> TorchModule:
        """Take over the modes that the module gives its parts: it may keep some as they are."""
        require_outside_replicas(f"{what} of a torch_module")
        if not self._sets_modes:  # a copy, which may be large, would tell the same
            self._modes = (mode,) * len(self._modes)
            return self
        shell = self._pristine.copy()  # of its own: whatever else the module does is not kept
        shell.set_modes(self._modes)
        parts = [*shell.module.modules()]
        change(shell.module)
        left = set(shell.module.modules())  # it may have fused some, which are there all the same
        self._modes = tuple((p if p in left else shell.module).training for p in parts)
        return self

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what the module's `state_dict` would be, with tensors of their own."""
        with self._borrowed() as shell:
            self._bind_values(shell)
            state: dict[str, torch.Tensor] = shell.module.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Set the variables from what `state_dict` of a module returned, as one write.

        Those that the state does not have stay as they are on each replica.

        Returns:
            What torch's `load_state_dict` returns: missing and unexpected keys.

        Raises:
            RuntimeError: From torch: if keys or shapes do not fit; nothing has changed then.
            ContextError: Inside a replica.
        """
        require_outside_replicas("load_state_dict of a torch_module")
        named = {**self._parameters, **self._buffers}
        before = {key: variable.components[0] for key, variable in named.items()}
        with self._borrowed() as shell:
            shell.bind({key: _tensor(array) for key, array in before.items()})
            result = shell.module.load_state_dict(state, strict=strict)
            new = {key: shell.tensor(key).numpy(force=True) for key in named}
        given = {key for key, names in shell.names.items() if any(n in state for n in names)}
        write_state({
            named[key]: array for key, array in new.items()
            if key in given or array.tobytes() != before[key].tobytes()
        })  # fmt: skip
        return result

    def checkpoint_entries(self) -> dict[tuple[Variable | None, str], Variable]:
        """Return parameters and buffers by name, as a checkpoint keeps them."""
        named = {**self._parameters, **self._buffers}
        return {(None, name): variable for name, variable in named.items()}

    def copy_to(self, module: nn.Module) -> None:
        """Copy the values of the variables into a module with parameters of the same names.

        Raises:
            ValueError: If a name is missing there or has another shape; nothing is copied then.
        """
        targets = [*module.named_parameters(remove_duplicate=False),
                   *module.named_buffers(remove_duplicate=False)]  # fmt: skip
        pairs = []
        found = dict(targets)
        for key, variable in self._by_every_name():
            value = local_value(variable)
            if key not in found or tuple(found[key].shape) != value.shape:
                there = f"has shape {tuple(found[key].shape)}" if key in found else "is missing"
                raise ValueError(
                    f"{type(module).__name__} does not fit: {key!r} {there}, and the variable has "
                    f"shape {value.shape}. Pass a module of the same kind as the first."
                )
            pairs.append((found[key], value))
        with torch.no_grad():
            for target, value in pairs:
                target.copy_(torch.tensor(value, device=CPU))

    def __repr__(self) -> str:
        mode = "training" if self.training else "evaluation"
        counts = f"{len(self._parameters)} parameters, {len(self._buffers)} buffers"
        return f"<TorchModule {self.name} | {counts}, {mode}>"

    # ---- one call ------------------------------------------------------------------------

    def _call(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        reads = OVERRIDES.get()
        if reads is None:
            with self._borrowed() as shell:
                self._bind_parameters(shell)
                return self._call_shell(shell, method, args, kwargs)
        return self._call_shell(reads.hold(self, self._lend), method, args, kwargs)

    def _lend(self) -> tuple[_Shell, Callable[[], None]]:
        key, shell = self._take()
        try:
            self._bind_parameters(shell)
        except BaseException:
            self._give_back(key, shell)
            raise
        return shell, lambda: self._give_back(key, shell)

    def _call_shell(
        self, shell: _Shell, method: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        state = {key: local_value(variable) for key, variable in self._buffers.items()}
        shell.bind({key: _tensor(value) for key, value in state.items()})
        device, as_tensor = _device_of(args, kwargs), _as_tensor
        shell.move(device)
        if device is not None:
            as_tensor = partial(_as_tensor, device=device)
        args, kwargs = map_leaves(as_tensor, (args, kwargs))
        before = shell.versions()
        with self._seeded():
            result = getattr(shell.module, method)(*args, **kwargs)
        after = shell.versions()
        changed = [
            key for key, (tensor, count) in after.items()
            if tensor is not before[key][0] or count != before[key][1]
        ]  # fmt: skip
        for key in changed:
            if key in self._parameters:
                raise RuntimeError(
                    f"{type(shell.module).__name__} changed its parameter {key!r} in place, which "
                    "would be lost: parameters change through the optimizer. An embedding does so "
                    "with max_norm; renormalize with load_state_dict between steps."
                )
        if changed or any(self._modes):
            self._write_buffers(shell, state)
        return result

    def _write_buffers(self, shell: _Shell, before: Mapping[str, Array]) -> None:
        """Write the buffers that differ; torch does not count every write into them."""
        new = {key: shell.tensor(key).numpy(force=True) for key in before}
        changed = [key for key, array in new.items() if not np.array_equal(array, before[key])]
        write_state({self._buffers[key]: new[key] for key in changed})

    def _bind_parameters(self, shell: _Shell) -> None:
        """Put in what the variables are here: traced in a loss."""
        values = {}
        for key, variable in self._parameters.items():
            value = variable.value
            if not isinstance(value, (np.ndarray, torch.Tensor)):
                raise TypeError(
                    f"{self!r} was called in a loss that another library than torch "
                    "differentiates. Pass model.variables as var_list, or backend='torch'."
                )
            values[key] = _hooked(_tensor(value), self._hooks[key])
        shell.bind(values)

    def _bind_values(self, shell: _Shell) -> None:
        named = {**self._parameters, **self._buffers}
        shell.bind({key: _tensor(local_value(v)) for key, v in named.items()})

    def _seeded(self) -> AbstractContextManager[object]:
        replica = PLACE.get().replica
        if not self._may_draw or not isinstance(replica, RunningReplica):
            return nullcontext()
        stream = f"{self.name}/random"
        return SeededDraws(lambda: int(replica.ongoing_rng(stream, self).integers(2**63)))

    # ---- shells --------------------------------------------------------------------------

    @contextmanager
    def _borrowed(self) -> Iterator[_Shell]:
        key, shell = self._take()
        try:
            yield shell
        finally:
            self._give_back(key, shell)

    def _take(self) -> tuple[int | None, _Shell]:
        """Take a shell that is not in use; a replica's plain attributes are its own."""
        replica = PLACE.get().replica
        key = None if replica is None else replica.local_replica_id
        with self._lock:
            idle = self._idle.setdefault(key, [])
            shell = idle.pop() if idle else None
        if shell is None:
            shell = self._pristine.copy()
        shell.set_modes(self._modes)
        return key, shell

    def _give_back(self, key: int | None, shell: _Shell) -> None:
        shell.clear()
        with self._lock:
            self._idle[key].append(shell)

    def _by_every_name(self) -> Iterator[tuple[str, Variable]]:
        for key, others in self._pristine.names.items():
            held = self._parameters if key in self._parameters else self._buffers
            variable = held[key]
            yield from ((other, variable) for other in others)


@final
class _Shell:
    """A copy of a module without tensors, and the places where they go.

    Args:
        module: The copy; each of its tensors is an empty one.
        empty: Those by name.
    """

    def __init__(self, module: nn.Module, empty: dict[str, torch.Tensor]) -> None:
        self.module = module
        self._empty = empty
        self._given = dict(empty)  # on the host
        self._device: torch.device | None = None
        keys = {id(tensor): key for key, tensor in empty.items()}
        self._places: list[tuple[dict[str, torch.Tensor], str, str]] = []
        self._place_of: dict[str, tuple[dict[str, torch.Tensor], str]] = {}
        self.names: dict[str, list[str]] = {key: [] for key in empty}
        self._modes: tuple[bool, ...] = ()
        for path, part in module.named_modules(remove_duplicate=False):
            for tensors in (part._parameters, part._buffers):
                for label, tensor in tensors.items():
                    if tensor is not None:
                        key = keys[id(tensor)]
                        self._places.append((tensors, label, key))
                        self._place_of.setdefault(key, (tensors, label))
                        self.names[key].append(f"{path}.{label}" if path else label)

    @classmethod
    def of(cls, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> _Shell:
        """Copy a module, tensors excepted; tied ones are the same one in the copy."""
        empty = {key: _emptied(tensor) for key, tensor in tensors.items()}
        memo = {id(tensors[key]): empty[key] for key in tensors}
        return cls(copy.deepcopy(module, memo), empty)

    def copy(self) -> _Shell:
        """Return another one."""
        return self.of(self.module, self._empty)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put tensors of the host in their places."""
        self._given.update(tensors)
        self._put(tensors)

    def move(self, device: torch.device | None) -> None:
        """Copy the tensors to a device, None for the host; gradients come back the same way."""
        if device != self._device:
            self._put(self._given)  # a loss may have called the module on another one
            self._device = device
        if device is not None:
            with torch.inference_mode(mode=False):
                self._put({key: self.tensor(key).to(device) for key in self._empty})

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for place, label, key in self._places:
            if key in tensors:
                place[label] = tensors[key]

    def clear(self) -> None:
        """Take the tensors out."""
        self.bind(self._empty)

    def tensor(self, key: str) -> torch.Tensor:
        """Return the tensor of that name."""
        place, label = self._place_of[key]
        return place[label]

    def versions(self) -> dict[str, tuple[torch.Tensor | None, int]]:
        """Return each tensor, and how often it was written, which tells whether it has changed."""
        found: dict[str, tuple[torch.Tensor | None, int]] = {}
        for place, label, key in self._places:
            tensor = place[label]
            # One made in inference mode counts no writes, and was none of ours.
            counts_writes = tensor is not None and not tensor.is_inference()
            found[key] = (tensor, tensor._version if counts_writes else -1)
        return found

    def set_modes(self, modes: tuple[bool, ...]) -> None:
        """Set the training mode of each part."""
        if modes is not self._modes:
            for part, mode in zip(self.module.modules(), modes, strict=True):
                part.training = mode
            self._modes = modes


def _sets_modes(part: nn.Module) -> bool:
    """Tell whether a part of a module sets modes in its own way."""
    kind, base = type(part), nn.Module
    is_plain = kind.train is base.train and kind.eval is base.eval
    return not is_plain or not part.__dict__.keys().isdisjoint(("train", "eval"))


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"torch_module takes a torch.nn.Module, got {module!r} ({type(module).__name__})."
        )
    if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
        raise TypeError(
            f"torch_module takes a module before it is compiled, got {type(module).__name__}. Pass "
            "the module that it was compiled from."
        )


def _checked_array(key: str, tensor: torch.Tensor) -> Array:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"{key!r} has no shape yet: its module is lazy. Call the module once with a batch."
        )
    if tensor.dtype is torch.bfloat16 or tensor.dtype.is_complex or tensor.is_sparse:
        raise TypeError(
            f"{key!r} is a {'sparse' if tensor.is_sparse else tensor.dtype} tensor, which cannot "
            "be a variable. Convert the module first, for example with module.float()."
        )
    array: Array = tensor.numpy(force=True)
    return array


def _checked_hooks(key: str, tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], object], ...]:
    """Return the hooks of a parameter, which are called with its gradient in a loss."""
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise TypeError(
            f"{key!r} has a hook of register_post_accumulate_grad_hook, which would never be "
            "called: gradients go to the optimizer and not to `.grad`. Use register_hook."
        )
    return tuple((tensor._backward_hooks or {}).values())


def _hooked(
    tensor: torch.Tensor, hooks: Sequence[Callable[[torch.Tensor], object]]
) -> torch.Tensor:
    """Register the hooks of a parameter on its tensor in a loss, which has it until the end."""
    if tensor.requires_grad:
        for hook in hooks:
            tensor.register_hook(hook)
    return tensor


def _free_name(kind: str, arrays: Mapping[str, Array]) -> str:
    strategy = PLACE.get().strategy
    name, number = kind, 0
    while strategy is not None and any(
        strategy.variable_table.has(f"{name}/{key}") for key in arrays
    ):
        number += 1
        name = f"{kind}_{number}"
    return name


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in without numbers: a parameter for a parameter."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _tensor(value: Array | torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own, outside of inference mode, which counts no writes."""
    if isinstance(value, torch.Tensor):
        return value
    with torch.inference_mode(mode=False):
        return torch.tensor(value, device=CPU)


def _as_tensor(leaf: object, device: torch.device | None = None) -> object:
    return torch.tensor(leaf, device=device or CPU) if isinstance(leaf, np.ndarray) else leaf


def _device_of(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.device | None:
    """Return the device of the first tensor among the arguments; None for the host."""
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        first = next((x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
    return None if first is None or first.device.type == "cpu" else first.device
