"""Distributed values: one value per replica, or the same one on each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final, overload

from numpy.lib.mixins import NDArrayOperatorsMixin

from ..tree import register_node
from ._array_like import ArrayLike

T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V_co = TypeVarWithDefault("V_co", covariant=True, default=Any)
else:
    V_co = TypeVar("V_co", covariant=True)  # Python 3.13 has defaults


class DistributedValues(NDArrayOperatorsMixin, Sequence[V_co]):
    """A sequence with one value per replica of a sync group; a pytree node.

    Args:
        values: One per replica.
        devices: Their names, for `repr`; values that a strategy made have them.

    Shapes:
        `len(value)` is the number of local replicas; the values may be any pytrees.
    """

    __slots__ = ("_devices", "_values")

    def __init__(self, values: Iterable[V_co], *, devices: Sequence[str] | None = None) -> None:
        is_one = isinstance(values, (str, bytes, Mapping, Set, ArrayLike))
        if is_one or not isinstance(values, Iterable):
            raise TypeError(
                f"{type(self).__name__} needs a sequence with one value per replica, "
                f"got {values!r}. Wrap a single value in a list."
            )
        self._values = tuple(values)
        if not self._values:
            raise ValueError(f"{type(self).__name__} needs at least one value, got none.")
        self._devices = devices

    @property
    def values(self) -> tuple[V_co, ...]:
        """The components, in replica order."""
        return self._values

    @property
    @abstractmethod
    def is_mirrored(self) -> bool:
        """True if all components are meant to be equal."""

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> V_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[V_co, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    # Arithmetic is refused with a text of our own; equality stays that of objects.
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]  # as above
    __ne__ = object.__ne__  # pyright: ignore[reportAssignmentType]  # as above
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a mixin sets None

    def __repr__(self) -> str:
        parts = zip(self._devices or range(len(self)), self._values, strict=True)
        shown = ", ".join(f"{label}: {value!r}" for label, value in parts)
        return f"{type(self).__name__}({{{shown}}})"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return partial(type(self), devices=self._devices), (self._values,)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"Arithmetic ({ufunc.__name__}) on a {type(self).__name__} of {len(self)} values has "
            "no meaning outside the replicas. Compute in the step, take its `.values`, or combine "
            "them first with `await strategy.reduce(...)`."
        )

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} of {len(self)} values is not one array. Use `.values` for "
            "the components, `await strategy.reduce(...)` or `await strategy.gather(...)` to "
            "combine them, or `strategy.local_results(...)`."
        )


@final
class PerReplica(DistributedValues[V_co]):
    """One value per replica, in replica order.

    Example:
        >>> PerReplica([10, 20])
        PerReplica({0: 10, 1: 20})
        >>> PerReplica([10, 20])[1]
        20
    """

    __slots__ = ()

    @property
    def is_mirrored(self) -> bool:
        """False: the components belong to different replicas."""
        return False


@final
class Mirrored(DistributedValues[V_co]):
    """The same value on each replica.

    Example:
        >>> Mirrored(["a", "a"]).values
        ('a', 'a')
    """

    __slots__ = ()

    @property
    def is_mirrored(self) -> bool:
        """True: the components are equal."""
        return True


def new_per_replica(values: tuple[object, ...], devices: Sequence[str] | None = None) -> PerReplica:
    """Build a PerReplica from a tuple that is known to be good (the path of every merge)."""
    built = _new(PerReplica)
    built._values = values
    built._devices = devices
    return built


_new = object.__new__

register_node(
    PerReplica, lambda node: (node.values, None), lambda _, parts: PerReplica(parts), opaque=True
)
register_node(
    Mirrored, lambda node: (node.values, None), lambda _, parts: Mirrored(parts), opaque=True
)
