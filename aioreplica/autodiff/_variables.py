"""Gradients of a loss with respect to the variables it reads.

While the loss runs, a `VariableReads` stands in `context.OVERRIDES`: `variable.value` asks it, gets
a traced array, and has been recorded. One pass gives the value, the list of variables and the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..context import CLOSURE, OVERRIDES, PLACE, STAGE, Place
from ..devices.backends import Array, backend_of
from ..errors import ContextError
from ..tree import Tree
from ..values import IndexedSlices, Variable, fitting, is_floating, local_value
from ._adapter import Watch
from ._bags import Bags, Combiner
from ._value_and_grad import find_adapter

Pairs = list[tuple[Array | IndexedSlices | None, Variable]]


T = TypeVar("T")


@final
class ModelVariables(tuple[Variable, ...]):
    """The variables of a model written in one library; a tuple that knows which.

    `minimize(loss, model.variables)` differentiates with that library unless it names another.
    Sums of two such tuples of one library are such tuples too.

    Attributes:
        backend: Name of the library's adapter.
    """

    backend: str

    def __new__(cls, variables: Sequence[Variable], backend: str) -> ModelVariables:
        """Make a tuple of variables."""
        made = super().__new__(cls, variables)
        made.backend = backend
        return made

    def __getnewargs__(self) -> tuple[object, ...]:
        """Return what `__new__` takes, as a pickle needs it."""
        return tuple(self), self.backend

    def __add__(self, other: Any) -> Any:
        joined = tuple(self) + tuple(other)
        if isinstance(other, ModelVariables) and other.backend == self.backend:
            return ModelVariables(joined, self.backend)
        return joined


@final
class VariableReads:
    """Gives a loss traced values for its variables, and remembers which it read.

    Args:
        chosen: The variables to trace; None traces every trainable floating-point one.

    Invariants:
        * A variable is traced once, and so are the rows of each lookup.
        * Other variables are constants of the library that differentiates.
    """

    __slots__ = ("_chosen", "_constant", "_constants", "_held", "_outer", "_traced",
                 "_watch", "_watched")  # fmt: skip

    def __init__(self, chosen: Sequence[Variable] | None = None) -> None:
        self._chosen = None if chosen is None else frozenset(chosen)
        self._traced: dict[Variable, Array] = {}
        self._constants: dict[Variable, Array] = {}
        self._watched: list[tuple[Variable, npt.NDArray[np.intp] | Bags | None]] = []
        self._held: dict[object, tuple[object, Callable[[], object]]] = {}
        self._watch: Watch | None = None
        self._constant: Watch | None = None
        self._outer: Any = None  # Any: whatever stood in for variables before

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The traced variables, in order of their first read."""
        return tuple(dict.fromkeys(variable for variable, _ in self._watched))

    def trace(
        self, loss: Callable[[], object], watch: Watch, constant: Watch | None = None
    ) -> object:
        """Run a loss with this object standing in for its variables.

        Args:
            loss: Takes no arguments.
            watch: Traces an array.
            constant: Makes an array one of the library, without a gradient; None leaves it.
        """
        self._watch, self._constant, self._outer = watch, constant, OVERRIDES.get()
        token = OVERRIDES.set(self)
        try:
            return loss()
        finally:
            OVERRIDES.reset(token)

    def read(self, variable: Variable) -> Array:
        """Return what `variable.value` is inside the loss."""
        if variable in self._traced:
            return self._traced[variable]
        if variable in self._constants:
            return self._constants[variable]
        value = local_value(variable) if self._outer is None else self._outer.read(variable)
        if self._watch is None or not self._is_chosen(variable):
            if self._constant is not None:
                value = self._constants[variable] = self._constant(value)
            return value
        self._traced[variable] = traced = self._watch(value)
        self._watched.append((variable, None))
        return traced

    def read_rows(self, variable: Variable, indices: npt.NDArray[np.intp]) -> Array:
        """Return some rows of a variable; their gradient will be that of these rows only."""
        if self._outer is None:
            rows = _local_rows(variable, indices)
        else:
            rows = self._outer.read_rows(variable, indices)
        if self._watch is None or not self._is_chosen(variable):
            return rows if self._constant is None else self._constant(rows)
        traced = self._watch(rows)
        self._watched.append((variable, indices))
        return traced

    def read_bags(self, variable: Variable, bags: Bags) -> Array:
        """Return combined rows of a variable; their gradient will be that of these rows only."""
        if self._outer is None:
            found = bags.combined(_local_rows(variable, bags.indices))
        else:
            found = self._outer.read_bags(variable, bags)
        if self._watch is None or not self._is_chosen(variable):
            return found if self._constant is None else self._constant(found)
        traced = self._watch(found)
        self._watched.append((variable, bags))
        return traced

    def hold(self, owner: object, take: Callable[[], tuple[T, Callable[[], object]]]) -> T:
        """Return what `owner` holds for this loss; the first time it takes that.

        Args:
            owner: A model.
            take: Returns what is held until the gradients are computed, and what gives it back.
        """
        held = self._held.get(owner)
        if held is None:
            held = self._held[owner] = take()
        return held[0]  # type: ignore[return-value]  # each owner takes one kind

    def release(self) -> None:
        """Give back what models hold, as the gradients are there."""
        while self._held:
            self._held.popitem()[1][1]()

    def gradients(self, watched: Sequence[Array]) -> dict[Variable, Array | IndexedSlices]:
        """Return a gradient per variable, from one for each array in order of watching.

        Raises:
            TypeError: If rows of a lookup have a gradient that is differentiated again.
        """
        found: dict[Variable, list[Array]] = {variable: [] for variable in self.variables}
        for (variable, how), gradient in zip(self._watched, watched, strict=True):
            part = gradient if how is None else _slices(variable, how, gradient)
            found[variable].append(part)
        return {variable: _joined(parts) for variable, parts in found.items()}

    def _is_chosen(self, variable: Variable) -> bool:
        if self._chosen is not None:
            return variable in self._chosen
        return variable.trainable and is_floating(variable.dtype)

    def __repr__(self) -> str:
        return f"<VariableReads | {len(self.variables)} traced>"


