"""`python -m aioreplica top`: the live view of a process that opted in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..integrations._status import Status, read_status, socket_folder
from ..integrations.live import render

OPT_IN = (
    "A process opts in with `async with aioreplica.integrations.live.serve(strategy):`; it must "
    "run as this user."
)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top", help="Watch the replicas and devices of a running process.")(top)


def top(
    process: Annotated[
        str, typer.Argument(help="Its process id, or the path of its socket; none if it is alone.")
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between pictures.", min=0.05)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Draw one picture and end, as into a pipe.")] = False,
) -> None:
    """Draw what a process is doing until it ends, or Ctrl-C; into a pipe or file only once."""
    path = _find(process)
    console = Console()
    once = once or not console.is_terminal
    before = _read(path)
    time.sleep(min(interval, 0.25) if once else 0.0)
    if once:
        console.print(render(_read(path), before))
        return
    try:
        with Live(render(before, None), console=console, auto_refresh=False, screen=True) as live:
            _draw(live, path, before, interval)
    except KeyboardInterrupt:
        return
    console.print(f"The process behind {path} has ended.", markup=False)


def _draw(live: Live, path: Path, before: Status, interval: float) -> None:
    """Draw until the process has gone."""
    while True:
        time.sleep(interval)
        try:
            now = read_status(path)
        except TimeoutError:
            text = "The process does not answer: something holds its event loop."
            live.update(Text(text, style="bold red"), refresh=True)
            continue
        except (FileNotFoundError, ConnectionError):
            return
        live.update(render(now, before), refresh=True)
        before = now


def _find(process: str) -> Path:
    """Return the socket of the process that is meant, or of the only one."""
    if process.isdecimal():
        return socket_folder() / f"{process}.sock"
    if process:
        return Path(process)
    folder = socket_folder()
    found = sorted(folder.glob("*.sock")) if folder.is_dir() else []
    alive = [path for path in found if _answers(path)]
    if len(alive) == 1:
        return alive[0]
    if not alive:
        raise _error(f"No process can be watched: none has a socket in {folder}. {OPT_IN}")
    listed = ", ".join(path.stem for path in alive)
    raise _error(f"Several processes can be watched: {listed}. Name one: top {alive[0].stem}")


def _answers(path: Path) -> bool:
    try:
        read_status(path, 0.5)
    except TimeoutError:
        return True  # it is there, though its loop is held
    except (OSError, ValueError):
        return False
    return True


def _read(path: Path) -> Status:
    try:
        return read_status(path)
    except TimeoutError:
        raise _error(
            f"The process behind {path} does not answer: its event loop is held."
        ) from None
    except (OSError, ValueError) as error:
        raise _error(f"No status from {path}: {error.args[-1]}. {OPT_IN}") from None


def _error(text: str) -> typer.Exit:
    """Print what is wrong; return what ends the program."""
    Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
    return typer.Exit(1)
