"""Random numbers of torch, seeded for one call on one thread.

torch draws from one generator per process unless an operation is given another one. While
`SeededDraws` is entered, every operation of this thread that draws is given its generator; torch
keeps such modes per thread, and tags the operations.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..context import STAGE

Op = Any  # a torch.ops overload

CHECKPOINT = "torch.utils.checkpoint"


@final
class SeededDraws(TorchDispatchMode):  # type: ignore[misc]  # torch's own base is untyped
    """Gives operations that draw random numbers a generator of this call.

    Args:
        next_seed: Called when the first number is drawn.

    Raises:
        RuntimeError: From the operation: if it takes no generator, or would be run again by
            `torch.utils.checkpoint` or as a stage of a pipeline, with other numbers.
    """

    def __init__(self, next_seed: Callable[[], int]) -> None:
        super().__init__()
        self._next_seed = next_seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed: int | None = None

    def __torch_dispatch__(
        self,
        func: Op,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run one operation."""
        if not _may_be_random(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        given = kwargs or {}
        if given.get("generator") is not None or _draws_nothing(func, args, given):
            return func(*args, **given)
        _require_no_stage(func)
        _require_no_checkpoint(func)
        generator = self._generator(_device(args, given))
        if func is torch.ops.aten.native_dropout.default:
            return _dropout(generator, *args)
        return _with_generator(func)(*args, **{**given, "generator": generator})

    def _generator(self, device: torch.device) -> torch.Generator:
        if self._seed is None:
            self._seed = self._next_seed()
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return found


@functools.cache  # torch builds the tags anew each time they are asked for
def _may_be_random(func: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def may_draw(module: nn.Module) -> bool:
    """Tell whether a module may draw random numbers when it is called.

    Only what torch itself brings is known not to; code of others may do anything.
    """
    return any(_may_draw(part) for part in module.modules())


def _may_draw(part: nn.Module) -> bool:
    if not type(part).__module__.startswith("torch.nn.modules."):
        return True
    if part._forward_hooks or part._forward_pre_hooks:
        return True
    if isinstance(part, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    rate = getattr(part, "p" if "Dropout" in type(part).__name__ else "dropout", 0.0)
    return not isinstance(rate, nn.Module) and bool(rate)  # a layer in it is a part of its own


def _draws_nothing(func: Op, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether an operation that may drop out is told not to."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    rate = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(rate == 0.0)


def _device(args: Sequence[object], kwargs: Mapping[str, Any]) -> torch.device:
    for part in args:
        if isinstance(part, torch.Tensor):
            return part.device
    return torch.device(kwargs.get("device") or "cpu")


def _with_generator(func: Op) -> Op:
    """Return the overload of an operation that takes a generator."""
    if _takes_generator(func):
        return func
    name = func._overloadname
    wanted = "generator" if name == "default" else f"{name}_generator"
    if wanted in func.overloadpacket.overloads():
        return getattr(func.overloadpacket, wanted)
    raise RuntimeError(
        f"{func} draws random numbers but takes no generator, so they could not be drawn again. "
        "Use another operation for it; for attention, "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


def _takes_generator(func: Op) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _dropout(
    generator: torch.Generator, values: torch.Tensor, rate: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what aten::native_dropout does, which takes no generator."""
    if train is False or rate == 0.0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1.0 - rate, generator=generator)
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    return values * mask * scale, mask


def _require_no_stage(func: Op) -> None:
    if STAGE.get():
        raise RuntimeError(
            f"{func} was called in a stage of ar.pipeline that is run again on the way back, with "
            "other random numbers. Put random layers into the last stage, which is run once."
        )


def _require_no_checkpoint(func: Op) -> None:
    if CHECKPOINT not in sys.modules:
        return
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == CHECKPOINT:
            raise RuntimeError(
                f"{func} was called inside torch.utils.checkpoint, which runs it again on the way "
                "back, with other random numbers. Put random layers outside the checkpoint."
            )
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
