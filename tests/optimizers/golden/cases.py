"""The optimizers that are compared with other libraries, and the gradients they get."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_STEPS = 50
SHAPE = (3, 2)
FILE = Path(__file__).with_name("golden.npz")

TINY = 1e-16  # so small that it does not matter whether it is added inside or outside the root


@dataclass(frozen=True)
class Case:
    """One optimizer with one choice of numbers, in the words of three libraries."""

    name: str
    ours: tuple[str, dict[str, Any]]
    torch: tuple[str, dict[str, Any]]
    optax: tuple[str, dict[str, Any]]


CASES = [
    Case(
        "sgd",
        ("SGD", {"learning_rate": 0.1}),
        ("SGD", {"lr": 0.1}),
        ("sgd", {"learning_rate": 0.1}),
    ),
    Case(
        "sgd momentum",
        ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
        ("SGD", {"lr": 0.05, "momentum": 0.9}),
        ("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    ),
    Case(
        "sgd nesterov",
        ("SGD", {"learning_rate": 0.05, "momentum": 0.8, "nesterov": True}),
        ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
        ("sgd", {"learning_rate": 0.05, "momentum": 0.8, "nesterov": True}),
    ),
    Case(
        "adagrad",
        ("Adagrad", {"learning_rate": 0.1, "epsilon": TINY}),
        ("Adagrad", {"lr": 0.1, "eps": TINY, "initial_accumulator_value": 0.1}),
        ("adagrad", {"learning_rate": 0.1, "eps": TINY, "initial_accumulator_value": 0.1}),
    ),
    Case(
        "rmsprop",
        ("RMSprop", {"learning_rate": 0.01, "rho": 0.95, "epsilon": TINY}),
        ("RMSprop", {"lr": 0.01, "alpha": 0.95, "eps": TINY}),
        ("rmsprop", {"learning_rate": 0.01, "decay": 0.95, "eps": TINY}),
    ),
    Case(
        "rmsprop centered momentum",
        (
            "RMSprop",
            {
                "learning_rate": 0.001,
                "rho": 0.9,
                "momentum": 0.9,
                "epsilon": 1e-12,
                "centered": True,
            },
        ),
        (
            "RMSprop",
            {"lr": 0.001, "alpha": 0.9, "momentum": 0.9, "eps": 1e-12, "centered": True},
        ),
        (
            "rmsprop",
            {
                "learning_rate": 0.001,
                "decay": 0.9,
                "momentum": 0.9,
                "eps": 1e-12,
                "centered": True,
            },
        ),
    ),
    Case(
        "adam",
        ("Adam", {"learning_rate": 0.01, "epsilon": 1e-6}),
        ("Adam", {"lr": 0.01, "eps": 1e-6}),
        ("adam", {"learning_rate": 0.01, "eps": 1e-6}),
    ),
    Case(
        "adamw",
        ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        ("adamw", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ),
]


def start() -> Any:
    """The values before the first step."""
    return np.random.default_rng(6).normal(size=SHAPE)


def gradients() -> Any:
    """One gradient per step: no two alike, of quite different sizes, none near 0."""
    rng = np.random.default_rng(7)
    sizes = 10.0 ** rng.uniform(-2, 1, size=(NUM_STEPS, 1, 1))
    return (
        sizes
        * rng.choice([-1.0, 1.0], (NUM_STEPS, *SHAPE))
        * rng.uniform(0.1, 1.0, (NUM_STEPS, *SHAPE))
    )


def key(library: str, case: Case, dtype: str) -> str:
    """Where the numbers of a case are in the file."""
    return f"{library}/{case.name}/{dtype}".replace(" ", "_")
