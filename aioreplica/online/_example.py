"""Examples: what they are made of, how they are checked, stacked and stored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np

from ..checkpoint import DTYPES, dtype_of, tensors_header
from ..tree import Array, DType, Tree, decode, encode, flatten, unflatten

_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}
_MAX_INT = 2**63
MAX_DEPTH = 32

ALIGNMENT = 64
MAX_HEADER_BYTES = 64 * 1024 * 1024
_NAMES = {name: code for name, code in DTYPES.items() if not name.startswith("complex")}
_NAMES["complex64"] = "C64"
_DTYPES = {label: name for name, label in _NAMES.items()}


@final
class ExampleSpec:
    """Checks and converts what clients send, by an example of how it should look.

    Calling it gives the example with the template's structure, shapes and dtypes: lists of numbers
    become arrays. Use it as `validate` of an OnlineLearner, and for inputs of predictions.

    Args:
        template: Dicts, lists and tuples of arrays and numbers. Values do not matter.
        finite: Whether NaN and infinity are refused.

    Raises:
        TypeError: If the template has something else in it.
        ValueError: If it has nothing in it.

    Example:
        >>> import numpy as np
        >>> spec = ExampleSpec({"x": np.zeros(2, np.float32), "y": 0})
        >>> spec({"x": [0.5, 2], "y": 1})
        {'x': array([0.5, 2. ], dtype=float32), 'y': 1}
        >>> spec({"x": [0.5], "y": 1})
        Traceback (most recent call last):
            ...
        ValueError: ['x'] has shape (1,), expected (2,).
    """

    __slots__ = ("_finite", "_template")

    def __init__(self, template: object, *, finite: bool = True) -> None:
        self._template = as_example(template)
        self._finite = finite

    def __call__(self, example: object) -> Tree:
        """Return the example as the template has it.

        Raises:
            ValueError: If it does not fit; says where and why.
        """
        return self._fit(self._template, example, "")

    def _fit(self, wanted: object, given: object, where: str) -> object:
        if isinstance(wanted, dict):
            if not isinstance(given, Mapping):
                raise ValueError(f"{_place(where)} is {_kind(given)}, expected an object.")
            if given.keys() != wanted.keys():
                raise ValueError(
                    f"{_place(where)} has the keys {sorted(map(str, given))}, expected "
                    f"{sorted(wanted)}."
                )
            return {
                name: self._fit(part, given[name], f"{where}[{name!r}]")
                for name, part in wanted.items()
            }
        if isinstance(wanted, (list, tuple)):
            if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
                raise ValueError(
                    f"{_place(where)} is {_kind(given)}, expected {len(wanted)} entries."
                )
            parts = [self._fit(part, given[i], f"{where}[{i}]") for i, part in enumerate(wanted)]
            return tuple(parts) if isinstance(wanted, tuple) else parts
        if isinstance(wanted, np.ndarray):
            return self._fit_array(wanted, given, where)
        return self._fit_number(type(wanted), given, where)

    def _fit_array(self, wanted: Array, given: object, where: str) -> Array:
        try:
            array = np.asarray(given)
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError(
                f"{_place(where)} is not an array of shape {wanted.shape}: its rows differ in "
                "length, or it holds something other than numbers."
            ) from None
        if array.dtype.kind not in "biufc" and can_store(array.dtype) is False:
            raise ValueError(f"{_place(where)} holds something else than numbers.")
        if array.shape != wanted.shape:
            raise ValueError(f"{_place(where)} has shape {array.shape}, expected {wanted.shape}.")
        dtype = wanted.dtype
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ValueError(f"{_place(where)} holds {array.dtype}, expected {dtype}.")
        with np.errstate(over="ignore"):
            made: Array = array.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(made, array):
            limits = np.iinfo(dtype)
            raise ValueError(
                f"{_place(where)} holds numbers outside {limits.min} to {limits.max} of {dtype}."
            )
        if self._finite and dtype.kind in "fc" and not np.isfinite(made).all():
            raise ValueError(f"{_place(where)} holds NaN, infinity or numbers beyond {dtype}.")
        made.flags.writeable = False
        return made

    def _fit_number(self, wanted: Any, given: object, where: str) -> object:
        value: Any = given.item() if isinstance(given, np.generic) else given
        if wanted is float and type(value) is int and abs(value) < _MAX_INT:
            value = float(value)
        if type(value) is not wanted:
            raise ValueError(f"{_place(where)} is {_kind(given)}, expected {wanted.__name__}.")
        if wanted is int and not -_MAX_INT <= value < _MAX_INT:
            raise ValueError(f"{_place(where)} is {_kind(given)}, which no int64 can hold.")
        if self._finite and wanted is float and not math.isfinite(value):
            raise ValueError(f"{_place(where)} is {value}, expected a finite number.")
        return value

    def __repr__(self) -> str:
        return f"<ExampleSpec {_described(self._template)}>"


def _place(where: str) -> str:
    return where or "The example"


def _kind(given: object) -> str:
    text = repr(given)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(given).__name__})"


def _described(template: object) -> str:
    leaves, spec = flatten(template)
    named = [
        f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        for x in leaves
    ]
    return str(unflatten(spec, named)).replace("'", "")


def as_example(given: object) -> Tree:
    """Return an example as the learner keeps it: plain containers, read-only arrays, numbers.

    It is the same whether it stays in memory or comes back from the journal. Arrays are copied,
    unless they are read-only and own their memory.

    Raises:
        TypeError: If there is something else in it.
        ValueError: If there is nothing in it, it is nested too deeply, or a number is too large.
    """
    found = _plain(given, 0)
    if not flatten(found)[0]:
        raise ValueError(f"An example needs at least one array or number, got {given!r}.")
    return found


def _plain(node: Any, depth: int) -> Tree:
    kind = type(node)
    if kind in _NUMBERS:
        if kind is int and not -_MAX_INT <= node < _MAX_INT:
            raise ValueError(f"An example holds the number {node}, which no int64 can hold.")
        return node
    if depth > MAX_DEPTH:
        raise ValueError(f"An example is nested at most {MAX_DEPTH} levels deep.")
    if kind is list or kind is tuple:
        return kind(_plain(child, depth + 1) for child in node)
    if isinstance(node, (np.ndarray, np.generic)):
        array = None if isinstance(node, np.ma.MaskedArray) else _plain_array(np.asarray(node))
        if array is not None:
            return array
    elif kind is dict or isinstance(node, Mapping):
        for name in node:
            if not isinstance(name, str) or name.startswith("$"):
                raise TypeError(
                    f"Keys in an example are text that does not begin with $, got {name!r}."
                )
        return {str(name): _plain(node[name], depth + 1) for name in sorted(node)}
    raise TypeError(
        f"An example is made of dicts, lists and tuples of NumPy arrays and numbers, got "
        f"{_kind(node)}. Convert it in `validate`, see ar.online.ExampleSpec."
    )


def _plain_array(array: Array) -> Array | None:
    """Return a read-only array in C order and native bytes; None if it cannot be stored."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not can_store(array.dtype):
        return None
    flags = array.flags
    if flags.writeable or not flags.owndata or not flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


