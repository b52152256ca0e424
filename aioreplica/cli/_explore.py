"""The command explore: a program under many schedules, or under the one of a token."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ._rows import failed, print_rows, printable, written

if TYPE_CHECKING:
    from ..testing import Failure, Report

TOLD_EVERY: Final = 50
"""After so many schedules a terminal is told how many there were."""


def explore(
    program: Annotated[
        str, typer.Argument(help="module:function, an async function without arguments.")
    ],
    schedules: Annotated[int, typer.Option(help="How many schedules at most.")] = 1000,
    seed: Annotated[int, typer.Option(help="Other seeds give other schedules.")] = 0,
    fidelity: Annotated[str, typer.Option(help="asyncio, reorder or adversarial.")] = "reorder",
    max_steps: Annotated[int | None, typer.Option(help="When to call a schedule endless.")] = None,
    leaks: Annotated[
        list[str] | None, typer.Option(help="Name of what may be left; 'ignore' for all.")
    ] = None,
    token: Annotated[str, typer.Option(help="Replay this schedule, and no other.")] = "",
    timeline: Annotated[
        Path | None, typer.Option(help="Write the failing schedule there, as a page.")
    ] = None,
) -> None:
    """Run an async program under many schedules, until one fails.

    The exit status is 1 if one does, with the error, the token and the schedule.
    """
    if token and timeline is not None:
        raise failed(
            "--token replays one schedule and writes no page, which is written by the search that "
            "finds the failure: leave --timeline out.",
            2,
        )
    main = load(program)
    left: object = "ignore" if leaks == ["ignore"] else tuple(leaks or ())
    try:
        if token:
            _replay(main, token, left)
            return
        report = _explored(main, schedules, seed, fidelity, max_steps, left)
    except (TypeError, ValueError) as error:
        if _is_of_program(error):
            raise
        raise failed(str(error), 2) from None
    _print(report)
    if report.failure is not None:
        if timeline is not None:
            _save_page(report.failure, timeline)
        raise typer.Exit(1)


def _save_page(failure: Failure, path: Path) -> None:
    try:
        failure.save_html(path)
    except OSError as error:
        raise failed(f"The page cannot be written to {path}: {error}.") from None


def load(program: str) -> object:
    """Import what `module:function` names, from the current folder too.

    Raises:
        typer.Exit: If there is no such module or function; with 2.
    """
    module_name, colon, path = program.partition(":")
    if not (module_name and colon and path):
        raise failed(f"Name the program as module:function, got {program!r}.", 2)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module_name.startswith("."):
        raise failed(f"Name the module from the top, without a leading dot, got {program!r}.", 2)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise failed(f"Cannot import {module_name!r}: {error}.", 2) from None
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, _async_names(found), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise failed(f"{module_name} has no {path!r}.{hint}", 2)
        found = getattr(found, name)
    return found


def _async_names(owner: object) -> list[str]:
    values = getattr(owner, "__dict__", {})
    return [name for name, value in values.items() if inspect.iscoroutinefunction(value)]


def _explored(
    main: Any, schedules: int, seed: int, fidelity: str, max_steps: int | None, leaks: Any
) -> Report:
    from ..testing._explore import explored

    is_watched = sys.stderr.isatty()

    def told(count: int) -> None:
        if is_watched and count % TOLD_EVERY == 0:
            sys.stderr.write(f"\r{count} of {schedules} schedules")
            sys.stderr.flush()

    try:
        return explored(
            main, schedules=schedules, seed=seed, fidelity=fidelity, max_steps=max_steps,
            leaks=leaks, told=told,
        )  # fmt: skip
    finally:
        if is_watched:
            sys.stderr.write("\r\x1b[K")


def _replay(main: Any, token: str, leaks: Any) -> None:
    import aioreplica.testing as art

    art.is_token_of(token, main)  # a damaged one is refused before anything runs
    try:
        art.replay(main, token, leaks=leaks)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ValueError | TypeError) and not _is_of_program(error):
            raise
        _print_error(error)
        raise typer.Exit(1) from None
    print_rows(("what", "value"), [("result", "the schedule of the token passes")])


def _is_of_program(error: BaseException) -> bool:
    """Tell whether a schedule raised it: the kit adds the timeline as a note."""
    return bool(getattr(error, "__notes__", ()))


def _print(report: Report) -> None:
    failure = report.failure
    rows = [
        ("result", "no schedule failed" if failure is None else "a schedule failed"),
        ("schedules", str(report.schedules_run)),
        ("schedules per second", f"{report.schedules_per_second:.0f}"),
        ("seed", str(report.seed)),
        ("fidelity", report.fidelity),
        *(("warning", warning) for warning in report.warnings),
    ]
    if failure is not None:
        rows += [("token", failure.token)] if failure.token else []
        rows += [("on asyncio's queue", report.verdict)] if report.verdict else []
    print_rows(("what", "value"), rows, red=(0,) if failure is not None else ())
    if failure is not None:
        try:
            report.check()
        except BaseException as error:  # noqa: BLE001 - a program may raise what it likes
            _print_error(error)


def _print_error(error: BaseException) -> None:
    """Print an error with its notes and the program's lines, those of the kit left out."""
    kit = str(Path(__file__).parents[1] / "testing")
    shown = traceback.TracebackException.from_exception(error)
    frames = [each for each in shown.stack if not each.filename.startswith((kit, __file__))]
    shown.stack = traceback.StackSummary.from_list(frames)
    text = "".join(shown.format())
    with written():
        sys.stdout.write("\n".join(printable(line) for line in text.splitlines()) + "\n")
