"""A device with streams, made of torch on the host: what a GPU does, at its worst.

Work is enqueued and runs as late as it may: when something waits for its stream. Until then its
result is poison, and whoever reads poison on the host gets an error. Memory that nobody holds any
more becomes poison, as if the next op of its own stream had written there: behind what that stream
has to do ("late"), or at once, as if it had done all of it ("early"). Other streams are waited for
only if they were said to use it, by `keep`. All devices are one GPU.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from aioreplica.context import REGISTRY
from aioreplica.devices.backends import Backend, NumpyBackend, TorchBackend, find_backends

pytest.importorskip("torch")  # doctests are looked for in this file, too

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

POISON = -7777
DEVICE = torch.device("cuda:0")
LOCK = threading.RLock()  # of all streams: one GPU
HERE = threading.local()
aten: Any = torch.ops.aten


class PoisonError(AssertionError):
    """Something was read before it was there, or after its memory was given back."""


class Stream:
    """Work in order, which runs when someone waits for it.

    Python may let go of an array, or collect one, in the middle of some work, on the thread that
    runs it. What is enqueued then waits for its turn.
    """

    num_running = 0  # works of all streams, one in the other

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_enqueued = 0
        self.num_done = 0
        self._work: list[Callable[[], object]] = []

    def enqueue(self, work: Callable[[], object]) -> None:
        with LOCK:
            self._work.append(work)
            self.num_enqueued += 1

    def run_until(self, number: int) -> None:
        with LOCK:
            while self.num_done < number:
                Stream.num_running += 1
                try:
                    self._work[0]()
                finally:
                    del self._work[0]
                    self.num_done += 1
                    Stream.num_running -= 1

    def synchronise(self) -> None:
        self.run_until(self.num_enqueued)

    def wait_for(self, other: "Stream") -> None:
        number = other.num_enqueued
        self.enqueue(lambda: other.run_until(number))


DEFAULT = Stream("default")
MODE = {"is": "late", "makes": "on the host"}


def current() -> Stream:
    return getattr(HERE, "stream", DEFAULT)


class Memory:
    """What an array and its views lie in."""

    def __init__(self, data: torch.Tensor) -> None:
        self.owner = current()
        self.users: list[Stream] = []
        weakref.finalize(self, give_back, self.owner, self.users, data)


def give_back(owner: Stream, users: list[Stream], data: torch.Tensor) -> None:
    with LOCK:
        for user in users:
            if user is not owner:
                owner.wait_for(user)
        owner.enqueue(lambda: data.fill_(poison_of(data.dtype)))
        if MODE["is"] == "early" and not Stream.num_running:
            owner.synchronise()


def poison_of(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return torch.nan
    return {torch.bool: True, torch.uint8: 222, torch.int8: -111}.get(dtype, POISON)


class DeviceArray(torch.Tensor):
    """A tensor whose numbers come later."""

    numbers: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls: Any, numbers: torch.Tensor, memory: Memory) -> "DeviceArray":
        self: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype
        )
        self.numbers, self.memory = numbers, memory
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return launch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceArray{tuple(self.shape)}"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self if args == (DEVICE,) else super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return read(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu().")
        return read(self).numpy()

    def cpu(self) -> Any:  # type: ignore[override]
        return Download.apply(self)


def launch(func: Any, args: Any, kwargs: Any) -> Any:
    held: list[Memory] = []

    def numbers_of(value: Any) -> Any:
        if isinstance(value, DeviceArray):
            held.append(value.memory)
            return value.numbers
        if isinstance(value, torch.device):  # where the numbers really are
            return torch.device("cpu")
        if isinstance(value, torch.Tensor) and value.ndim:
            raise RuntimeError(f"{func} got tensors of the host and of a device")
        return value.clone() if isinstance(value, torch.Tensor) else value

    plain, named = tree_map(numbers_of, args), tree_map(numbers_of, kwargs)
    if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
        return read_all(lambda: func(*plain, **named), plain)
    aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    if any(alias.is_write for alias in aliases):
        current().enqueue(lambda: func(*plain, **named))
        return args[0] if func._schema.returns else None
    if aliases:  # a view: another shape of the same memory
        return tree_map(lambda out: DeviceArray(out, held[0]), func(*plain, **named))
    shape = func(*plain, **named)  # of whatever is there by now; nobody sees these numbers
    out = torch.full(shape.shape, poison_of(shape.dtype), dtype=shape.dtype)
    current().enqueue(lambda: out.copy_(func(*plain, **named)))
    return DeviceArray(out, Memory(out))


def read_all(get: Callable[[], Any], numbers: Any) -> Any:
    """Read on the host, as torch does: behind the current stream of the thread, and no other."""
    with LOCK:
        current().synchronise()
        for each in numbers:
            if isinstance(each, torch.Tensor):
                poison = poison_of(each.dtype)
                bad = each.isnan() if each.dtype.is_floating_point else each == poison
                if poison is not True and bool(bad.any()):
                    raise PoisonError(f"read {each} on stream {current().name}")
        return get()


def read(array: torch.Tensor) -> torch.Tensor:
    own: Any = array.detach()
    return read_all(lambda: own.numbers.clone(), [own.numbers])  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """Have an array copied on the device; anything else is returned as it is."""
    return value.clone() if isinstance(value, DeviceArray) else value


def frozen(value: Any) -> Any:
    """Read an array, as one of NumPy that is read-only."""
    if not isinstance(value, DeviceArray):
        return value
    found = read(value).numpy()
    found.flags.writeable = False
    return found


def upload(values: Any) -> DeviceArray:
    """Copy numbers to the device, some time later, from memory that must not change until then."""
    source = torch.as_tensor(values)
    out = torch.full_like(source, poison_of(source.dtype))
    current().enqueue(lambda: out.copy_(source))
    return DeviceArray(out, Memory(out))


class Upload(torch.autograd.Function):
    """A copy to the device, and of gradients back."""

    @staticmethod
    def forward(_ctx: Any, array: torch.Tensor) -> DeviceArray:
        return upload(array.detach())

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return read(gradients[0])


class Download(torch.autograd.Function):
    """A copy to the host, and of gradients back."""

    @staticmethod
    def forward(_ctx: Any, array: torch.Tensor) -> torch.Tensor:
        return read(array)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> DeviceArray:
        return upload(gradients[0])


PINNED: MutableMapping[torch.Tensor, list[Stream]] = WeakTensorKeyDictionary()


def pinned(memory: torch.Tensor) -> torch.Tensor:
    """Give memory of the host that is handed out again behind the copies that streams make."""
    memory.fill_(poison_of(memory.dtype))
    users = PINNED[memory] = []
    weakref.finalize(memory, hand_out, users, memory.detach())
    return memory


def hand_out(users: list[Stream], data: torch.Tensor) -> None:
    with LOCK:
        for user in users:
            user.enqueue(lambda: data.fill_(poison_of(data.dtype)))
        if not users:
            data.fill_(poison_of(data.dtype))


FACTORIES = (torch.tensor, torch.ones, torch.zeros, torch.arange, torch.full)


class Copies(TorchFunctionMode):
    """Takes the place of torch's own copies to the device; others are not known here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in FACTORIES and "device" not in named and MODE["makes"] == "there":
            needs_gradient = named.pop("requires_grad", False)
            return upload(func(*args, **named)).requires_grad_(needs_gradient)
        if func is torch.tensor and named.get("device") == DEVICE:
            return upload(torch.tensor(*args))
        if func is torch.empty and named.pop("pin_memory", False):
            return pinned(torch.empty(*args, **named))
        if func is torch.Tensor.to and DEVICE.type in [getattr(x, "type", "") for x in args[1:]]:
            if named.get("non_blocking"):
                PINNED[args[0]].append(current())
            return Upload.apply(args[0])
        return func(*args, **named)


