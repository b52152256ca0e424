"""`aioreplica devices`: the devices a program gets here, and which libraries' arrays they take."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..devices import list_devices
from ..devices.backends import find_backends
from ._rows import print_rows

KINDS = ("cpu", "cuda", "gpu", "tpu")
TAKEN = {"cupy": "cuda", "jax": ("cpu", "gpu", "tpu"), "numpy": "cpu", "torch": ("cpu", "cuda")}
"""The kinds of devices that arrays of each backend can live on."""


def add_to(app: Any) -> None:  # Any: typer need not be installed where types are checked
    """Add the command to the app."""
    app.command("devices")(devices)


def devices(
    kind: Annotated[str, typer.Argument(help="Only those: cpu, cuda, gpu or tpu.")] = "",
) -> None:
    """List the devices of this machine, and the backends that hold arrays on them.

    A program may split the host into another number of CPU devices with set_logical_devices.
    """
    wanted = kind.lower()
    if wanted and wanted not in KINDS:
        near = difflib.get_close_matches(wanted, KINDS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        text = f"Unknown kind of device {kind!r}.{hint} There are {', '.join(KINDS)}."
        Console(stderr=True, soft_wrap=True).print(Text(text, style="red"))
        raise typer.Exit(2)
    rows = []
    for device in list_devices(wanted or None):
        takes = [each.name for each in find_backends() if _takes(each.name, device.kind)]
        rows.append((str(device), ", ".join(takes)))
    if not rows:
        Console(stderr=True).print(f"This machine has no device of kind {wanted}.", highlight=False)
        raise typer.Exit(1)
    print_rows(("device", "arrays of"), rows)


def _takes(backend: str, kind: str) -> bool:
    """Tell whether a backend's arrays can live on a kind of device."""
    on = {
        "cupy": {"cuda"},
        "numpy": {"cpu"},
        "torch": {"cpu", "cuda"},
        "jax": {"cpu", "gpu", "tpu"},
    }
    return kind in on.get(backend, {kind})
