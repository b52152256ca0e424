"""The app of the command line: each command is a module here that adds itself.

A command's module has `add_to(app)`, which gets the typer app. It is imported when the command
line runs, so that what one command needs does not matter to `import aioreplica`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = ("._doctor", "._devices", "._trace", "._top", "._ckpt", "._bench")
"""The modules of the commands, in the order in which help lists them."""

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None takes those of the process.

    Raises:
        SystemExit: At the end, with the exit status; at once if typer or rich is missing, unless
            the command is `doctor`, which needs neither. Ctrl-C gives 130.
    """
    try:
        _run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # while something is imported; later typer sees to it
        raise SystemExit(INTERRUPTED) from None


def _run(given: list[str]) -> None:
    try:
        import rich  # noqa: F401 - typer and the commands print with it
        import typer
    except ImportError as missing:
        if given == ["doctor"]:
            import_module("._doctor", __package__).doctor()
            raise SystemExit(0) from None
        raise SystemExit(
            f"The command line needs {missing.name}. Install it with: pip install 'aioreplica[cli]'"
        ) from missing
    app = typer.Typer(
        name="aioreplica",
        help="Look at what aioreplica does and has saved.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options(typer))
    for name in COMMANDS:
        import_module(name, __package__).add_to(app)
    is_script = Path(sys.argv[0]).stem == "aioreplica"
    app(args=given, prog_name="aioreplica" if is_script else "python -m aioreplica")


def _options(typer: Any) -> Any:  # Any: typer need not be installed where types are checked
    """Return what reads the options that stand before a command."""

    def show_version(wanted: bool) -> None:
        if wanted:
            from .. import __version__

            typer.echo(f"aioreplica {__version__}")
            raise typer.Exit

    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    return options