class StreamBackend(Backend):
    """TorchBackend, on the device with streams in place of CUDA ones."""

    def __init__(self) -> None:
        self._torch = TorchBackend()

    name = "streams"
    has_streams = True

    def num_devices(self, kind: str) -> int:
        return 8 if kind == "cuda" else 0

    def owns(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def put(self, value: Any, device: str) -> Any:
        with Copies():
            return value if isinstance(value, DeviceArray) else self._torch.put(value, device)

    def get(self, array: Any) -> Any:
        return read(array).numpy() if isinstance(array, DeviceArray) else self._torch.get(array)

    def scope(self, device: str) -> AbstractContextManager[None]:
        return own_stream(device)

    def synchronise(self, device: str) -> None:
        current().synchronise()

    def keep(self, array: Any) -> None:
        if isinstance(array, DeviceArray):
            array.memory.users += [current(), DEFAULT]

    def reduce(self, op: Any, arrays: Sequence[Any]) -> Any:
        return self._torch.reduce(op, arrays)


@contextmanager
def installed(mode: str, backend: Backend | None = None) -> Iterator[None]:
    """Put devices with streams in the place of the machine's own."""
    mode_before, MODE["is"] = MODE["is"], mode
    backends = REGISTRY.replace("backends", (NumpyBackend(), backend or StreamBackend()))
    devices = REGISTRY.replace("logical_devices", None)
    try:
        yield
    finally:
        MODE["is"] = mode_before
        REGISTRY.replace("logical_devices", devices)
        REGISTRY.replace("backends", backends)


def take_place(mode: str) -> None:
    """Put devices with streams in the place of the machine's own for as long as it lives."""
    MODE["is"] = mode
    others = [each for each in find_backends() if not isinstance(each, TorchBackend)]
    REGISTRY.replace("backends", (*others, StreamBackend()))


@contextmanager
def makers() -> Iterator[None]:
    """Have torch make tensors on the device, as one that is set by `torch.set_default_device`."""
    MODE["makes"] = "there"
    try:
        with Copies():
            yield
    finally:
        MODE["makes"] = "on the host"


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    streams: dict[str, Stream] = HERE.__dict__.setdefault("streams", {})
    before, own = current(), streams.setdefault(device, Stream(device))
    own.wait_for(DEFAULT)
    HERE.stream = own
    try:
        with Copies():
            yield
    finally:
        HERE.stream = before
