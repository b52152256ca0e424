"""The files of a checkpoint: safetensors headers, the manifest, checksums, what is legal.

`docs/checkpoints.md` has the format byte by byte. Everything that is read is distrusted: sizes are
compared with those of the files before memory is allocated, names are labels and never paths, and
nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np

from ..errors import CheckpointError
from ..tree import DType, encode
from ..values import Ranges

FORMAT = "aioreplica.checkpoint"
VERSION = 3
"""Since version 2 a step has a claim, from before it was saved; in 3 tensors may be in parts."""
WHOLE_VERSION = 2
"""Version of a step whose tensors are all whole: earlier releases read it."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 512 * 1024 * 1024
MAX_DIMENSIONS = 32
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as that package takes it

STEP_FOLDER = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,17})")
DATA_FILE = re.compile(
    r"data-([0-9]{4,9})(?:-w[0-9]{3,9}(?:-[0-9a-f]{8})?)?-[0-9]{3,9}\.safetensors"
)

_PREFIX = b'{"crc32":"'
_MIDDLE = b'","manifest":'
_SUFFIX = b"}\n"
_NUM_DIGITS = 8

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Called for one entry after the other: a call keeps all other threads waiting."""
PIECE_ITEMS = 1024
_CONTAINERS = frozenset({list, dict})

DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bfloat16": "BF16",
    "float16": "F16", "float32": "F32", "float64": "F64",
    "complex64": "F32", "complex128": "F64",  # with one more axis, of length 2
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""What safetensors calls the dtypes of arrays."""

STORED_AS = {
    **DTYPES, "float8_e3m4": "U8", "float8_e4m3": "U8", "float8_e4m3b11fnuz": "U8"
}  # fmt: skip
"""What data files call the dtypes that a checkpoint can hold: safetensors has none for some."""

CHUNK_BYTES = 1024 * 1024
"""A part of a tensor is read, and checked, in pieces of so many bytes."""


class DamagedError(Exception):
    """Raised inside the package when what is stored is not what was written; says what."""


# ---- tensors -----------------------------------------------------------------------------


