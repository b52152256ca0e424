"""from_torch: an optimizer of torch.optim as an optimizer here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import Any, final

import numpy as np

from ..tree import Array, DType
from ..values import Variable
from ._optimizer import JointOptimizer, Optimizer
from ._settings import OptimizerOptions
from ._slots import working_dtype
from ._staged_write import StagedWrite

Group = Mapping[str, Any]

THREADED_BYTES = 256 * 1024
KINDS_OF_STEP = ("foreach", "fused", "differentiable", "capturable")
KEPT_OPTIONS = 256  # of the newest updates under a scheduler; parameter servers ask in any order
NUM_UPDATES = "num_updates"  # a slot of our own: torch makes its state at the first update


def from_torch(
    optimizer_class: object,
    groups: Sequence[Group] | None = None,
    *,
    scheduler: Callable[[Any], object] | None = None,
    **options: object,
) -> Optimizer:
    """Make an optimizer of a class of `torch.optim`.

    Its state becomes slots, so it is colocated with the variables, written together with them and
    part of what a checkpoint saves. One call of torch updates all variables of a step: its fused
    step where there is one, which rounds the last bit differently, unless an option says
    `fused=False`. `learning_rate`, 1 at first, and the multipliers are factors of torch's `lr`.

    Args:
        optimizer_class: Such as `torch.optim.AdamW`.
        groups: Parameter groups as torch takes them, with variables as "params":
            `[{"params": [w]}, {"params": [b], "weight_decay": 0.0}]`. None puts every variable
            that has a gradient into one.
        scheduler: Called with a torch optimizer, gives one of `torch.optim.lr_scheduler`, which
            moves on once per update: `lambda optimizer: StepLR(optimizer, 30)`.
        **options: Its arguments after the parameters, such as `lr=1e-3`; and those of `Optimizer`:
            clipping, loss scale, what to do about gradients that are not finite.

    Raises:
        ImportError: If torch is not installed.
        TypeError: If it is not such a class, refuses the options, needs a closure, or keeps state
            that is not a tensor; or if a scheduler needs a metric.
        ValueError: If torch refuses the options, or an option is out of range; at a step, if a
            variable is in no group.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio, torch
        >>> from aioreplica import Variable
        >>> w, b = Variable([4.0]), Variable([4.0])
        >>> groups = [{"params": [w], "lr": 1.0}, {"params": [b]}]
        >>> sgd = from_torch(torch.optim.SGD, groups, lr=0.5)
        >>> asyncio.run(sgd.apply_gradients([(w.value, w), (b.value, b)]))
        >>> w.value, b.value
        (array([0.]), array([2.]))
    """
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise ImportError(
            "from_torch needs the torch package, which is not installed. Run: "
            'pip install "aioreplica[torch]"',
            name="torch",
        ) from missing
    kind = torch.optim.Optimizer
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, kind)):
        raise TypeError(
            f"from_torch takes a class such as torch.optim.Adam, got {optimizer_class!r}."
        )
    ours = OptimizerOptions.__optional_keys__
    of_optimizer: Any = {name: options.pop(name) for name in [*options] if name in ours}
    rule = _Rule(torch, optimizer_class, groups, options)
    schedule = None if scheduler is None else _Schedule(rule, scheduler)
    return _FromTorch(rule, schedule, of_optimizer)


@final
class _Rule:
    """A class of torch, its options, and which variables have options of their own."""

    def __init__(
        self,
        torch: Any,
        optimizer_class: Any,
        groups: Sequence[Group] | None,
        options: Mapping[str, object],
    ) -> None:
        self.torch = torch
        self.lock = Lock()
        self._class = optimizer_class
        self._options = dict(options)
        self._examples: dict[int, tuple[int, ...]] = {}  # a shape that each group takes
        self.can_be_fused = self._has_fused_step(optimizer_class, [*(groups or ()), options])
        self.is_open = groups is None
        self.writes_gradients = bool(options.get("foreach"))  # SGD does, with nesterov
        self.groups = [dict(group) for group in groups or [{"params": ()}]]
        self.group_of: dict[Variable, int] = {}
        self._group_named: dict[str, int] = {}  # where it came from another process
        for index, group in enumerate(self.groups):
            for variable in group.pop("params", ()):
                if not isinstance(variable, Variable):
                    raise TypeError(
                        f'A group\'s "params" are variables, got {variable!r} '
                        f"({type(variable).__name__})."
                    )
                if variable in self.group_of:
                    raise ValueError(f"Variable {variable.name!r} is in two groups.")
                self.group_of[variable] = index
        self.slot_names: tuple[str, ...] = ()
        for index in range(len(self.groups)):
            own = [variable for variable, at in self.group_of.items() if at == index]
            for name in self._tried_out(index, {len(v.shape) for v in own} or {1, 2}):
                if name not in self.slot_names:
                    self.slot_names = (*self.slot_names, name)

    def group_for(self, variable: Variable) -> int:
        """Return the group of a variable; one that is in none goes into the first, if that is open.

        Raises:
            ValueError: If it is not.
        """
        found = self.group_of.get(variable)
        if found is None:
            found = self._group_named.get(variable.name, 0 if self.is_open else None)
            if found is None:
                raise ValueError(
                    f"Variable {variable.name!r} has a gradient but is in no group of from_torch. "
                    "Add it to one, or leave its pair out."
                )
            self.group_of[variable] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        named = {variable.name: index for variable, index in self.group_of.items()}
        kept = {name: value for name, value in vars(self).items() if name != "lock"}
        return {**kept, "group_of": {}, "_group_named": {**self._group_named, **named}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.lock = Lock()

    def new_optimizer(self, parameters: Sequence[Sequence[Any]], *, is_fused: bool = False) -> Any:
        """Make an optimizer of torch with the parameters of each group."""
        groups = zip(parameters, self.groups, strict=True)
        options = {**self._options, "fused": True} if is_fused else self._options
        return self._class([{**g, "params": [*own]} for own, g in groups], **options)

    def parameter(self, shape: Sequence[int]) -> Any:
        """Return a parameter of a shape, without memory for it: torch looks at shapes at once."""
        return self.torch.nn.Parameter(self.torch.zeros((), device="cpu").expand(tuple(shape)))

    def on_host(self) -> AbstractContextManager[object]:
        """Have torch make what it keeps for variables on the host, where these are."""
        is_default = self.torch.get_default_device().type == "cpu"
        context: AbstractContextManager[object] = (
            nullcontext() if is_default else self.torch.device("cpu")
        )
        return context

    def example(self, index: int) -> object:
        """Return a parameter of a shape that a group takes."""
        return self.parameter(self._examples[index])

    def _tried_out(self, index: int, ranks: Collection[int]) -> Iterator[str]:
        """Yield what torch keeps for small parameters with so many axes.

        Some classes take matrices only, and some keep other things for these than for vectors.

        Raises:
            Exception: From torch, if it takes none of them.
        """
        refused: list[Exception] = []
        for rank in sorted(ranks):
            try:
                names = [*self.first_state((2,) * rank, np.dtype(np.float32), index)]
            except Exception as error:  # noqa: BLE001 - any that torch finds
                refused.append(error)
                continue
            self._examples.setdefault(index, (2,) * rank)
            yield from names
        if index not in self._examples:
            raise refused[0]

    def _has_fused_step(self, optimizer_class: Any, chosen: Sequence[Mapping[str, object]]) -> bool:
        """Tell whether torch takes the whole step in one pass, and the user chose no other way."""
        if any(name in options for options in chosen for name in KINDS_OF_STEP):
            return False
        parameter = self.torch.nn.Parameter(self.torch.zeros(1, device="cpu"))
        try:
            optimizer_class([parameter], **self._options, fused=True)
        except (TypeError, ValueError, RuntimeError):  # it has none, or not for these options
            return False
        return True

    def state_at_start(self, parameter: Any, index: int) -> dict[str, Any]:
        """Return what torch has of a parameter before its first step; most have nothing."""
        group = {**self.groups[index], "params": [parameter]}
        return dict(self._class([group], **self._options).state[parameter])

    def first_state(self, shape: Sequence[int], dtype: DType, index: int) -> dict[str, Array]:
        """Return the state of a variable before its first update: zeros of the right shapes."""
        parameter = self.torch.nn.Parameter(self.torch.from_numpy(np.zeros(shape, dtype)))
        parameter.grad = self.torch.zeros_like(parameter)
        with self.on_host():
            made = self._class([{**self.groups[index], "params": [parameter]}], **self._options)
            made.step()
        found: dict[str, Array] = {}
        for name, part in made.state[parameter].items():
            if part is not None:
                found[name] = np.zeros_like(self.checked_tensor(name, part).detach().numpy())
        return found

    def checked_tensor(self, name: str, part: Any) -> Any:
        """Return a part of a parameter's state.

        Raises:
            TypeError: If it is not a tensor.
        """
        if isinstance(part, self.torch.Tensor):
            return part
        raise TypeError(
            f"{self._class.__name__} keeps {name!r} as a {type(part).__name__}, but only "
            "tensors can be slots. Use another optimizer."
        )


@final
class _Schedule:
    """Options of the groups under a scheduler of torch, by number of updates.

    It is a function of that number: a scheduler of its own is stepped up to there. The options of
    the last numbers are kept. An earlier number, as after a checkpoint was loaded, starts another
    scheduler.
    """

    def __init__(self, rule: _Rule, scheduler: Callable[[Any], Any]) -> None:
        self._rule = rule
        self._make = scheduler
        self._kept: dict[int, list[dict[str, Any]]] = {}
        self._begin()

    def at(self, iteration: int) -> list[dict[str, Any]]:
        """Return the options of each group after so many updates."""
        if iteration not in self._kept:
            if iteration <= self._count:
                self._begin()
            while self._count < iteration:
                self._optimizer.step()
                self._scheduler.step()
                self._count += 1
                if iteration - self._count < KEPT_OPTIONS:
                    self._keep()
        return self._kept[iteration]

    def _keep(self) -> None:
        groups, ours = self._optimizer.param_groups, ("params", "fused")
        now = [{k: v for k, v in group.items() if k not in ours} for group in groups]
        self._kept[self._count] = copy.deepcopy(now)  # a scheduler may write a tensor
        if len(self._kept) > KEPT_OPTIONS:
            del self._kept[next(iter(self._kept))]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _Schedule, (self._rule, self._make)

    def _begin(self) -> None:
        torch = self._rule.torch
        parameters = [[self._rule.example(index)] for index in range(len(self._rule.groups))]
        self._count = 0
        self._optimizer = self._rule.new_optimizer(parameters)
        self._scheduler = self._make(self._optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric at every step. Use "
                "ar.optimizers.schedules.ReduceOnPlateau as the learning_rate."
            )
        self._keep()


@final
class _FromTorch(JointOptimizer):
    """Lets torch take each step."""

    takes_each_alone = True
    _made: tuple[object, ...] = ()  # for which variables and factors
    _variables: Sequence[Variable] = ()
    _optimizer: object = None
    _parameters: Sequence[Any] = ()

    def __init__(self, rule: _Rule, schedule: _Schedule | None, options: OptimizerOptions) -> None:
        super().__init__(1.0, (NUM_UPDATES, *rule.slot_names), **options)
        self._rule = rule
        self._schedule = schedule

    def attributes_of_rule(self, variables: Sequence[Variable]) -> Mapping[str, object]:
        """Return torch's class and its options, and the scheduler."""
        return {"_rule": self._rule, "_schedule": self._schedule}

    def start(self, variables: Sequence[Variable]) -> Sequence[Variable]:
        """Check that all are in a group; there is no state beside the slots."""
        for variable in variables:
            self._rule.group_for(variable)
        return ()

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start with zeros, which torch replaces at the first update."""
        if name == NUM_UPDATES:
            return np.array(0)
        dtype = working_dtype(variable.dtype)
        state = self._rule.first_state(variable.shape, dtype, self._rule.group_for(variable))
        return state.get(name, np.zeros(()))

    def prepare(self, learning_rate: float, iteration: int) -> tuple[float, int]:
        """Return the factor of torch's rate, and the number of the update."""
        return learning_rate, iteration

    def update_all(
        self,
        prepared: Sequence[tuple[float, int]],
        variables: Sequence[Variable],
        groups: Sequence[tuple[Variable, ...]],
        shared: Sequence[Variable],
        gradients: Sequence[Array],
        write: StagedWrite,
    ) -> None:
        """Copy values and slots to new memory, where torch moves them."""
        factors = [factor for factor, _ in prepared]
        everything = [variable for group in groups for variable in group]
        # Runs that go on at the same time share torch's optimizer.
        with self._rule.lock, self._rule.on_host():
            for old, new in write.begin(everything):
                self._step(variables, factors, prepared[0][1], gradients, old, new)
        self.is_warm = True

    def _step(
        self,
        variables: Sequence[Variable],
        factors: Sequence[float],
        iteration: int,
        gradients: Sequence[Array],
        old: Sequence[Array],
        new: Sequence[Array],
    ) -> None:
        rule, torch = self._rule, self._rule.torch
        width = 1 + len(self.slot_names)
        are_new = [not count for count in old[1::width]]
        # torch's fused step takes parameters that all have their state already, or all have none.
        is_fused = rule.can_be_fused and len({*are_new}) == 1
        is_fused = is_fused and all(value.dtype.char in "fd" for value in old[::width])
        optimizer, parameters = self._optimizer_for(variables, factors, is_fused)
        if self._schedule is not None:
            self._follow(optimizer, self._schedule.at(iteration), factors)
        names = rule.slot_names
        tensors = list(map(torch.from_numpy, new))
        for before, after, tensor in zip(old, new, tensors, strict=True):
            _copy(torch, before, after, tensor)
        state: Any = optimizer.state
        for index, parameter in enumerate(parameters):
            at = index * width
            parameter.data = tensors[at]
            gradient = _readable(torch, gradients[index])
            parameter.grad = gradient.clone() if rule.writes_gradients else gradient
            new[at + 1] += 1
            if are_new[index]:
                state[parameter] = rule.state_at_start(parameter, rule.group_of[variables[index]])
            else:
                state[parameter] = dict(zip(names, tensors[at + 2 : at + width], strict=True))
        optimizer.step()
        for index, parameter in enumerate(parameters):
            at = index * width + 2
            made = state[parameter]
            for name, tensor in zip(names, tensors[at : at + width - 2], strict=True):
                part = made.get(name)
                if part is not tensor and part is not None:
                    tensor.copy_(rule.checked_tensor(name, part))
            parameter.grad = None
            parameter.data = torch.zeros(
                0, device="cpu"
            )  # it would hold a buffer that the next step can use
        state.clear()

    def _optimizer_for(
        self, variables: Sequence[Variable], factors: Sequence[float], is_fused: bool
    ) -> tuple[Any, Sequence[Any]]:
        """Return torch's optimizer of these variables, each in a group for its factor."""
        wanted = (is_fused, *map(id, variables), *factors)
        if wanted != self._made:
            self._variables = [*variables]  # so that their ids stay theirs
            parameters = [self._rule.parameter(variable.shape) for variable in variables]
            rule, where = self._rule, self._rule.group_of
            empty: list[list[object]] = [[] for _ in rule.groups]
            for parameter, variable in zip(parameters, variables, strict=True):
                empty[where[variable]].append(parameter)
            optimizer = rule.new_optimizer(empty, is_fused=is_fused)
            bases = optimizer.param_groups
            optimizer.param_groups = split = []
            for index, base in enumerate(bases):
                members = [
                    (parameter, factor)
                    for parameter, variable, factor in zip(
                        parameters, variables, factors, strict=True
                    )
                    if where[variable] == index
                ]
                for factor in dict.fromkeys(factor for _, factor in members):
                    own = [parameter for parameter, each in members if each == factor]
                    group = {**base, "params": own, "lr": base["lr"] * factor}
                    split.append({**group, "index": index, "factor": factor})
            self._made, self._optimizer, self._parameters = wanted, optimizer, parameters
        return self._optimizer, self._parameters

    def _follow(
        self, optimizer: Any, options: Sequence[Mapping[str, Any]], factors: Sequence[float]
    ) -> None:
        for group in optimizer.param_groups:
            now = options[group["index"]]
            group.update({**now, "lr": now["lr"] * group["factor"]})


def _copy(torch: Any, old: Array, new: Array, tensor: Any) -> None:
    """Copy an array to new memory, of which there is a tensor: torch takes several threads."""
    if new.nbytes > THREADED_BYTES:
        tensor.copy_(_readable(torch, old))
    else:
        np.copyto(new, old)


def _readable(torch: Any, array: Array) -> Any:
    """Return an array as a tensor of the same memory, to be read only."""
    if not array.flags.writeable:
        array = array.view()
        try:
            array.flags.writeable = True
        except ValueError:  # so is the array that owns the memory
            interface = array.__array_interface__  # its flag says read-only, which torch cannot say
            shown = {**interface, "data": (interface["data"][0], False)}
            array = np.asarray(SimpleNamespace(__array_interface__=shown, owner=array))
    return torch.from_numpy(array)