def differentiate_variables(
    loss: Callable[[], object],
    variables: Iterable[Variable] | None = None,
    backend: str = "autograd",
    *,
    has_aux: bool = False,
) -> tuple[Tree, Pairs]:
    """Run a loss once and return its value and its gradients.

    Args:
        loss: Takes no arguments and returns a scalar or a `Weighted(total, weight)`; what it reads
            through `variable.value` counts.
        variables: Those to differentiate with respect to; None means the trainable
            floating-point ones that the loss reads. Others are constants of the backend's library.
        backend: The library that differentiates: "autograd", "torch" or "jax". The variables of a
            `torch_module` or of `jax_variables` bring theirs, in place of the default.
        has_aux: Whether the loss returns a pair `(loss, aux)`; `aux` is any pytree, and is not
            differentiated.

    Returns:
        The value of the loss, or `(value, aux)`; and `(gradient, variable)` pairs: in the order of
        `variables`, with None as the gradient of one that was not read; or in the order of reading.
        A variable of which only rows were looked up has IndexedSlices.

    Raises:
        TypeError: If a variable is none or not of floating point, or the loss returns no number, or
            no pair with `has_aux`.
        ValueError: If the loss does not return a scalar, or `backend` is unknown.
        ImportError: If the library is not installed.

    Example:
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> value, pairs = differentiate_variables(lambda: w.value**2)
        >>> print(value, pairs[0][0], pairs[0][1].name)
        9.0 6.0 w
    """
    if backend == "autograd" and isinstance(variables, ModelVariables):
        backend = variables.backend
    if variables is not None:
        variables = _checked_variables(variables)
    reads, adapter = VariableReads(variables), find_adapter(backend)
    try:
        value, gradients = adapter.differentiate(
            lambda watch: reads.trace(loss, watch, adapter.constant), has_aux=has_aux
        )
    finally:
        reads.release()
    found = reads.gradients(gradients)
    chosen = found if variables is None else variables
    return value, [(found.get(variable), variable) for variable in chosen]


def _checked_variables(variables: Iterable[Variable]) -> tuple[Variable, ...]:
    """Return the variables as a tuple: an iterator gives them once."""
    if isinstance(variables, Variable):  # an array, which gives its rows
        raise TypeError(
            f"variables must be a list of variables, got the variable {variables.name!r}. Put it "
            "into a list."
        )
    found = tuple(variables)
    # One of each type: `Variable` is an ABC, which takes long to ask, and a model has hundreds.
    for variable in {type(each): each for each in found}.values():
        if not isinstance(variable, Variable):
            raise TypeError(
                f"variables must hold variables, got {variable!r} ({type(variable).__name__})."
            )
    return found


