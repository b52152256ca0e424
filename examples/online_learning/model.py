"""The model: a small network that says how likely a web page is to be phishing."""

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aioreplica as ar
from aioreplica.online import Prequential

Array = NDArray[Any]

FEATURES = (
    "empty_server_form_handler",
    "popup_window",
    "https",
    "request_from_other_domain",
    "anchor_from_other_domain",
    "is_popular",
    "long_url",
    "age_of_domain",
    "ip_in_url",
)  # of river's Phishing, each 0, 0.5 or 1
INPUT = np.zeros(len(FEATURES), np.float32)
TARGET = np.float32(0)  # 1: it is phishing
HIDDEN = 32


class Model:
    """The variables of the network, how they learn, and how they predict."""

    def __init__(self, strategy: ar.Strategy, *, learning_rate: float = 0.02) -> None:
        rng = np.random.default_rng(0)
        first = rng.normal(0, len(FEATURES) ** -0.5, (len(FEATURES), HIDDEN))
        second = rng.normal(0, HIDDEN**-0.5, HIDDEN)
        arrays = {"w1": first, "b1": np.zeros(HIDDEN), "w2": second, "b2": np.zeros(1)}
        with strategy.scope():
            self.variables = {
                name: ar.Variable(array.astype(np.float32), name=name)
                for name, array in arrays.items()
            }
            self.optimizer = ar.optimizers.Adam(learning_rate)

    @property
    def state(self) -> dict[str, Any]:
        """Everything that a step changes."""
        return {"variables": self.variables, "optimizer": self.optimizer}

    async def step(self, ctx: ar.ReplicaContext, batch: dict[str, Array]) -> dict[str, float]:
        """Learn one replica's part of a batch; what is returned was true before."""
        values = {name: variable.value for name, variable in self.variables.items()}
        found = await ctx.run_on_device(differentiate, values, batch["input"], batch["target"])
        gradients, loss = found
        count = len(batch["target"])
        pairs = [(ar.Weighted(gradients[name], count), self.variables[name]) for name in gradients]
        await self.optimizer.apply_gradients(pairs)
        return {"loss": loss}

    def prequential(self) -> Prequential:
        """Return figures of the newest predictions, made before their examples were learned."""
        drift = importlib.import_module("river.drift") if find_spec("river") else None
        return Prequential(
            lambda snapshot, inputs: predict(snapshot, inputs)["phishing"],
            {"accuracy": lambda targets, found: np.mean(is_wrong(targets, found) == 0)},
            window=200,
            detector=drift and drift.ADWIN,
            error=is_wrong,
        )


def predict(snapshot: Any, inputs: Array) -> dict[str, Array]:
    """Return how likely each page is to be phishing, in one version: a learner's or a file's."""
    values = {name: snapshot[f"variables/{name}"] for name in ("w1", "b1", "w2", "b2")}
    return {"phishing": probability(values, inputs)[1]}


def is_wrong(targets: Array, found: Array) -> Array:
    """Return 1.0 for each prediction on the wrong side."""
    return ((found > 0.5) != (targets > 0.5)).astype(float)


def probability(values: dict[str, Array], inputs: Array) -> tuple[Array, Array]:
    """Return the hidden layer, and the probabilities."""
    hidden = np.maximum((2 * inputs - 1) @ values["w1"] + values["b1"], 0)
    score = hidden @ values["w2"] + values["b2"]
    return hidden, 1 / (1 + np.exp(-score))


def differentiate(
    values: dict[str, Array], inputs: Array, targets: Array
) -> tuple[dict[str, Array], float]:
    """Return the gradients of the summed cross entropy, and its mean."""
    hidden, found = probability(values, inputs)
    slope = found - targets
    inner = np.outer(slope, values["w2"]) * (hidden > 0)
    gradients = {
        "w1": (2 * inputs - 1).T @ inner,
        "b1": inner.sum(axis=0),
        "w2": hidden.T @ slope,
        "b2": slope.sum(keepdims=True),
    }
    if not len(targets):  # a replica's part may be empty
        return gradients, 0.0
    sure = np.clip(np.where(targets > 0.5, found, 1 - found), 1e-7, 1)
    return gradients, float(-np.log(sure).mean())
