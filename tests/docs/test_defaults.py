"""The table of defaults that differ from torch's and optax's, against what is installed."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar

PAGE = (Path(__file__).parents[2] / "docs/porting_ddp.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
    for line in PAGE.split("## Defaults that differ")[1].splitlines()
    if line.startswith("| `")
]
# Our arguments in the words of torch and of optax; "betas.0" is the first of two.
NAMES = {
    "learning_rate": ("lr", "learning_rate"),
    "momentum": ("momentum", "momentum"),
    "nesterov": ("nesterov", "nesterov"),
    "initial_accumulator_value": ("initial_accumulator_value", "initial_accumulator_value"),
    "epsilon": ("eps", "eps"),
    "rho": ("alpha", "decay"),
    "centered": ("centered", "centered"),
    "beta_1": ("betas.0", "b1"),
    "beta_2": ("betas.1", "b2"),
    "weight_decay": ("weight_decay", "weight_decay"),
    "weight_decay_mask": ("", "mask"),
}
OPTIMIZERS = ("SGD", "Adagrad", "RMSprop", "Adam", "AdamW")
LIBRARIES = ("torch", "optax")


def default_of(function: Any, name: str) -> Any:
    """Return the default of an argument, 0 for None; None if there is none."""
    name, _, index = name.partition(".")
    found = inspect.signature(function).parameters[name].default
    if found is inspect.Parameter.empty:
        return None
    found = found[int(index)] if index else found
    return 0.0 if found is None else float(found)


def theirs(library: str, kind: str, argument: str) -> Any:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = import_module("torch.optim" if library == "torch" else library)
    name = NAMES[argument][LIBRARIES.index(library)]
    if not name:
        return None
    return default_of(getattr(module, kind if library == "torch" else kind.lower()), name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_our_default_is_as_the_table_says(row: Any) -> None:
    assert float(row[2]) == default_of(getattr(ar.optimizers, row[0]), row[1])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_their_default_is_as_the_table_says(row: Any, library: str) -> None:
    cell = row[3 + LIBRARIES.index(library)]
    expected = theirs(library, row[0], row[1])
    if expected is None:
        assert cell == ""
        return
    name, number = cell.split()
    assert (name, float(number)) == (NAMES[row[1]][LIBRARIES.index(library)], expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_default_that_differs_has_a_row(kind: str, library: str) -> None:
    ours = inspect.signature(getattr(ar.optimizers, kind)).parameters
    listed = {row[1] for row in ROWS if row[0] == kind}
    for argument in ours.keys() - {"options"}:
        expected = theirs(library, kind, argument)
        if expected is not None and expected != default_of(getattr(ar.optimizers, kind), argument):
            assert argument in listed


@pytest.mark.asyncio
@pytest.mark.parametrize(("options", "expected"), [({}, -2.0), ({"loss_reduction": "mean"}, -1.0)])
async def test_unweighted_gradients_are_added_up_unless_averaged(
    options: Any, expected: float
) -> None:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w, sgd = ar.Variable(np.zeros(1)), ar.optimizers.SGD(1.0, **options)

        async def step() -> None:
            await sgd.apply_gradients([(np.ones(1), w)])

        await strategy.run(step)
    assert w.value.tolist() == [expected]


@pytest.mark.asyncio
async def test_defaults_of_torch_for_half_precision_and_non_finite_numbers() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    adam = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.tensor([torch.nan, 1.0], dtype=torch.float16)
    adam.step()
    assert torch.isnan(parameter[0])
    assert adam.state[parameter]["exp_avg"].dtype is torch.float16
