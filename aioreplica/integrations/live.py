"""The live view: replicas, devices, throughput, skew and waits of strategies, in the terminal.

`view` draws it in the program itself. `serve` lets `python -m aioreplica top` draw it in another
terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .._export import export_public
from ..devices import OwnedTask, run_on_host
from ..strategies import Strategy
from ..telemetry import printable
from ._status import Status, name_strategies, serve, status_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["serve", "view"]

MAX_WAITS = 12


@asynccontextmanager
async def view(
    *strategies: Strategy, refresh_s: float = 0.5, console: Console | None = None
) -> AsyncIterator[None]:
    """Draw the live view while a block runs; the last picture stays.

    The event loop collects the numbers, a host thread draws them.

    Args:
        *strategies: Which to show.
        refresh_s: Seconds between pictures.
        console: Where to draw; None takes the terminal.

    Raises:
        ImportError: If rich is not installed.
        TypeError: If there is no strategy.
        ValueError: If `refresh_s` is not positive.

    Cancellation:
        The terminal is given back.
    """
    named = name_strategies(strategies)
    if not refresh_s > 0:
        raise ValueError(f"refresh_s must be positive, got {refresh_s!r}.")
    try:
        from rich.live import Live
    except ImportError as error:
        raise ImportError(
            'The live view needs rich, which is not installed. Run: pip install "aioreplica[cli]"'
        ) from error
    before = status_of(named)
    live = Live(render(before, None), console=console, auto_refresh=False)

    async def draw() -> None:
        nonlocal before
        now = status_of(named)
        picture = await run_on_host(render, now, before)
        before = now
        await run_on_host(live.update, picture, refresh=True)

    async def draw_often() -> None:
        while True:
            await asyncio.sleep(refresh_s)
            await draw()

    live.start()
    try:
        drawing = OwnedTask(draw_often(), "aioreplica live view")
        try:
            yield
        finally:
            drawing.cancel()
            await drawing.ended()
        await draw()
    finally:
        live.stop()


def render(now: Status, before: Status | None) -> RenderableType:
    """Draw a status; rates are those since the one before, if there is one."""
    from rich.console import Group
    from rich.text import Text

    seconds = 0.0 if before is None else now["time_s"] - before["time_s"]
    old = {} if before is None else {each["name"]: each for each in before["strategies"]}
    title = Text(printable(f"aioreplica  process {now['pid']}  {now['program']}"), style="bold")
    parts: list[RenderableType] = [title]
    for each in now["strategies"]:
        parts += _strategy(each, old.get(each["name"]), seconds)
    return Group(*parts)


def _strategy(now: Status, before: Status | None, seconds: float) -> list[RenderableType]:
    from rich.columns import Columns
    from rich.text import Text

    last = None if before is None else before["num_steps"]
    steps_per_s = _rate(now["num_steps"], last, seconds)
    lag = "-" if now["loop_lag_s"] is None else f"{1e3 * now['loop_lag_s']:.2f} ms"
    head = Text(
        printable(
            f"{now['name']}  {now['state']}  step {now['num_steps']}  {steps_per_s} steps/s  "
            f"{now['num_active']} running  loop lag {lag} (max {1e3 * now['max_loop_lag_s']:.1f})"
        ),
        style="bold cyan",
    )
    tables = [_replicas(now), _devices(now, before, seconds)]
    return [head, Columns(tables, padding=(0, 4)), *_waits(now)]


def _replicas(now: Status) -> Table:
    from rich.text import Text

    table = _table("replica", "device", "last", "late per merge")
    worst = max((each["late_s"] for each in now["replicas"]), default=0.0)
    for each in now["replicas"]:
        merges = each["num_merges"] or 1
        style = "yellow" if each["late_s"] == worst > 0 else ""
        row = (
            str(each["replica_id"]),
            printable(each["device"]),
            f"{each['num_last']} of {each['num_merges']}",
            f"{1e3 * each['late_s'] / merges:.3f} ms",
        )
        table.add_row(*(Text(cell, style=style) for cell in row))
    return table


def _devices(now: Status, before: Status | None, seconds: float) -> Table:
    from rich.text import Text

    table = _table("device", "busy", "ops/s", "running", "queued", "done")
    old: dict[str, Any] = {}  # Any: what JSON holds
    if before is not None:
        old = {each["name"]: each for each in before["devices"]}
    for each in now["devices"]:
        last = old.get(each["name"], {})
        share = (each["busy_s"] - last.get("busy_s", 0.0)) / seconds if last and seconds else 0.0
        row = (
            printable(each["name"]),
            f"{100 * min(share, each['running'] + 1.0):3.0f} %" if last else "-",
            _rate(each["done"], last.get("done"), seconds),
            str(each["running"]),
            str(each["queued"]),
            str(each["done"]),
        )
        table.add_row(*map(Text, row))
    return table


def _waits(now: Status) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    for each in now["waits"][:MAX_WAITS]:
        whom = ", ".join(map(str, each["waits_for"]))
        for_whom = f" for {whom}" if whom else ""
        text = f"replica {each['replica_id']} waits{for_whom}: {each['what']} at {each['where']}"
        lines.append(Text(printable(f"  step {each['step']}: {text}"), style="magenta"))
    more = len(now["waits"]) - MAX_WAITS
    return [*lines, Text(f"  and {more} more waits")] if more > 0 else lines


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        is_name = title in {"device", "replica"}
        table.add_column(title, justify="left" if is_name else "right", no_wrap=True)
    return table


def _rate(now: float, before: float | None, seconds: float) -> str:
    return "-" if before is None or seconds <= 0 else f"{(now - before) / seconds:.1f}"


export_public(__name__, __all__, globals())