def embedding_lookup(variable: Variable, indices: Array) -> Array:
    """Return rows of a variable; in a loss their gradient is an `IndexedSlices`.

    The table itself is neither copied nor traced, so a lookup costs what its rows cost, in each of
    the libraries. A loss that reads `variable.value` as well has a dense gradient of both.

    Args:
        variable: The table, such as one embedding per row.
        indices: Integers, of any shape and any library; one may come more than once.

    Returns:
        In a loss an array of the library that differentiates, elsewhere a NumPy array.

    Raises:
        TypeError: If it is not a variable, or the indices are not integers.
        ValueError: If an index is negative or too large.

    Shapes:
        variable: `(num_rows, *row)`. Result: `(*indices.shape, *row)`.

    Example:
        >>> import autograd.numpy as np
        >>> from aioreplica import Variable
        >>> table = Variable(np.ones((4, 2)), name="table")
        >>> loss = lambda: np.sum(embedding_lookup(table, [3, 0, 3]))
        >>> _, [(gradient, _)] = differentiate_variables(loss)
        >>> gradient.indices
        array([3, 0, 3])

    Source:
        tf.nn.embedding_lookup.
    """
    rows = _checked_indices(variable, indices)
    reads = OVERRIDES.get()
    return _local_rows(variable, rows) if reads is None else reads.read_rows(variable, rows)


def embedding_lookup_sparse(
    variable: Variable,
    indices: Array,
    segments: Array,
    weights: Array | None = None,
    *,
    num_segments: int | None = None,
    combiner: Combiner = "mean",
) -> Array:
    """Return combined rows of a variable: for each segment those of its indices, as one row.

    For examples that have several values of a feature, or none. In a loss their gradient is an
    `IndexedSlices`, as that of `embedding_lookup`. Each row is pulled once, if the table lives on
    parameter servers.

    Args:
        variable: The table.
        indices: Integers: rows of the table, one after the other.
        segments: For each of them, which example it belongs to; in any order.
        weights: A factor for each of them; None for ones. They are not differentiated.
        num_segments: How many examples there are; None for one more than the last in `segments`.
            One without an index gets zeros.
        combiner: "sum" adds up rows times weights, "mean" divides that by the sum of the weights,
            "sqrtn" by the root of the sum of their squares.

    Returns:
        As `embedding_lookup`.

    Raises:
        TypeError: If it is not a variable, indices or segments are not integers, or weights not
            numbers.
        ValueError: If an index or a segment is out of range, lengths differ, the combiner is
            unknown, or it would divide by 0.

    Shapes:
        variable: `(num_rows, *row)`. indices, segments, weights: `(n,)`. Result: `(num_segments,
        *row)`.

    Determinism:
        Rows are added in order of the indices.

    Example:
        >>> from aioreplica import Variable
        >>> table = Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="table")
        >>> embedding_lookup_sparse(table, [0, 2, 1], [0, 0, 2])
        array([[3., 4.],
               [0., 0.],
               [3., 4.]])

    Source:
        tf.nn.embedding_lookup_sparse.
    """
    rows = _checked_indices(variable, indices)
    bags = Bags(variable, rows, segments, weights, num_segments, combiner)
    reads = OVERRIDES.get()
    if reads is not None:
        return reads.read_bags(variable, bags)
    return bags.combined(_local_rows(variable, rows))


def _checked_indices(variable: Variable, indices: Array) -> npt.NDArray[np.intp]:
    if not isinstance(variable, Variable):
        raise TypeError(
            f"embedding_lookup takes a variable, got {type(variable).__name__}. Index an array "
            "directly: table[indices]."
        )
    found = np.asarray(backend_of(indices).get(indices))
    if found.size == 0 and found.dtype.kind == "f" and isinstance(indices, (list, tuple)):
        found = found.astype(np.intp)  # an empty list has no dtype of its own
    if found.dtype.kind not in "iu":
        raise TypeError(f"embedding_lookup takes integer indices, got dtype {found.dtype}.")
    if variable.shape == ():
        raise ValueError(f"Variable {variable.name!r} is a scalar and has no rows.")
    num_rows = variable.shape[0]
    if found.size and not (int(found.min()) >= 0 and int(found.max()) < num_rows):
        low, high = int(found.min()), int(found.max())
        raise ValueError(
            f"Index {low if low < 0 else high} is out of range: variable {variable.name!r} has "
            f"rows 0 to {num_rows - 1}."
        )
    return found.astype(np.intp)  # a copy: the gradient needs it later


