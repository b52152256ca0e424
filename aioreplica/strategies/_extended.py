"""`strategy.extended`: devices, results where a variable lives, updates; a group's view of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

from .._functions import is_async, require_no_yield
from ..collectives import CommunicationOptions
from ..context import BESIDE, CREATORS, PLACE
from ..devices import Device, list_devices, require_device
from ..errors import ContextError
from ..replica import RunningReplica, update_variable
from ..tree import Tree
from ..typing import OpName, ReduceOp
from ..values import (
    DistributedValues,
    Mirrored,
    Variable,
    is_own,
    require_own,
    run_per_component,
    some_workers_error,
    split_arguments,
    update_components,
)
from ._combine import (
    Axis,
    broadcast_value,
    gather_tree,
    local_results,
    read_variable,
    reduce_pairs,
    reduce_tree,
)
from ._runtime import Replicas, Runtime

if TYPE_CHECKING:
    from ._strategy import Strategy


_NON_SLOT = "extended.update_non_slot"
_REDUCE_TWIN = "ctx.all_reduce(op, value)"
_NON_SLOT_TWIN = "ctx.merge_call(merge_fn, args) and update_non_slot inside the merge function"


@final
class Extended:
    """The part of a strategy that libraries use more than programs do.

    Args:
        replicas: Those whose values are reduced: all of the strategy, or a group.

    Source:
        tf.distribute.StrategyExtended.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._runtime = replicas.runtime
        self._replicas = replicas

    # ---- devices -------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that replicas run on.

        Raises:
            ContextError: Under the default strategy, which has none.
        """
        devices = self._runtime.replica_devices
        if None in devices:
            raise ContextError(
                "The default strategy has no devices. Enter the scope of a OneDeviceStrategy or "
                "MirroredStrategy."
            )
        return tuple(device for device in devices if device is not None)

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that variables live on: the workers' own, or the one of central storage.

        Raises:
            ContextError: Under the default strategy, which has none.
        """
        return self._runtime.parameter_devices or self.worker_devices

    def non_slot_devices(self, var_list: Iterable[Variable]) -> tuple[Device, ...]:
        """Return where state that belongs to all of some variables lives, for `update_non_slot`.

        Returns:
            The parameter devices; none under the default strategy.

        Raises:
            TypeError: If `var_list` is not a list of variables.
            ContextError: If a variable belongs to another strategy.
        """
        what = "extended.non_slot_devices"
        if isinstance(var_list, Variable) or not isinstance(var_list, Iterable):
            raise TypeError(
                f"{what} takes a list of variables, got a {type(var_list).__name__}. Wrap one "
                "variable in a list."
            )
        for variable in var_list:
            require_own(variable, self._runtime, what)
        return () if self._runtime.has_plain_values else self.parameter_devices

    def get_host_cpu_device(self, host_id: int = 0) -> Device:
        """Return the device of ordinary code on a host, its first CPU.

        Args:
            host_id: Of a `TPUStrategy` one that `host_of` gives; of several workers a rank; else 0.

        Raises:
            ValueError: If there is no such host.
        """
        _require_host(self._runtime, host_id)
        return list_devices("cpu")[0]

    # ---- results that live somewhere ---------------------------------------------------------

    async def reduce_to(
        self,
        op: ReduceOp | OpName,
        value: Tree,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        """Reduce values over replicas, to where a destination lives.

        Args:
            op: SUM, MEAN, MIN or MAX, or its name in any case.
            value: Any pytree of distributed values.
            destinations: A device or its name, a variable (which is not written), a distributed
                value, or a plain array.
            options: How to do it; None takes the strategy's options.

        Returns:
            The pytree with a Mirrored per distributed value, whose entries share one read-only
            buffer; with plain values if the destination is a device or a plain array, and under
            the default strategy.

        Raises:
            ValueError: As `strategy.reduce`; or if a name is malformed, or a distributed value has
                another number of components than there are replicas.
            TypeError: If a leaf is not numeric, or `destinations` is a list or no destination.
            DeviceError: If there is no such device.
            ContextError: If called inside a replica (use `ctx.all_reduce`), or if the destination
                is a variable of another strategy.

        Determinism:
            In ascending replica id; bitwise reproducible.

        Source:
            tf.distribute.StrategyExtended.reduce_to.
        """
        what = "extended.reduce_to"
        self._runtime.require_cross_replica(what, _REDUCE_TWIN)
        pairs = [(value, destinations)]
        [result] = await reduce_pairs(self._replicas, op, pairs, what, options)
        return result

    async def batch_reduce_to(
        self,
        op: ReduceOp | OpName,
        value_destination_pairs: Iterable[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Reduce several values together, each to its own destination; see `reduce_to`.

        Args:
            op: SUM, MEAN, MIN or MAX, or its name in any case.
            value_destination_pairs: Pairs of a value and where it goes.
            options: How to do it; None takes the strategy's options.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ValueError: As `reduce_to`, or if an item is not a pair.
            TypeError: As `reduce_to`.
            DeviceError: If there is no such device.
            ContextError: As `reduce_to`.
        """
        what = "extended.batch_reduce_to"
        self._runtime.require_cross_replica(what, _REDUCE_TWIN)
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(
                    f"{what} takes pairs of a value and a destination, got a "
                    f"{type(pair).__name__} among them. Write [(value, destination), ...]."
                )
        return await reduce_pairs(self._replicas, op, pairs, what, options)

    async def broadcast_to(self, x: Tree, destinations: object) -> Tree:
        """Put one value where a destination lives.

        Args:
            x: Any pytree, variables and Mirrored values included; writable arrays are copied once.
            destinations: A device or its name, a variable (which is not written) or a distributed
                value.

        Returns:
            A Mirrored with one entry per device of the destination; the plain value under the
            default strategy.

        Raises:
            ValueError: If `x` holds a PerReplica, a name is malformed, or a distributed value has
                another number of components than there are replicas.
            TypeError: If `destinations` is a list or no destination, or `x` holds a masked array.
            DeviceError: If there is no such device.
            ContextError: If called inside a replica (use `ctx.broadcast`), or if the destination
                is a variable of another strategy.
        """
        self._runtime.require_cross_replica("extended.broadcast_to", "ctx.broadcast(value)")
        return await broadcast_value(self._replicas, x, destinations)

    # ---- updates -------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Coroutine[object, None, Tree]:
        """Run `fn(var, *args)` once per component, where reads and assigns act on that component.

        All components are computed first and swapped in together at the end. If `fn` awaits and
        the variable was written meanwhile, `fn` runs again on the new value. Inside a replica this
        is `ctx.update`.

        Args:
            var: A variable of this strategy.
            fn: A plain function (which may return an awaitable) or an async one.
            args: Positional arguments after the variable; Mirrored ones are unwrapped.
            kwargs: Keyword arguments, likewise.
            group: False gives a list of the results instead of a Mirrored.

        Raises:
            ContextError: If the variable belongs elsewhere, or some workers do not run this.
            TypeError: If `var` is not a variable.
            ValueError: If an argument holds a PerReplica.

        Cancellation:
            Leaves the variable as it was.
        """
        what, place = "extended.update", PLACE.get()
        replica = place.replica
        if isinstance(replica, RunningReplica) and place.strategy is self._runtime:
            merge, merged = update_variable(var, fn, args, kwargs, group)
            return replica.meet_as("update", merge, merged, sys._getframe(1))
        self._runtime.require_cross_replica(what, None)
        require_own(var, self._runtime, what)
        if place.lacks_workers:
            raise some_workers_error(place, f"{what} of {var.name!r}")
        if not callable(fn):
            raise TypeError(f"{what} needs a function of (variable, *args), got {fn!r}.")
        label = f"{what} of {var.name!r}"
        all_args, all_kwargs = split_arguments(args, kwargs, len(var.components), label)
        return update_components(self._runtime, var, fn, all_args, all_kwargs, group)

    async def update_non_slot(
        self,
        devices: Sequence[Device | str] | Device | str,
        fn: Callable[..., object],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(*args)` once per device, where reads and assigns act on that device's components.

        For state that belongs to no single variable. What the calls write is swapped in together
        at the end. `ar.get_update_replica_id()` is the index of the device in
        `parameter_devices`, `ar.current_device()` the device.

        Args:
            devices: What `non_slot_devices` gave, or some of this strategy's devices; ignored
                under the default strategy, where `fn` runs once.
            fn: A plain function (which may return an awaitable) or an async one.
            args: Positional arguments; Mirrored ones are unwrapped.
            kwargs: Keyword arguments, likewise.
            group: False gives a list of the results instead of a Mirrored (of the plain result,
                under the default strategy).

        Raises:
            ContextError: If called inside a replica, or where some workers do not run this.
            TypeError: If `fn` is not callable, or `devices` are not devices.
            ValueError: If a device is not one of the strategy's or named twice, there is none, or
                an argument holds a PerReplica.
            DeviceError: If there is no such device.

        Cancellation:
            Leaves all variables as they were.
        """
        self._runtime.require_cross_replica(_NON_SLOT, _NON_SLOT_TWIN)
        if (place := PLACE.get()).lacks_workers:
            raise some_workers_error(place, _NON_SLOT)
        if not callable(fn):
            raise TypeError(f"{_NON_SLOT} needs a function, got {fn!r} ({type(fn).__name__}).")
        runtime = self._runtime
        if runtime.has_plain_values:
            all_args, all_kwargs = split_arguments(args, kwargs, 1, _NON_SLOT)
            results = await run_per_component(runtime, fn, all_args, all_kwargs, [(0, None)])
            return results[0] if group else results
        known = self.parameter_devices
        places = [(known.index(device), device) for device in _chosen(devices, known)]
        num_replicas = runtime.num_local_replicas
        all_args, all_kwargs = split_arguments(args, kwargs, num_replicas, _NON_SLOT)
        results = await run_per_component(runtime, fn, all_args, all_kwargs, places)
        if not group:
            return results
        return Mirrored(results * num_replicas if runtime.parameter_devices else results)

    # ---- variables -----------------------------------------------------------------------

    async def read_var(self, v: Variable) -> Any:
        """Return the value of a variable of this strategy, as a read-only array.

        It combines the components of all workers: every worker has to call it.

        Raises:
            TypeError: If `v` is not a variable.
            ContextError: If called inside a replica (use `variable.value`), or if the variable
                belongs to another strategy.
        """
        what = "extended.read_var"
        self._runtime.require_cross_replica(what, "variable.value")
        require_own(v, self._runtime, what)
        return await read_variable(self._runtime.workers, v, what)

    def colocate_vars_with(
        self, var: Variable | Sequence[Device]
    ) -> AbstractContextManager[Strategy]:
        """Return a context manager in which new variables live where `var` does.

        They belong to the same strategy and to the same devices, or parameter servers.

        Args:
            var: A variable, or what `non_slot_devices(var_list)` gave.

        Raises:
            TypeError: If `var` is neither.
            ValueError: If the devices are not all of those that variables live on.
            ContextError: If called inside a replica or under another strategy, or if the variable
                belongs to another strategy.
        """
        what = "extended.colocate_vars_with"
        self._runtime.require_cross_replica(what, None)
        if isinstance(var, Sequence) and all(isinstance(each, Device) for each in var):
            known = () if self._runtime.has_plain_values else self.parameter_devices
            if tuple(var) != known:
                raise ValueError(
                    f"{what} got {', '.join(map(str, var)) or 'no device'}, but a variable of this "
                    f"strategy lives on all of {', '.join(map(str, known)) or 'none'}. Pass what "
                    "extended.non_slot_devices(var_list) gave."
                )
            return self._runtime.facade.scope()  # type: ignore[no-any-return]  # see there
        require_own(var, self._runtime, what)
        return _beside(var, self._runtime.facade.scope())

    @contextmanager
    def variable_creator_scope(self, creator: Callable[..., Variable]) -> Iterator[None]:
        """Have a function make the variables of this strategy, in a `with` block.

        It is called for each `ar.Variable(...)`, those of `torch_module` and `jax_variables` too,
        and not for the slots and counters of optimizers. Of nested ones the innermost is called.

        Args:
            creator: Called as `creator(next_creator, initial_value=..., **options)` with what
                `ar.Variable` was given; returns `next_creator(initial_value=..., **options)`,
                changed as it likes. `next_creator` is the creator around it, at last `ar.Variable`.

        Raises:
            TypeError: If it is not a plain function; at a creation, if it returns no variable.
            ContextError: If called inside a replica or under another strategy.

        Source:
            tf.variable_creator_scope.
        """
        what = "extended.variable_creator_scope"
        self._runtime.require_cross_replica(what, None)
        if not callable(creator) or is_async(creator):
            raise TypeError(f"{what} takes a plain function that makes variables, got {creator!r}.")
        require_no_yield(creator, what)
        owner = None if self._runtime.has_plain_values else self._runtime
        token = CREATORS.set((*CREATORS.get(), (owner, creator)))
        try:
            yield
        finally:
            CREATORS.reset(token)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Tell whether this strategy made the variable."""
        return is_own(v, self._runtime)

    def value_container(self, v: Any) -> Any:
        """Return the variable that holds a component, such as what `variable.value` gave.

        Args:
            v: A component, a Mirrored of all components, or a variable.

        Returns:
            The variable; a variable gives itself. `v` itself if no variable of this strategy holds
            it (any longer: a write replaces components), and for components under the default
            strategy, which does not list its variables.
        """
        if isinstance(v, Variable):
            return v
        parts = v.values if isinstance(v, DistributedValues) else (v,)
        for variable in self._runtime.facade.snapshot():
            held = {id(component) for component in variable.components}
            if held.issuperset(map(id, parts)):
                return variable
        return v

    # ---- running, and what to do beside it ----------------------------------------------------

    async def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Tree:
        """Run `fn` once per replica: the same as `strategy.run`, which it calls.

        Raises:
            ContextError: If called inside a replica.
            Exception: All that `strategy.run` raises.

        Cancellation:
            As `strategy.run`.
        """
        self._runtime.require_cross_replica("extended.call_for_each_replica", None)
        return await self._runtime.facade.run(fn, args, kwargs)

    @property
    def should_checkpoint(self) -> bool:
        """True if this process writes checkpoints: of several workers the first one does."""
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        """True if this process writes summaries: of several workers the first one does."""
        return self._is_chief

    @property
    def _is_chief(self) -> bool:
        workers = self._runtime.workers
        return workers is None or workers.rank == 0

    @property
    def require_static_shapes(self) -> bool:
        """True if shapes have to stay the same from step to step: on cores of a TPUStrategy."""
        return self._runtime.topology is not None


@contextmanager
def _beside(variable: object, scope: AbstractContextManager[Strategy]) -> Iterator[Strategy]:
    token = BESIDE.set(variable)
    try:
        with scope as strategy:
            yield strategy
    finally:
        BESIDE.reset(token)


def _chosen(devices: object, known: tuple[Device, ...]) -> tuple[Device, ...]:
    if isinstance(devices, (str, Device)):
        devices = (devices,)
    if not isinstance(devices, (tuple, list)):
        raise TypeError(
            f"{_NON_SLOT} runs on devices, got a {type(devices).__name__}. Pass what "
            "extended.non_slot_devices(var_list) gave, or one device."
        )
    chosen = tuple(require_device(device, devices) for device in devices)
    strangers = [str(device) for device in chosen if device not in known]
    names = ", ".join(map(str, chosen)) or "no device"
    if strangers or not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"{_NON_SLOT} got {names}, but runs once on each of some of this strategy's devices "
            f"({', '.join(map(str, known))}). Pass what extended.non_slot_devices(var_list) gave."
        )
    return chosen


def _require_host(runtime: Runtime, host_id: object) -> None:
    workers, topology = runtime.workers, runtime.topology
    ids: Sequence[int] = range(1 if workers is None else workers.num_workers)
    if topology is not None:
        ids = topology.host_ids
    if host_id not in ids:
        is_dense = len(ids) == ids[-1] + 1
        known = f"0 to {ids[-1]}" if is_dense else ", ".join(map(str, ids))
        raise ValueError(f"There is no host {host_id!r}: ids are {known}.")


@final
class GroupView:
    """A strategy as the replicas of one group see it: values have one entry per member.

    The first argument of a merge function that was passed to `ctx.group(members).merge_call`.
    Variables and devices stay those of the whole strategy: `extended.update` writes every
    component. For all the rest, such as `run` and `snapshot`, there is `strategy`.

    Over a group of several workers a merge function runs once on each of them. There entries and
    `members` are those of this worker, and reductions go over all members. Variables can be written
    there if all workers have members.

    Args:
        replicas: Those of the group.

    Attributes:
        strategy: The whole strategy.
        members: Ids of the replicas in the group, ascending, among those of this worker.
        device_names: One device name per member.

    Example:
        >>> import asyncio
        >>> import aioreplica as ar
        >>> strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> async def step():
        ...     ctx = ar.get_replica_context()
        ...     return await ctx.group([ctx.replica_id_in_sync_group]).merge_call(
        ...         lambda view: view.num_replicas_in_sync
        ...     )
        >>> asyncio.run(strategy.run(step))
        PerReplica({cpu:0: 1, cpu:1: 1})
    """

    __slots__ = ("_replicas", "device_names", "members", "strategy")

    def __init__(self, replicas: Replicas) -> None:
        runtime = replicas.runtime
        self._replicas = replicas
        self.strategy: Strategy = runtime.facade
        self.members = replicas.members or ()
        self.device_names = tuple(runtime.device_names[i] for i in self.members)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in the group, on all workers."""
        return self._replicas.num_in_sync

    @property
    def extended(self) -> Extended:
        """Devices, updates of single components, and reductions of the group's values."""
        return Extended(self._replicas)

    async def reduce(self, op: ReduceOp | OpName, value: object, axis: Axis = None) -> Tree:
        """Reduce values over the members, as `Strategy.reduce` does over all replicas."""
        self._open("reduce", "ctx.group(members).all_reduce(op, value)")
        return await reduce_tree(self._replicas, ReduceOp.parse(op), value, axis)

    async def gather(self, value: object, axis: int) -> Tree:
        """Join the members' components along `axis`, in the order of their ids."""
        self._open("gather", "ctx.group(members).all_gather(value, axis)")
        return await gather_tree(self._replicas, value, axis)

    def local_results(self, value: object) -> tuple[Any, ...]:
        """Return one entry per member, selected through pytrees.

        A variable has an entry per replica of the strategy, of which the members' are taken. A
        value without distributed leaves gives `(value,)`.
        """
        return local_results(value, self.members)

    def _open(self, what: str, twin: str) -> None:
        runtime = self._replicas.runtime
        runtime.require_cross_replica(what, twin)
        runtime.open()

    def __repr__(self) -> str:
        return f"<GroupView {self.members} of {self.strategy!r}>"
