"""What is measured, of whom, and what was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

OURS = "aioreplica"
WIDE = f"{OURS} with AVX-512"
"""The same with the AVX-512 routines of OpenBLAS, which it does not choose by itself on all
processors that have them; the libraries of the others do."""

COMPILED = f"{OURS} compiled"
FASTEST = (OURS, WIDE, COMPILED)
"""Whose fastest way the others are compared with."""

SCAN, CALLS = "lax.scan", "jit per step, another program"
"""By hand, in jax: the same chunk of steps in one call, and a call for each step, which gives its
values to the program behind every one."""

NUM_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
MAX_TORCH = 8  # each of its replicas is a process


@final
@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A program that does the same work.

    Attributes:
        name: In tables.
        package: What its environment holds, by name; empty for this one.
        version: The release; empty for the newest.
        needs: What else the environment holds.
        modes: Its ways to do a task, by task.
        max_replicas: Most replicas that it is asked for.
        library: What computes gradients in our program, if it is not NumPy; must be installed.
        environ: Environment variables of its program.
        program: Its program is `programs/<program>_program.py`; empty for that of its name.
    """

    name: str
    package: str
    version: str
    needs: tuple[str, ...]
    modes: Mapping[str, tuple[str, ...]]
    max_replicas: int = 64
    library: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    program: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether its program is this package's."""
        return self.name.startswith(OURS)


WAYS = ("run", "plain steps", "run_steps")
PEERS = (
    Peer(
        OURS, "", "", (),
        {
            "start": ("",), "merge": ("",), "run": ("",), "all_reduce": ("",), "failure": ("",),
            "train": WAYS, "small": WAYS,
        },
    ),
    Peer(WIDE, "", "", (), {"train": WAYS}, environ={"OPENBLAS_CORETYPE": "SKYLAKEX"}),
    Peer(
        f"{OURS} without fast", "", "", (), {"train": WAYS[::2]},
        environ={"NUMBA_DISABLE_JIT": "1"},
    ),
    Peer(f"{OURS} on jax", "", "", (), {"train": WAYS[::2]}, library="jax"),
    Peer(f"{OURS} on torch", "", "", (), {"train": WAYS[::2]}, library="torch"),
    Peer("floor", "", "", (), dict.fromkeys(("merge", "run", "all_reduce", "train"), ("",))),
    Peer(
        "tensorflow", "tensorflow-cpu", "2.21.0", (),
        {
            "start": ("",), "merge": ("eager",), "run": ("eager", "function"),
            "failure": ("eager",),
            "all_reduce": ("eager", "function"), "train": ("eager", "function"),
            "small": ("eager", "function"),
        },
    ),
    Peer(
        "jax", "jax", "0.10.2", ("optax",),
        {
            "start": ("",),
            **dict.fromkeys(("merge", "run", "all_reduce", "train", "small"), ("jit",)),
        },
    ),
    Peer(
        "torch", "torch", "2.13.0", ("numpy",),
        {
            "start": ("",),
            **dict.fromkeys(("merge", "all_reduce", "train", "small"), ("gloo",)),
        },
        MAX_TORCH,
    ),
    Peer(COMPILED, "", "", (), {"compiled": ("",)}, library="jax", program="compiled"),
    Peer("jax by hand", "", "", (), {"compiled": (SCAN, CALLS)}, library="jax", program="compiled"),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: a task for so many replicas.

    Attributes:
        task: Name of the task; each program has a function for it.
        num_replicas: How many there are.
        title: Of the row.
        unit: Of its times.
        settings: Arguments of the task.
    """

    task: str
    num_replicas: int
    title: str
    unit: str
    settings: Mapping[str, object] = field(default_factory=dict)


def all_cases(*, is_quick: bool) -> list[Case]:
    """Return the cases, those of as many replicas side by side."""
    sizes = (1, 2) if is_quick else (1, 2, 4, 8, 16, 32, 64)
    return [case for size in sizes for case in _cases_of(size, is_quick=is_quick)]


def _cases_of(size: int, *, is_quick: bool) -> list[Case]:
    cases = [
        Case("merge", size, "merge", "us/replica"),
        Case("run", size, "empty run", "us/run"),
    ]
    if size in (1, 4):
        cases.insert(0, Case("start", size, "start-up", "s"))
    if size in (2, 4, 8):
        for num_bytes in NUM_BYTES[1:4:2] if is_quick else NUM_BYTES:
            title = f"all_reduce {show_bytes(num_bytes)}"
            cases.append(Case("all_reduce", size, title, "us", {"size": num_bytes}))
    if size in (1, 2, 4):
        cases += [
            _training(size, optimizer, batch)
            for optimizer in ("SGD", "Adam")
            for batch in ((32,) if is_quick else (32, 256))
        ]
        models = [("MLP", 32)] if is_quick else [("MLP", 32), ("MLP", 256), ("small model", 32)]
        cases += [
            _compiled(size, model, optimizer, batch)
            for optimizer in (("Adam",) if is_quick else ("SGD", "Adam"))
            for model, batch in models
        ]
    if size in (1, 2):
        for count in (10, 100, 1000):
            settings = {"optimizer": "SGD", "batch": 0, "num_parameters": count}
            cases.append(Case("small", size, f"linear, {count} parameters", "us/step", settings))
    if size == 4 or (is_quick and size == 2):
        cases += [
            Case("failure", size, f"report of {kind}", "us", {"kind": kind.split()[1]})
            for kind in ("a mismatch", "an exception")
        ]
    return cases


def _training(size: int, optimizer: str, batch: int) -> Case:
    settings = {"optimizer": optimizer, "batch": batch}
    return Case("train", size, f"MLP, {optimizer}, batch {batch}", "us/step", settings)


def _compiled(size: int, model: str, optimizer: str, batch: int) -> Case:
    settings = {"model": model, "optimizer": optimizer, "batch": batch}
    title = f"64 steps compiled, {model}, {optimizer}, batch {batch}"
    return Case("compiled", size, title, "us/step", settings)


def promised(case: Case, peer: str, mode: str) -> float | None:
    """Return how many times faster than a peer we promised to be; None where nothing was."""
    size = case.num_replicas
    if peer == "floor" or peer.startswith(OURS):
        return None
    if case.task == "merge" and peer == "tensorflow" and size > 1:
        return 10.0
    if case.task == "merge" and peer == "jax" and size >= 4:
        return 1.0
    if case.task == "all_reduce":
        return 3.0 if case.settings["size"] == NUM_BYTES[-1] else 1.0
    if case.task == "train" and size > 1:
        return 5.0 if mode == "eager" else 1.0
    if case.task == "small" and mode != "eager":
        return 1.0
    if case.task == "failure":
        return 5.0
    if case.task == "compiled":
        return 1.0 if mode == CALLS else 0.95 if case.settings["model"] == "MLP" else 0.8
    return None


def show_bytes(num_bytes: int) -> str:
    """Return, for example, "64 KiB"."""
    return f"{num_bytes >> 20} MiB" if num_bytes >> 20 else f"{num_bytes >> 10} KiB"


def named(peers: Sequence[Peer], names: Sequence[str]) -> list[Peer]:
    """Return the peers of these names, and ours in front."""
    return [peer for peer in peers if peer.name == OURS or peer.name in names]