def _local_rows(variable: Variable, indices: npt.NDArray[np.intp]) -> Array:
    closure = CLOSURE.get()  # there the table may live on parameter servers
    return local_value(variable)[indices] if closure is None else closure.rows(variable, indices)


def _slices(variable: Variable, how: npt.NDArray[np.intp] | Bags, gradient: Array) -> IndexedSlices:
    if not isinstance(gradient, (np.ndarray, np.generic)):
        raise TypeError(
            f"The rows of {variable.name!r} that embedding_lookup gave have a gradient that is "
            "differentiated again, which IndexedSlices cannot carry. Index `variable.value` there."
        )
    if isinstance(how, Bags):
        return how.slices(np.asarray(gradient))
    rows = gradient.reshape(how.size, *variable.shape[1:])
    return IndexedSlices(rows, how.reshape(-1), variable.shape)


def _joined(parts: Sequence[Array | IndexedSlices]) -> Array | IndexedSlices:
    """Add up the gradients of the reads of one variable."""
    if len(parts) == 1:
        return parts[0]
    slices = [part for part in parts if isinstance(part, IndexedSlices)]
    dense = [part for part in parts if not isinstance(part, IndexedSlices)]
    values = np.concatenate([part.values for part in slices])
    indices = np.concatenate([part.indices for part in slices])
    joined = IndexedSlices(values, indices, slices[0].dense_shape)
    return dense[0] + joined.to_dense() if dense else joined


def new_state(array: npt.NDArray[Any], name: str) -> Variable:
    """Make a variable that replicas write for themselves.

    Read elsewhere it is the mean of what they hold; of what has no mean, the first replica's.
    """
    return Variable(
        array, name=name, trainable=False, synchronization="on_read",
        aggregation="mean" if array.dtype.kind == "f" else "only_first_replica",
    )  # fmt: skip


def write_state(values: Mapping[Variable, npt.NDArray[Any]]) -> None:
    """Write variables, as one write: in a replica its components, elsewhere all of them.

    Raises:
        ValueError: If a shape or dtype does not fit.
        ContextError: If another strategy is in charge, in an update function, or if something
            changes in a stage of a pipeline, which has one replica and may be run twice.

    Cancellation:
        CancelledError once the run is aborted, before anything is written.
    """
    if not values:
        return
    place = PLACE.get()
    if STAGE.get() is not None:
        _require_unchanged(values)
    if place.staging is not None:
        raise ContextError(
            f"State of a model was written in {place.describe()}, where one variable is updated. "
            "Call the model in the step, or in evaluation mode."
        )
    new = {}
    for variable, array in values.items():
        variable._require_owner_in_charge(place)
        new[variable] = fitting(variable, array)
    if place.replica is not None:
        place.replica.check_running()
    while True:  # replicas write from several threads
        bases = {variable: variable.components for variable in new}
        changes = {v: _changed(place, bases[v], array) for v, array in new.items()}
        if next(iter(new)).store.write(changes, bases, is_local=place.replica is not None):
            return


def _require_unchanged(values: Mapping[Variable, npt.NDArray[Any]]) -> None:
    for variable, array in values.items():
        if not np.array_equal(array, local_value(variable)):
            raise ContextError(
                f"{variable.name!r}, state of a model, was changed in a stage of ar.pipeline. A "
                "stage is run on one replica, twice unless it is the last, so what it writes is "
                "not what the whole model would. Call the model in evaluation mode, or use layers "
                "without state: LayerNorm or GroupNorm instead of BatchNorm."
            )


def require_outside_replicas(what: str) -> None:
    """Check that code runs outside every replica.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.is_in_step:
        raise ContextError(
            f"{what} was called in {place.describe()}, but concerns all replicas. Call it before "
            "or after the run."
        )


def _changed(
    place: Place, old: tuple[npt.NDArray[Any], ...], array: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], ...]:
    """Return the components after a write: of a mean and the like, all are what is written."""
    own = np.array(array)
    own.flags.writeable = False
    if place.replica is None or len(old) == 1:
        return (own,) * len(old)
    new = list(old)
    new[place.replica.local_replica_id] = own
    return tuple(new)