class TensorRecord(NamedTuple):
    """Location of one stored array.

    Attributes:
        file: Index in the list of files.
        offset: Where its bytes begin in the file.
        bytes: How many there are.
        crc32: Their checksum.
        marks: That of the first CHUNK_BYTES, of twice as many and so on, below all.
    """

    file: int
    offset: int
    bytes: int
    crc32: int
    marks: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of tensors.

    Attributes:
        name: Its name in the folder of the step.
        bytes: Its length.
        crc32: Checksum of all of it.
        header_bytes: Length of what comes before the tensors.
        header_crc32: Checksum of that.
    """

    name: str
    bytes: int
    crc32: int
    header_bytes: int
    header_crc32: int


@final
@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry of a state.

    Attributes:
        kind: "variable", "array" or "value".
        owner: Key of the variable that it belongs to (of a slot), else "".
        object: Key of the object that it is a part of (an optimizer), else "".
        part: Its name in that object.
        shape: Of each tensor of a variable or array.
        dtype: NumPy's name of it.
        synchronization: Of a variable.
        aggregation: Of a variable.
        value: Of a value: plain data, with tensors replaced by their numbers.
        tensors: One for each stored component, for an array one.
        forms: Shape and dtype of each tensor of a value.
        parts: If the one component is in several tensors, the elements of each, of the whole as a
            row: the first one and the one after the last, without gaps.
    """

    kind: str
    owner: str = ""
    object: str = ""
    part: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    synchronization: str = ""
    aggregation: str = ""
    value: Any = None
    tensors: tuple[TensorRecord, ...] = ()
    forms: tuple[tuple[tuple[int, ...], str], ...] = ()
    parts: Ranges = ()

    @property
    def num_components(self) -> int:
        """Number of arrays that are stored, in parts or not."""
        return 1 if self.parts else len(self.tensors)

    def form_of(self, index: int) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of one of the components."""
        return self.forms[index] if self.kind == "value" else (self.shape, self.dtype)

    def pieces_of(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first element of a component, and the one after the last, of each tensor.

        Args:
            index: The component.

        Returns:
            The two, and before them the number of the tensor.
        """
        if self.parts:
            for number, (begin, end) in enumerate(self.parts):
                yield number, begin, end
        else:
            yield index, 0, math.prod(self.form_of(index)[0])


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: The step it was saved as.
        sequence: Counts the saves into the directory; the newest one has the largest.
        next_steps: Number of the next step of each strategy that has variables in the state.
        files: The files of tensors.
        entries: The state, by key.
        version: Of the format.
    """

    step: int
    sequence: int
    next_steps: tuple[int, ...]
    files: tuple[FileRecord, ...]
    entries: Mapping[str, EntryRecord]
    version: int = WHOLE_VERSION


_PARTS_OF = attrgetter("parts")
_OPTIONAL = tuple(
    field.name for field in fields(EntryRecord) if field.name not in {"kind", "value"}
)


def dtype_of(name: str) -> DType:
    """Return the dtype of a name.

    Raises:
        DamagedError: If a checkpoint cannot hold it.
        CheckpointError: If the package that defines it is missing.
    """
    if name not in STORED_AS:
        raise DamagedError(f"dtype {name!r} is unknown")
    if name == "bfloat16" or name.startswith("float8"):
        try:
            import ml_dtypes
        except ModuleNotFoundError as missing:
            raise CheckpointError(
                f"The checkpoint holds {name}, which needs the ml_dtypes package. Run: "
                "pip install ml-dtypes"
            ) from missing
        if not hasattr(ml_dtypes, name):
            raise CheckpointError(
                f"The checkpoint holds {name}, which ml_dtypes {ml_dtypes.__version__} has not. "
                "Run: pip install -U ml-dtypes"
            )
        found: DType = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def item_bytes(name: str) -> int:
    """Return the bytes of one element of a dtype, also without the package that defines it."""
    if name.startswith("float8"):
        return 1
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def label_of(key: str, index: int) -> str:
    """Return the label of a tensor in its file: no other one has it, and all readers take it.

    A key may have `#`, the name of the file's metadata, and lone surrogates, which Unicode has not.
    `%` stands for itself in a key, as `%25`.

    Example:
        >>> label_of("model/0", 0), label_of("model/0", 1), label_of("a#1", 0)
        ('model/0', 'model/0#1', 'a%231')
    """
    label = "%5F_metadata__" if key == "__metadata__" else key.replace("#", "%23")
    if not label.isascii():
        label = "".join(f"%u{ord(c):04X}" if "\ud800" <= c <= "\udfff" else c for c in label)
    return f"{label}#{index}" if index else label


def tensors_header(
    tensors: Iterable[tuple[str, Sequence[int], str, int]],
    metadata: Mapping[str, str],
    alignment: int = 8,
) -> bytes:
    """Return the first bytes of a safetensors file.

    Args:
        tensors: Label, shape, dtype as the format calls it, and number of bytes of each, in the
            order they follow.
        metadata: Text for readers.
        alignment: The length is a multiple of it.
    """
    members = [f'"__metadata__":{_JSON.encode(metadata)}']
    offset = 0
    for label, shape, dtype, size in tensors:
        members.append(
            f'{_JSON.encode(label)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
            f'"data_offsets":[{offset},{offset + size}]}}'
        )
        offset += size
    text = f"{{{','.join(members)}}}".encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return len(text).to_bytes(8, "little") + text


# ---- the manifest ------------------------------------------------------------------------


Entries = Iterable[tuple[str, EntryRecord]]


def dump_manifest(manifest: Manifest, paced: Callable[[Entries], Entries] = iter) -> bytes:
    """Return the bytes of the manifest file, its checksum included.

    Args:
        manifest: What it says.
        paced: Called with the entries; yields them when it is time to go on.
    """
    head = {
        "format": FORMAT,
        "version": VERSION if any(map(_PARTS_OF, manifest.entries.values())) else WHOLE_VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "next_steps": manifest.next_steps,
        "files": [asdict(file) for file in manifest.files],
    }
    own = paced(manifest.entries.items())
    entries = [f"{_JSON.encode(key)}:{_dumped(entry)}" for key, entry in own]
    body = f'{_JSON.encode(head)[:-1]},"entries":{{{",".join(entries)}}}}}'.encode()
    return _PREFIX + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _SUFFIX


def _dumped(entry: EntryRecord) -> str:
    if not isinstance(entry.value, (list, dict)):
        return _JSON.encode(_lean(entry))
    text = _JSON.encode(_lean(entry, with_value=False))
    return f'{text[:-1]},"value":{_in_pieces(entry.value)}}}'


def _in_pieces(tree: object) -> str:
    """Return JSON, made in short calls: each keeps all other threads waiting."""
    if type(tree) is dict and len(tree) > 0:
        members = [f"{_JSON.encode(name)}:{_in_pieces(child)}" for name, child in tree.items()]
        return f"{{{','.join(members)}}}"
    if type(tree) is not list:
        return _JSON.encode(tree)
    if not _CONTAINERS.isdisjoint(map(type, tree)):
        return f"[{','.join(map(_in_pieces, tree))}]"
    parts = [tree[start : start + PIECE_ITEMS] for start in range(0, len(tree), PIECE_ITEMS)]
    return f"[{','.join([_JSON.encode(part)[1:-1] for part in parts])}]"


def dump_entries(entries: Mapping[str, EntryRecord]) -> bytes:
    """Return the entries of a manifest alone, for other workers."""
    return _JSON.encode({key: _lean(entry) for key, entry in entries.items()}).encode()


def parse_entries(data: bytes) -> dict[str, EntryRecord]:
    """Return what `dump_entries` was given."""
    return {key: _entry(each) for key, each in json.loads(data).items()}


def dump_share(
    files: Sequence[FileRecord], tensors: Mapping[str, Mapping[int, TensorRecord]]
) -> bytes:
    """Return what one worker has written of a step, for the one that writes the manifest."""
    return _JSON.encode([[asdict(file) for file in files], tensors]).encode()


def parse_share(data: bytes) -> tuple[list[FileRecord], dict[str, dict[int, TensorRecord]]]:
    """Return what `dump_share` was given."""
    files, tensors = json.loads(data)
    return [_file_record(each) for each in files], {
        key: {int(number): _tensor_record(each) for number, each in own.items()}
        for key, own in tensors.items()
    }


def _lean(entry: EntryRecord, *, with_value: bool = True) -> dict[str, object]:
    """Return the fields that do not have their defaults, and always a value."""
    found: dict[str, object] = {"kind": entry.kind}
    for name in _OPTIONAL:
        field = getattr(entry, name)
        if field:
            found[name] = field
    if entry.kind == "value" and with_value:
        found["value"] = entry.value
    return found


def parse_manifest(data: bytes, step: int) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        DamagedError: If it is not what was written, or describes what cannot be.
        CheckpointError: If it is of another version of the format.
    """
    start, end = len(_PREFIX) + _NUM_DIGITS + len(_MIDDLE), len(data) - len(_SUFFIX)
    body = data[start:end]
    frame = (_PREFIX + b"%08x" % zlib.crc32(body) + _MIDDLE, _SUFFIX)
    if end < start or (data[:start], data[end:]) != frame:
        raise DamagedError(f"{MANIFEST} fails its checksum ({len(data)} bytes)")
    try:
        found = json.loads(body)
        if found["format"] != FORMAT:
            raise DamagedError(f"{MANIFEST} has format {found['format']!r}")
        if found["version"] not in range(1, VERSION + 1):
            raise CheckpointError(
                f"The checkpoint of step {step} has version {found['version']!r} of the format, "
                f"but this release reads up to version {VERSION}. Read it with the release that "
                "wrote it."
            )
        manifest = Manifest(
            step=_natural(found["step"]),
            sequence=_natural(found["sequence"]),
            next_steps=tuple(map(_natural, found["next_steps"])),
            files=tuple(_file_record(each) for each in found["files"]),
            entries={str(key): _entry(each) for key, each in found["entries"].items()},
            version=_natural(found["version"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedError(
            f"{MANIFEST} is not a manifest: {type(error).__name__}: {error}"
        ) from None
    if manifest.step != step:
        raise DamagedError(f"{MANIFEST} is that of step {manifest.step}")
    _check_layout(manifest)
    return manifest


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _file_record(found: Mapping[str, Any]) -> FileRecord:
    name = found["name"]
    if not isinstance(name, str) or DATA_FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a data file")
    numbers = (found["bytes"], found["crc32"], found["header_bytes"], found["header_crc32"])
    if not 0 <= numbers[2] <= min(MAX_HEADER_BYTES, numbers[0]):
        raise ValueError(f"a header of {numbers[2]!r} bytes cannot be in {name}")
    return FileRecord(name, *map(_natural, numbers))


def _tensor_record(found: Any) -> TensorRecord:
    file, offset, size, crc32, *rest = found
    marks = tuple(map(_natural, rest[0])) if rest else ()
    if marks and len(marks) != max(0, -(-size // CHUNK_BYTES) - 1):
        raise ValueError(f"a tensor of {size} bytes has {len(marks)} marks")
    return TensorRecord(_natural(file), _natural(offset), _natural(size), _natural(crc32), marks)


def _form(shape: object, dtype: object) -> tuple[tuple[int, ...], str]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or dtype not in STORED_AS:
        raise ValueError(f"an array cannot have shape {shape!r} and dtype {dtype!r}")
    return tuple(map(_natural, shape)), dtype


def _entry(found: Mapping[str, Any]) -> EntryRecord:
    kind = found["kind"]
    if kind not in {"variable", "array", "value"}:
        raise ValueError(f"kind {kind!r} is unknown")
    texts = [
        found.get(n, "") for n in ("owner", "object", "part", "synchronization", "aggregation")
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"names must be text, got {texts!r}")
    owner, of, part, synchronization, aggregation = texts
    shape, dtype = ((), "") if kind == "value" else _form(found.get("shape", []), found["dtype"])
    tensors = tuple(map(_tensor_record, found.get("tensors", ())))
    forms = tuple(_form(*each) for each in found.get("forms", ()))
    if (len(forms) != len(tensors)) if kind == "value" else not tensors:
        raise ValueError(f"an entry has {len(tensors)} tensors")
    parts = tuple([(_natural(begin), _natural(end)) for begin, end in found.get("parts", ())])
    begins, ends = [begin for begin, _ in parts], [0, *(end for _, end in parts)]
    if parts and (
        kind != "variable" or begins != ends[:-1] or ends != sorted(ends)
        or ends[-1] != math.prod(shape) or len(parts) != len(tensors)
    ):  # fmt: skip
        raise ValueError(f"a {kind} of shape {shape} has {len(tensors)} tensors of {parts}")
    return EntryRecord(
        kind, owner, of, part, shape, dtype, synchronization, aggregation, found.get("value"),
        tensors, forms, parts,
    )  # fmt: skip


def _check_layout(manifest: Manifest) -> None:
    """Check that every tensor lies in its file and has the size that its shape says.

    Raises:
        DamagedError: If one does not.
    """
    for key, entry in manifest.entries.items():
        pieces = [
            (entry.form_of(index), entry.tensors[number], end - begin)
            for index in range(entry.num_components)
            for number, begin, end in entry.pieces_of(index)
        ]
        for (shape, dtype), tensor, count in pieces:
            size = count * item_bytes(dtype)
            file = manifest.files[tensor.file] if tensor.file < len(manifest.files) else None
            if (
                file is None
                or size != tensor.bytes
                or not file.header_bytes <= tensor.offset <= file.bytes - tensor.bytes
            ):
                raise DamagedError(
                    f"{MANIFEST} puts {tensor.bytes} bytes of {key!r} (shape {shape}, {dtype}) at "
                    f"offset {tensor.offset} of file {tensor.file}, where they cannot be"
                )


# ---- checksums ---------------------------------------------------------------------------


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two byte strings, one behind the other, from those of the two.

    Example:
        >>> combine_crc32(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True

    Source:
        crc32_combine of zlib: appending zeros is a linear map over GF(2).
    """
    return _apply(_zeros_operator(second_bytes), first) ^ second


@lru_cache(maxsize=256)
def _zeros_operator(num_bytes: int) -> tuple[int, ...]:
    """Return the matrix, by columns, of what appending zero bytes does to a checksum."""
    power = (0xEDB88320, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        power = _square(power)
    result = tuple(1 << bit for bit in range(32))
    while num_bytes:
        if num_bytes & 1:
            result = tuple(_apply(power, column) for column in result)
        num_bytes >>= 1
        if num_bytes:
            power = _square(power)
    return result


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(matrix, column) for column in matrix)


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


@final
class StoredArray(NamedTuple):
    """Place of an array in plain data."""

    number: int
    is_scalar: bool


def encoded(copied: object) -> object:
    """Return a copy of plain data as JSON has it."""
    return encode(copied, _encoded_leaf)


def _encoded_leaf(stored: StoredArray | np.generic) -> object:
    if isinstance(stored, np.generic):
        return encode(stored.item(), _encoded_leaf)
    return {"$scalar" if stored.is_scalar else "$tensor": stored.number}
