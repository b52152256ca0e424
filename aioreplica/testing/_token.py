"""Tokens: a schedule in at most 40 characters, with a checksum and the mark of its program."""

from __future__ import annotations

import re
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import crc32
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ..context import REGISTRY
from ._faults import SLOW, SLOW_LINK, Fault, Faults, name_number
from ._schedule import CANCELLED, CHOICES, FIDELITIES, HELD, Hold, Schedule
from ._strategies import MAKERS, SEED_BITS

PREFIX: Final = "ar1-"
VERSIONED: Final = re.compile(r"ar\d+-")
MAX_LENGTH: Final = 40
SHOWN: Final = 60
ROOM: Final = (MAX_LENGTH - len(PREFIX)) * 6 // 8
CRC_BYTES: Final = 4
SEED_BYTES: Final = SEED_BITS // 8
OWN_UUIDS: Final = 0x80
"""Mark, in the first byte, that each run has uuids of its own; makers are below 32."""
NO_FAULTS, FAULTS_INSIDE, FAULTS_ELSEWHERE = range(3)
LIMITED: Final = 0x40
"""Mark, in the byte before the faults, that a number of steps comes first."""


class TokenTooLongError(Exception):
    """Raised when a schedule has too many decisions for a token."""


def program_number(main: object) -> int:
    """Return the mark of a program: its name, in 16 bits; 0 for one without a name."""
    name = _name(main)
    return 0 if name == "<lambda>" else name_number(name) or 1


def _name(main: object) -> str:
    while isinstance(main, partial):
        main = main.func
    return str(getattr(main, "__name__", "<lambda>"))


def encode(schedule: Schedule, main: Callable[..., object]) -> str:
    """Return the token of a schedule.

    Faults end every kind of token, explicit decisions and constraints too, and before them comes
    after how many steps a run is endless. An option of 0 and a key of length 0, which those do not
    have, mark that either follows; without both nothing is added.

    Raises:
        TokenTooLongError: If its decisions do not fit.
    """
    head = schedule.maker << 2 | FIDELITIES.index(schedule.fidelity)
    body = bytearray([head | (OWN_UUIDS if schedule.own_uuids else 0)])
    body += program_number(main).to_bytes(2)
    body += schedule.seed.to_bytes(SEED_BYTES)
    faults = schedule.faults if schedule.faults is not None and schedule.faults.entries else None
    limit = b"" if schedule.max_steps is None else _varint(schedule.max_steps)
    has_more = bool(faults or limit)
    if schedule.maker == CHOICES:
        previous = 0
        for decision, option in schedule.choices:
            body += _varint(decision - previous)
            body += _varint(option)
            previous = decision
        body += bytes(2 if has_more else 0)
    elif schedule.maker == HELD:
        for hold in schedule.holds:
            for number in (*_hold_numbers(hold),):
                body += _varint(number)
        body += bytes(1 if has_more else 0)
    elif schedule.maker == CANCELLED:
        for number in (schedule.cancel_step, schedule.cancel_task, schedule.order):
            body += _varint(number)
    else:
        body += _varint(schedule.length)
    if has_more or schedule.maker < len(MAKERS):
        mark, *rest = _faults_bytes(faults, ROOM - CRC_BYTES - len(body) - len(limit))
        body += bytes([mark | LIMITED if limit else mark, *limit, *rest])
    if len(body) + CRC_BYTES > ROOM:
        raise TokenTooLongError
    body += crc32(body).to_bytes(CRC_BYTES)
    return PREFIX + urlsafe_b64encode(body).decode().rstrip("=")


def decode(token: Any, main: Callable[..., object], faults: Faults | None = None) -> Schedule:
    """Return the schedule of a token.

    Args:
        token: What `encode` returned.
        main: The program that it is for.
        faults: What may go wrong, where the token does not say so.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is damaged, of another program, lacks its faults, or has others.
    """
    program, body = _open(token)
    own = program_number(main)
    if program and own and program != own:
        raise ValueError(
            f"Token {token!r} is of another program than {_name(main)!r}. Replay it with the "
            "program that was explored; what counts is the function's name."
        )
    try:
        return _schedule_of(body, token, faults)
    except (StopIteration, RuntimeError, OverflowError):  # of a generator that met its end
        raise ValueError(_damaged(token)) from None


