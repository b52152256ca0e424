"""The programs that jobs may run: their settings, their data, and what is no job.

A client names a program and gives values for its settings; it never sends code or paths. A program
of your own is one more entry in `PROGRAMS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autograd.numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Array = NDArray[Any]


class Settings(BaseModel):
    """What every program can be told."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    epochs: int = Field(10, ge=1, le=1000)
    batch_size: int = Field(64, ge=1, le=4096)
    learning_rate: float = Field(0.004, gt=0, le=1)
    hidden: int = Field(64, ge=1, le=1024, description="hidden units")
    dropout: float = Field(0.1, ge=0, lt=1, description="part of the hidden units left out")
    replicas: int = Field(2, ge=1, le=64, description="parts of each batch, a device for each")
    save_every: int = Field(20, ge=1, le=10_000, description="steps from checkpoint to checkpoint")
    seed: int = Field(0, ge=0, lt=2**32)


class SpiralSettings(Settings):
    """Those of a generated data set, too."""

    arms: int = Field(3, ge=2, le=10)
    points: int = Field(200, ge=10, le=10_000, description="per arm")
    noise: float = Field(0.2, ge=0, le=1)


def load_digits(settings: Any) -> tuple[Array, Array]:
    """Images of handwritten digits, 8 x 8, and what they show."""
    from sklearn.datasets import load_digits as load

    digits = load()
    return digits.data / 16, digits.target


def make_spirals(settings: Any) -> tuple[Array, Array]:
    """Points on spiral arms, and the number of the arm."""
    rng = np.random.default_rng(settings.seed)
    arm = np.repeat(np.arange(settings.arms), settings.points)
    radius = rng.uniform(0.1, 1, len(arm))
    angle = 4 * radius + 2 * np.pi * arm / settings.arms + rng.normal(0, settings.noise, len(arm))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), arm


@dataclass(frozen=True)
class Program:
    """A kind of job: what may be set, and where its examples come from.

    Attributes:
        settings: What may be set.
        load: Returns the examples and their labels. It blocks: called on a thread of the host.
        sizes: Tells from the settings how many examples there are, of how many numbers each, and
            how many labels.
    """

    settings: type[Settings]
    load: Callable[[Any], tuple[Array, Array]]
    sizes: Callable[[Any], tuple[int, int, int]]

    @property
    def summary(self) -> str:
        return str(self.load.__doc__)


PROGRAMS = {
    "digits": Program(Settings, load_digits, lambda _: (1797, 64, 10)),
    "spirals": Program(SpiralSettings, make_spirals, lambda s: (s.arms * s.points, 2, s.arms)),
}

MAX_POINTS = 100_000
"""So many values a curve has at most: all of it is copied at each checkpoint."""
MEMORY_MIB = 128
"""So much memory a job may take, unless the service is told otherwise."""
MIB = 2**20


def stride_of(num_steps: int) -> int:
    """Return of how many steps a value of the curve is the mean."""
    return max(1, -(-num_steps // MAX_POINTS))


def memory_of(program: Program, settings: Any) -> dict[str, int]:
    """Return about how many bytes a job takes while it trains, by what takes them."""
    num_examples, width, num_labels = program.sizes(settings)
    batch = min(settings.batch_size, num_examples)
    num_steps = settings.epochs * -(-num_examples // batch)
    weights = (width + num_labels + 1) * settings.hidden + num_labels
    return {
        "examples": 8 * num_examples * (width + 2),  # with labels and their order
        "model": 8 * weights * (6 + 2 * settings.replicas),  # slots, gradients, a checkpoint
        "step": 8 * batch * (8 * settings.hidden + 4 * num_labels + width),  # forward and back
        "curve": 8 * 3 * min(num_steps, MAX_POINTS),  # a checkpoint, the table
    }


class Submission(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    program: str
    settings: dict[str, Any] = {}


class RejectedError(ValueError):
    """A job that is not taken; `reasons` are pairs: where in what was sent, and what is wrong."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        super().__init__("; ".join(f"{where}: {what}" for where, what in reasons))
        self.reasons = reasons


def read_submission(
    body: bytes, *, num_devices: int, max_bytes: int = MEMORY_MIB * MIB
) -> tuple[str, dict[str, Any]]:
    """Return the name of a program and all of its settings.

    Raises:
        RejectedError: If that is not what was sent; has every reason.
    """
    try:
        asked = Submission.model_validate_json(body)
        program = PROGRAMS.get(asked.program)
        if program is None:
            known = ", ".join(PROGRAMS)
            raise RejectedError(("program", f"There is only: {known}; got {asked.program!r:.50}"))
        settings = program.settings.model_validate(asked.settings)
    except ValidationError as error:
        inside = ("settings",) if error.title != "Submission" else ()
        raise RejectedError(
            *(
                (
                    ".".join(map(str, (*inside, *each["loc"]))),
                    f"{each['msg']}, got {each['input']!r:.50}",
                )
                for each in error.errors(include_url=False)
            )
        ) from None
    if settings.replicas > num_devices:
        what = f"There are {num_devices} devices, got {settings.replicas}"
        raise RejectedError(("settings.replicas", what))
    taken = memory_of(program, settings)
    if sum(taken.values()) > max_bytes:
        parts = ", ".join(f"{name} {-(-size // MIB)} MiB" for name, size in taken.items())
        what = (
            f"Such a job takes about {-(-sum(taken.values()) // MIB)} MiB ({parts}), and may take "
            f"{max_bytes // MIB} MiB. Ask for a smaller batch_size, hidden or points"
        )
        raise RejectedError(("settings", what))
    return asked.program, settings.model_dump()
