"""Packing of functions and results of closures: named variables, and large buffers apart.

cloudpickle is imported at use: programs without parameter servers need not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias, final
from weakref import WeakValueDictionary

from ...cluster import ClosureEngine
from ...context import CARRIER, CLOSURE
from ...errors import ContextError
from ...input import InputContext, spec_of
from ...optimizers import Optimizer, OptimizerRecipe, recipe_of
from ...values import Variable, VariableOptions
from ._messages import Spec
from ._splits import SplitReader
from ._variables import ServedVariable, new_served

Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


@final
class SharedPart:
    """Pickle of a function and its variables, kept once for all calls in which it is the same.

    Args:
        data: The pickle.
    """

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


SharedParts: TypeAlias = WeakValueDictionary[bytes, SharedPart]


@final
class Packed(NamedTuple):
    """A pickled object and its large buffers.

    Attributes:
        data: The pickle; of a call what comes after its shared part.
        buffers: Its buffers, in order.
        shared: Of a call; None where the data is all of it, as it is once this was sent.
    """

    data: bytes
    buffers: tuple[Any, ...]
    shared: SharedPart | None = None

    @property
    def whole(self) -> bytes:
        """The pickle in one piece."""
        return self.data if self.shared is None else self.shared.data + self.data

    @property
    def num_bytes(self) -> int:
        """Number of bytes to send."""
        first = 0 if self.shared is None else len(self.shared.data)
        return first + len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)

    def __reduce__(self) -> Reduced:
        return Packed, (self.whole, self.buffers)


def pack(thing: object, side: Any) -> Packed:
    """Pickle an object; its large buffers stay apart.

    Raises:
        Exception: Whatever pickling raises.
    """
    from ...devices.processes import dumps, put_apart

    buffers: list[object] = []
    return Packed(dumps(thing, side, put_apart(buffers)), tuple(buffers))


def pack_in_one(thing: object, side: Any) -> bytes:
    """Pickle an object together with its buffers.

    Raises:
        Exception: Whatever pickling raises.
    """
    from ...devices.processes import dumps

    return dumps(thing, side, lambda _buffer: True)


def unpack(packed: Packed, side: object) -> Any:
    """Build an object anew."""
    from ...devices.processes import loads

    return loads(packed.data, packed.buffers, side)


def unpack_call(packed: Packed, side: object) -> tuple[Any, Any, Any]:
    """Build a function and its arguments anew, which `pack_call` has packed."""
    from ...devices.processes import loads_pair

    (fn, _), (args, kwargs) = loads_pair(packed.whole, packed.buffers, side)
    return fn, args, kwargs


@final
class HomeSide:
    """The program's side of pickling a closure: names its variables, optimizers and resources.

    Args:
        strategy: Whose variables may be named.
        parts: Those of calls, as long as one has them; None to share none.

    Attributes:
        recipes: Of the optimizers that were named, by number: which settings, and these, pickled.
        refused: Why an optimizer cannot be used in closures; None if all can.
    """

    def __init__(  # Any: it needs this class
        self, strategy: Any, parts: SharedParts | None = None
    ) -> None:
        self._strategy = strategy
        self._parts = parts
        self.recipes: dict[int, tuple[int, bytes]] = {}
        self.refused: TypeError | None = None

    def share(self, data: bytes) -> SharedPart:
        """Return a part of a call, the one that others have if there is one with these bytes."""
        if self._parts is None:
            return SharedPart(data)
        found = self._parts.get(data)
        if found is None:
            found = self._parts[data] = SharedPart(data)
        return found

    def find(self, name: Any) -> Any:
        """Return the variable that a result names."""
        return self._strategy.servers.variables[name]

    def refer(self, thing: Any) -> Reduced:
        """Name a variable or a resource.

        Raises:
            ContextError: If it is a variable of another strategy, or of none.
            TypeError: If it is something else that asks for a name.
        """
        if isinstance(thing, ServedVariable) and thing.strategy is self._strategy:
            options = VariableOptions(thing.name, thing.trainable, thing.aggregation)
            return variable_in_closure, (thing.spec, options)
        if isinstance(thing, PerWorkerIterator):
            thing.require_owner(self._strategy)
            return iterator_in_closure, (thing.number, thing.factory, thing.num_splits, thing.birth)
        if isinstance(thing, PerWorkerResource):
            thing.require_owner(self._strategy)
            return resource_in_closure, (thing.number, thing.factory)
        if isinstance(thing, Variable):
            owner = "no strategy" if thing.strategy is None else repr(thing.strategy)
            raise ContextError(
                f"Variable {thing.name!r} belongs to {owner}, so a closure of {self._strategy!r} "
                "cannot use it. Make it in that strategy's scope: `with strategy.scope(): "
                "ar.Variable(...)`."
            )
        raise TypeError(f"{thing!r} is of no use in a closure.")

    def reduced(self, thing: Any) -> Reduced | None:
        """Send optimizers as what they are made of; the strategy itself cannot travel."""
        if thing is self._strategy or isinstance(thing, ClosureEngine):
            raise ContextError(
                f"{thing!r} cannot be used in a closure: it lives in the program. Pass the closure "
                "what it needs of it: variables, optimizers, numbers."
            )
        if not isinstance(thing, Optimizer):
            return None
        iterations = thing.settings.iterations
        if not isinstance(iterations, ServedVariable):
            raise ContextError(
                f"{type(thing).__name__} {iterations.name!r} was made outside the scope of "
                f"{self._strategy!r}. Make optimizers that closures use in it: "
                "`with strategy.scope(): ar.optimizers.Adam(...)`."
            )
        recipe = self._recipe(thing)
        number = iterations.spec.variable_id
        data, settings = pack_in_one(recipe, self), thing.settings
        version = self._strategy.servers.know(number, settings, data)
        self.recipes[number] = version, data
        counters = iterations, settings.skipped, settings.norm
        return optimizer_in_closure, (recipe, version, *counters)

    def _recipe(self, optimizer: Optimizer) -> OptimizerRecipe:
        try:
            return recipe_of(optimizer, self._strategy._runtime.variable_table.all())
        except TypeError as error:
            self.refused = error
            raise


def variable_in_closure(spec: Spec, options: VariableOptions) -> ServedVariable:
    """Return what a closure has of a variable."""
    return new_served(spec, options)


def optimizer_in_closure(
    recipe: OptimizerRecipe,
    version: int,
    iterations: ServedVariable,
    skipped: Variable | None,
    norm: Variable | None,
) -> Optimizer:
    """Return what a closure has of an optimizer."""
    side: Any = CARRIER.get()
    side.recipes[iterations.spec.variable_id] = version
    return recipe.rebuilt(iterations, skipped, norm)


def resource_in_closure(number: int, factory: Packed) -> Any:
    """Return what the worker that unpickles keeps of a resource."""
    side: Any = CARRIER.get()
    return side.resource(number, factory)


def iterator_in_closure(number: int, factory: Packed, num_splits: int, birth: int) -> Any:
    """Return what the closure that unpickles has of an iterator."""
    side: Any = CARRIER.get()
    return side.iterator(number, factory, num_splits, birth)


def pack_call(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], side: HomeSide, what: str
) -> Packed:
    """Pickle a function with its arguments, or something else that goes to workers.

    What calls often have in common goes first: the function, variables, optimizers, resources.

    Raises:
        TypeError: If something cannot be pickled; names it.
        ContextError: If a variable belongs to another strategy.
    """
    from ...devices.processes import dumps_pair, put_apart

    buffers: list[object] = []
    named = [each for each in (*args, *kwargs.values()) if isinstance(each, NAMED)]
    try:
        first, data = dumps_pair((fn, named), (args, kwargs), side, put_apart(buffers))
        return Packed(data, tuple(buffers), side.share(first))
    except Exception as error:
        from ...devices.processes import obstacle

        if isinstance(error, ContextError | ValueError) or error is side.refused:
            raise
        things = {"the function": fn, "args": args, "kwargs": kwargs}
        where, reason = obstacle(things, side, error)
        if isinstance(reason, ContextError | ValueError):
            raise reason from None
        raise TypeError(
            f"{what} cannot be sent to a worker: {where}. Make it in the closure, or with "
            "coordinator.create_per_worker_resource(fn)."
        ) from error


class PerWorkerResource:
    """Something that each worker makes for itself, at the first use in a closure.

    `ClusterCoordinator.create_per_worker_resource` gives it; as an argument of a closure it is what
    the function has made on that worker.
    """

    def __init__(self, strategy: Any, number: int, factory: Packed, label: str) -> None:
        self._strategy = strategy
        self._label = label
        self.number = number
        self.factory = factory
        strategy.servers.resources.release_after(self)

    def require_owner(self, strategy: Any) -> None:
        """Check that a strategy made it.

        Raises:
            ContextError: If another one did.
        """
        if strategy is not self._strategy:
            raise ContextError(
                f"{self!r} belongs to {self._strategy!r}, not to {strategy!r}. Make it with the "
                "coordinator that uses it."
            )

    def __reduce__(self) -> Reduced:
        carrier = CARRIER.get()
        if carrier is None:
            raise TypeError(f"{self!r} cannot be pickled. Pass it to `coordinator.schedule`.")
        return carrier.refer(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._label}>"


NAMED = (ServedVariable, Optimizer, PerWorkerResource)
"""What closures have in common as arguments."""


@final
class PerWorkerDataset(PerWorkerResource):
    """A dataset that each worker makes for itself; `iter` gives an iterator of each worker's.

    Pass the iterator to closures; `next(iterator)` there gives the next element of the worker's
    part, and when that is at its end of others' parts: each element is for one closure, which gets
    the same if it runs again. When nothing is left for a closure, `next` raises StopIteration.

    Attributes:
        make: Makes the dataset on a worker.
    """

    make: DatasetOf

    @property
    def element_spec(self) -> Any:
        """Shape and dtype of the elements: a structure of `ArraySpec`, with None for the batch.

        Made from the first element of the first worker's part, here; or the dataset's own.

        Raises:
            ValueError: If that part is empty.
            Exception: What the dataset raises.
        """
        return self.make.element_spec()

    def __iter__(self) -> Iterator[Any]:
        strategy = self._strategy
        make = _IteratorOf(self.make)
        factory = pack_call(make, (), {}, HomeSide(strategy), "The dataset")
        number = strategy.servers.resources.new_number()
        iterator = PerWorkerIterator(strategy, number, factory, f"of {self._label}")
        iterator.num_splits, iterator.birth = self.make.num_splits, strategy.servers.birth
        return iterator


@final
class PerWorkerIterator(PerWorkerResource):
    """An iterator of each worker, for `next(iterator)` in closures.

    Attributes:
        num_splits: Of its dataset.
        birth: Which server knows what was taken.
    """

    num_splits: int
    birth: int

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise ContextError(
            f"{self!r} is on the workers. Pass it to `await coordinator.schedule(fn, "
            "(iterator,))` and call next(iterator) there."
        )


@final
class DatasetOf:
    """Makes a dataset on a worker.

    Args:
        dataset_fn: Returns an iterable.
        takes_context: Whether it takes an InputContext.
        num_splits: How many parts there are: one for each worker there was when it was made.
    """

    def __init__(self, dataset_fn: Any, takes_context: bool, num_splits: int) -> None:
        self._dataset_fn = dataset_fn
        self._takes_context = takes_context
        self.num_splits = num_splits

    def part(self, split: int) -> Any:
        """Make a part of it."""
        if not self._takes_context:
            return self._dataset_fn()
        return self._dataset_fn(InputContext(self.num_splits, split, self.num_splits))

    def __call__(self) -> Any:
        """Make the part of this worker."""
        closure: Any = CLOSURE.get()
        index = closure.worker_index()
        if self._takes_context and index >= self.num_splits:
            raise ContextError(
                f"Worker {index} came after the dataset was made, in {self.num_splits} parts, and "
                "has none. Pass `iter(dataset)` to closures, whose elements all workers share, or "
                "make the dataset anew."
            )
        return self.part(index)

    def element_spec(self) -> Any:
        """Describe the elements of the first part."""
        part = self.part(0)
        known = getattr(part, "element_spec", None)
        if known is not None:
            return known
        for element in part:
            return spec_of(element)
        raise ValueError("The first part of the dataset is empty, so its elements are not known.")


@final
class _IteratorOf:
    """Makes a reader of splits on a worker."""

    def __init__(self, make: DatasetOf) -> None:
        self._make = make

    def __call__(self) -> SplitReader:
        return SplitReader(self._read)

    def _read(self, split: int) -> Any:
        return iter(self._make.part(split))