def _schedule_of(body: bytes, token: str, faults: Faults | None) -> Schedule:
    """Read the content of a token."""
    maker, fidelity = _maker_in(body), FIDELITIES[body[0] & 3]
    seed = int.from_bytes(body[3 : 3 + SEED_BYTES])
    rest = iter(body[3 + SEED_BYTES :])
    schedule = Schedule(maker, seed, 0, fidelity, own_uuids=bool(body[0] & OWN_UUIDS))
    if maker == CHOICES:
        schedule = replace(schedule, choices=tuple(_choices(rest)))
    elif maker == CANCELLED:
        step, task, order = _read(rest), _read(rest), _read(rest)
        if order >= len(MAKERS):
            raise ValueError(_damaged(token))
        schedule = replace(schedule, cancel_step=step, cancel_task=task, order=order)
    elif maker == HELD:
        schedule = replace(schedule, holds=tuple(_holds(rest)))
    else:
        schedule = replace(schedule, length=_read(rest))
    mark = next(rest, NO_FAULTS)
    if mark & LIMITED:
        schedule = replace(schedule, max_steps=_read(rest))
    return replace(schedule, faults=_read_faults(mark & ~LIMITED, rest, token, faults))


def is_token_of(token: str, main: Callable[..., object]) -> bool:
    """Tell whether a token is of this program, by the function's name.

    Args:
        token: From a report.
        main: The program.

    Raises:
        ValueError: If the token is damaged.
    """
    program, own = _open(token)[0], program_number(main)
    return not (program and own) or program == own


def _open(token: object) -> tuple[int, bytes]:
    """Check a token; return its program's number and its content."""
    if not isinstance(token, str):
        raise TypeError(f"A token is a string, got {token!r} ({type(token).__name__}).")
    body = b""
    text = token.removeprefix(PREFIX)
    if text != token and len(token) <= MAX_LENGTH:
        try:
            body = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            body = b""
    content, check = body[:-CRC_BYTES], body[-CRC_BYTES:]
    is_whole = (
        len(content) >= 3 + SEED_BYTES
        and crc32(content).to_bytes(CRC_BYTES) == check
        and PREFIX + urlsafe_b64encode(body).decode().rstrip("=") == token
    )
    if not is_whole or not _is_known(content):
        raise ValueError(_damaged(token))
    return int.from_bytes(content[1:3]), content


def _damaged(token: str) -> str:
    """Say what is wrong with what is not a token of this version."""
    shown = token if len(token) <= SHOWN else f"{token[:SHOWN]}..."
    other = VERSIONED.match(token)
    if other is not None and other[0] != PREFIX:
        return (
            f"{shown!r} is a schedule token of another version: it begins with {other[0]!r}, those "
            f"of this one with {PREFIX!r}. Nothing was run; explore again, or replay it with the "
            "version it is from."
        )
    return (
        f"{shown!r} is not a schedule token, or it is damaged: tokens begin with {PREFIX!r} and "
        "carry a checksum. Nothing was run; copy it again from the report."
    )


def _is_known(content: bytes) -> bool:
    maker = _maker_in(content)
    return content[0] & 3 < len(FIDELITIES) and (
        maker in (CHOICES, CANCELLED, HELD) or maker < len(MAKERS)
    )


def _maker_in(content: bytes) -> int:
    return (content[0] & ~OWN_UUIDS) >> 2


def _choices(rest: Iterator[int]) -> Iterator[tuple[int, int]]:
    decision = 0
    for first in rest:
        decision += _read(rest, first)
        option = _read(rest)
        if not option:
            return  # a limit or faults follow
        yield decision, option


def _hold_numbers(hold: Hold) -> tuple[int, ...]:
    return (
        len(hold.key), *hold.key, hold.nth, len(hold.until_key), *hold.until_key, hold.until_nth
    )  # fmt: skip


def _holds(rest: Iterator[int]) -> Iterator[Hold]:
    for first in rest:
        if not first:
            return  # a limit or faults follow
        key = tuple(_read(rest) for _ in range(_read(rest, first)))
        nth = _read(rest)
        until_key = tuple(_read(rest) for _ in range(_read(rest)))
        yield Hold(key, nth, until_key, _read(rest))


