"""The app of `python -m aioreplica`: each command is a module here that adds itself.

A command's module has `add_to(app)`, which gets the typer app. It is imported when the command
line runs, so that what one command needs does not matter to `import aioreplica`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("._ckpt", "._top")
"""The modules of the commands, in the order in which help lists them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None takes those of the process.

    Raises:
        SystemExit: At the end, with the exit status; at once if typer or rich is missing.
    """
    try:
        import rich  # noqa: F401 - typer and the commands print with it
        import typer
    except ImportError as missing:
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
    app.callback()(_no_command)
    for name in COMMANDS:
        import_module(name, __package__).add_to(app)
    app(args=None if arguments is None else list(arguments), prog_name="python -m aioreplica")


def _no_command() -> None:
    """Have the app expect the name of a command, even where there is only one."""
