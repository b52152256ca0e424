"""The state of a distributed dataset: a few integers, checked before they are believed."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ._natural import natural_or_none
from ._stream import Start

VERSION = 1
NUMBERS = ("version", "epoch", "position", "pipelines", "fingerprint")


def fingerprint_of(identity: tuple[Any, ...]) -> int:
    """Return a number below 2**48 that differs from those of other datasets.

    It fits the numbers of every JSON reader.
    """
    digest = blake2b(digest_size=6)
    for entry in identity:
        data = entry if isinstance(entry, bytes) else repr(entry).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def pack_state(place: Start, num_pipelines: int, fingerprint: int) -> dict[str, Any]:
    """Return a place as plain data."""
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": place.epoch,
        "position": place.offset,
        "pipelines": num_pipelines,
        "fingerprint": fingerprint,
    }
    if place.own_state is not None:
        state["source"] = place.own_state
    return state


def unpack_state(state: Any, num_pipelines: int, fingerprint: int, label: str) -> Start:
    """Return the place that a state names.

    Raises:
        ValueError: If it is not complete, or of another version, dataset or number of pipelines.
        TypeError: If it is no dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes what state_dict returned, got {state!r}.")
    if state.get("version") != VERSION:
        raise ValueError(
            f"The state of {label} has version {state.get('version')!r}, but this release reads "
            f"version {VERSION}. Load it with the release that saved it."
        )
    found = {}
    for name in NUMBERS:
        number = natural_or_none(state.get(name))  # NumPy's too: a checkpoint may hold arrays
        if number is None:
            raise ValueError(
                f"The state of {label} has {name}={state.get(name)!r}, which is no natural number. "
                "Load what state_dict returned, unchanged."
            )
        found[name] = number
    if found["pipelines"] != num_pipelines:
        raise ValueError(
            f"The state was saved with {found['pipelines']} input pipelines, but {label} has "
            f"{num_pipelines}. One dataset per replica can go on with as many replicas only; one "
            "per worker can with any number."
        )
    if found["fingerprint"] != fingerprint:
        raise ValueError(
            f"The state was saved by another dataset (fingerprint {found['fingerprint']}, "
            f"{label} has {fingerprint}). Load it into the dataset, with the seed, that it is of; "
            "with one dataset per replica, the batch size must be the same too."
        )
    return Start(found["epoch"], found["position"], state.get("source"))