# --- faults ---------------------------------------------------------------------------------


def _faults_bytes(faults: Faults | None, room: int) -> bytes:
    """Write faults if there is room, else a mark by which this process finds them."""
    if faults is None or not faults.entries:
        return bytes([NO_FAULTS])
    if all(map(_fits, faults.entries)):
        inside = _all_bytes(faults)
        if len(inside) < room:
            return bytes([FAULTS_INSIDE]) + inside
    key = crc32(repr(faults.entries).encode()) & 0xFFFF
    _known_faults()[key] = faults
    return bytes([FAULTS_ELSEWHERE]) + key.to_bytes(2)


def _fits(fault: Fault) -> bool:
    """Tell whether a few numbers say it all: no exception with state, no pattern."""
    return not isinstance(fault.error, BaseException) and not set("*?[") & set(fault.fn or "")


def _fault_bytes(fault: Fault) -> bytes:
    parts = (fault.device, fault.fn, fault.at, fault.error)
    flags = sum((part is not None) << bit for bit, part in enumerate(parts))
    out = bytearray([fault.kind << 4 | flags])
    if fault.device is not None:
        out += _name_bytes(fault.device)
    if fault.fn is not None:
        out += _name_bytes(fault.fn)
    if fault.at is not None:
        out += _varint(fault.at)
    if fault.error is not None:
        out += name_number(_class_name(fault.error)).to_bytes(2)
    out += struct.pack(">f", fault.factor) if fault.factor != 1.0 else _varint(fault.times)
    return bytes(out)


def _read_faults(mark: int, rest: Iterator[int], token: str, given: Faults | None) -> Faults | None:
    if mark == NO_FAULTS:
        return given
    if mark == FAULTS_ELSEWHERE:
        key = _read_number(rest)
        found = given or _known_faults().get(key)
        if found is None or crc32(repr(found.entries).encode()) & 0xFFFF != key:
            raise ValueError(
                f"The faults of token {token!r} did not fit into it. Pass the same faults again: "
                "replay(main, token, faults=...)."
            )
        return found
    faults = Faults()
    for first in rest:
        faults._add(_read_fault(first, rest))
    if given is not None and _all_bytes(given) != _all_bytes(faults):
        raise ValueError(
            f"Token {token!r} has its own faults, {faults!r}, and not the {given!r} that were "
            "passed. Leave out `faults`, or pass those of the exploration."
        )
    return faults


def _all_bytes(faults: Faults) -> bytes:
    return b"".join(map(_fault_bytes, faults.entries)) if all(map(_fits, faults.entries)) else b""


def _read_fault(first: int, rest: Iterator[int]) -> Fault:
    kind, flags = first >> 4, first & 15
    device = f"#{_read_number(rest)}" if flags & 1 else None
    fn = f"#{_read_number(rest)}" if flags & 2 else None
    at = _read(rest) if flags & 4 else None
    error = _class_of(_read_number(rest)) if flags & 8 else None
    if kind in (SLOW, SLOW_LINK):
        (factor,) = struct.unpack(">f", bytes(next(rest) for _ in range(4)))
        return Fault(kind, device, fn, at, 1, error, factor)
    return Fault(kind, device, fn, at, _read(rest), error)


def _name_bytes(name: str) -> bytes:
    number = int(name[1:]) if name.startswith("#") else name_number(name)
    return number.to_bytes(2)


def _class_name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_of(number: int) -> type[BaseException]:
    """Find the exception class of a number among those this process knows."""
    todo: list[type[BaseException]] = [BaseException]
    for cls in todo:
        if name_number(_class_name(cls)) == number:
            return cls
        todo += cls.__subclasses__()
    raise ValueError(
        "The token's fault raises an exception class that is not imported here. Import it first."
    )


def _known_faults() -> dict[int, Faults]:
    return REGISTRY.once("testing_faults", dict)


# --- numbers --------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read(rest: Iterator[int], first: int | None = None) -> int:
    number = shift = 0
    byte = next(rest) if first is None else first
    while byte & 0x80:
        number |= (byte & 0x7F) << shift
        shift += 7
        byte = next(rest)
    return number | byte << shift


def _read_number(rest: Iterator[int]) -> int:
    return next(rest) << 8 | next(rest)