# ---- storing -----------------------------------------------------------------------------


def pack_example(example: object, spec_version: int = 1) -> bytes:
    """Return an example (of `as_example`) as bytes; equal examples give equal bytes."""
    arrays: dict[str, Array] = {}

    def leaf(array: Array) -> dict[str, str]:
        name = str(len(arrays))
        arrays[name] = array
        return {"$array": name}

    metadata = {"tree": json.dumps(encode(example, leaf), separators=(",", ":"))}
    if spec_version > 1:
        metadata["spec_version"] = str(spec_version)
    return b"".join(dump_tensors(metadata, arrays))


def spec_version_of(data: bytes) -> int:
    """Return the spec version that was packed with an example; ValueError if that is none."""
    return int(load_tensors(memoryview(data))[0].get("spec_version", 1))


def unpack_example(data: bytes) -> Tree:
    """Return the example that was packed.

    Raises:
        ValueError: If the bytes are not a packed example.
    """
    metadata, arrays, _ = load_tensors(memoryview(data))
    try:
        return decode(json.loads(metadata["tree"]), arrays)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the row cannot be read: {type(error).__name__}: {error}") from None


# ---- stacking ----------------------------------------------------------------------------


def stack_examples(examples: Sequence[object]) -> Tree:
    """Stack examples into a batch, leaf by leaf.

    Raises:
        ValueError: If their structures or shapes differ.

    Shapes:
        A leaf of shape (*dims) becomes (num_examples, *dims); of a number, (num_examples,).

    Example:
        >>> stack_examples([{"x": 1.0}, {"x": 2.0}])
        {'x': array([1., 2.])}
    """
    first, spec = flatten(examples[0])
    columns: list[list[object]] = [[leaf] for leaf in first]
    for example in examples[1:]:
        leaves, own = flatten(example)
        if own != spec:
            raise ValueError(
                f"An example has the structure {own}, another one of its batch {spec}. Refuse "
                "what does not fit with `validate`."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return unflatten(spec, [_stacked(column) for column in columns])


def _stacked(column: list[Any]) -> Array:
    if any(isinstance(leaf, np.ndarray) for leaf in column):
        return np.stack(column)
    return np.array(column, np.result_type(*{_NUMBERS[type(leaf)] for leaf in column}))


# ---- arrays as bytes -----------------------------------------------------------------------
#
# The bytes are those of a safetensors file, whose header is padded to a multiple of 64 so that
# arrays in a mapped file are aligned, with the largest items first. What is read is distrusted.


@lru_cache(maxsize=256)
def can_store(dtype: DType) -> bool:
    """Tell whether arrays of a dtype can be stored."""
    return dtype.name in _NAMES and dtype.isnative


def dump_tensors(
    metadata: Mapping[str, str], arrays: Mapping[str, Array]
) -> list[bytes | memoryview]:
    """Return the parts of a file: the header, then C-contiguous arrays in the order they follow.

    Raises:
        TypeError: If a dtype cannot be stored.
        ValueError: If an array has a name that the format keeps for itself.
    """
    if "__metadata__" in arrays:
        raise ValueError("No array can be called '__metadata__': the format keeps that name.")
    for name, array in arrays.items():
        if not can_store(array.dtype):
            raise TypeError(f"{name!r} has dtype {array.dtype}, stored are {', '.join(_NAMES)}.")
    ordered = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    rows: list[tuple[str, Sequence[int], str, int]] = []
    parts: list[bytes | memoryview] = []
    for name in ordered:
        array = np.ascontiguousarray(arrays[name])
        rows.append((name, arrays[name].shape, _NAMES[array.dtype.name], array.nbytes))
        parts.append(array.reshape(-1).view(np.uint8).data)
    return [tensors_header(rows, metadata, ALIGNMENT), *parts]


def load_tensors(data: memoryview) -> tuple[dict[str, str], dict[str, Array], int]:
    """Return metadata, read-only views of the arrays, and where the arrays begin.

    Raises:
        ValueError: If the bytes are not those of `dump_tensors`; says what is wrong.
    """
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size
    if len(data) < 8 or size > MAX_HEADER_BYTES or begin > len(data):
        raise ValueError(f"{len(data)} bytes cannot hold a header of {size}")
    try:
        entries = json.loads(bytes(data[8:begin]))
        metadata = {str(k): str(v) for k, v in entries.pop("__metadata__", {}).items()}
        arrays = {str(name): _view(data, begin, entry) for name, entry in entries.items()}
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"the header cannot be read: {type(error).__name__}: {error}") from None
    return metadata, arrays, begin


def _view(data: memoryview, begin: int, entry: Mapping[str, Any]) -> Array:
    name, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    dtype = dtype_of(name)
    numbers = (*shape, start, end)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} are not sizes")
    if math.prod(shape) * dtype.itemsize != end - start or begin + end > len(data):
        raise ValueError(f"an array of shape {shape} and {dtype} is not at {start} to {end}")
    found: Array = np.frombuffer(data[begin + start : begin + end], dtype).reshape(shape)
    if found.flags.writeable:
        found.flags.writeable = False
    return found
