"""The app of the command line.

The modules of the commands are imported when it runs, so that what one command needs does not
matter to `import aioreplica`.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import __version__
from ._rows import written

SUMMARY = "Look at what aioreplica does and has saved."
COMMANDS = {
    "doctor": "Tell what is installed, what is missing, and what the missing part would bring.",
    "devices": "List the devices of this machine, and the backends that hold arrays on them.",
    "trace": "Sum a trace up: steps, what took the time, how busy each replica and device was.",
    "top": "Watch the replicas and devices of a running process.",
    "ckpt": "Look at checkpoints, and remove them.",
    "online": "Look at the journal of an online learner, and roll it back.",
    "explore": "Run an async program under many schedules, until one fails.",
    "bench": "Run one of the project's benchmarks, or list them.",
}
"""The commands in the order in which help lists them."""

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count
UNREAD = 141  # 128 and the number of SIGPIPE, which ends other programs behind `| head`


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None takes those of the process.

    Raises:
        SystemExit: At the end, with the exit status; at once if typer or rich is missing, unless
            it is `doctor` or help that is asked for, which need neither. Ctrl-C gives 130, and 141
            a pipe that is no longer read.
        BrokenPipeError: If a command, or a program that it runs, met one on something else.
    """
    if sys.stdout is None:  # it was closed before the program began
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            with written():
                sys.stdout.flush()  # the interpreter, at its end, could only complain
    except KeyboardInterrupt:  # while something is imported; later typer sees to it
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError as error:
        raise _end_of(error) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer would end with 1, whosever it is
            raise _end_of(end.__context__) from None
        raise


def _end_of(error: BrokenPipeError) -> BaseException:
    """Return what ends the program quietly if its output is no longer read; else the error.

    SIGPIPE itself stays ignored: it would also end a program whose sockets lose their peer.
    """
    output, nothing = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
    poll = select.poll()
    poll.register(output, 0)
    has_error = bool(poll.poll(0))  # told unasked: a pipe has one once its reading end is closed
    if not has_error and not os.path.sameopenfile(output, nothing):  # rich has seen to it, if same
        return error
    os.dup2(nothing, output)  # for what is still in the buffer
    return SystemExit(UNREAD)


def _run(given: list[str]) -> None:
    is_script = Path(sys.argv[0]).stem == "aioreplica"
    program = "aioreplica" if is_script else "python -m aioreplica"
    try:
        import rich  # noqa: F401 - typer and the commands print with it
        import typer
    except ImportError as missing:
        _run_bare(given, program, missing)
        return
    app = typer.Typer(
        name="aioreplica",
        help=SUMMARY,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options(typer))
    _add_commands(app, typer)
    app(args=given, prog_name=program)


def _add_commands(app: Any, typer: ModuleType) -> None:
    from ._ckpt import collect, list_steps, remove_steps, show_step, verify_steps
    from ._commands import bench, devices, promote, roll_back, show_journal, top
    from ._doctor import doctor
    from ._explore import explore
    from ._trace import trace

    command: object
    for command in (doctor, devices, trace, top, explore):
        app.command()(command)
    group = typer.Typer(help=COMMANDS["ckpt"], no_args_is_help=True)
    for name, command in (
        ("ls", list_steps),
        ("verify", verify_steps),
        ("show", show_step),
        ("rm", remove_steps),
        ("gc", collect),
    ):
        group.command(name)(command)
    app.add_typer(group, name="ckpt")
    group = typer.Typer(help=COMMANDS["online"], no_args_is_help=True)
    group.command("show")(show_journal)
    group.command("rollback")(roll_back)
    group.command("promote")(promote)
    app.add_typer(group, name="online")
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command(context_settings=settings)(bench)


def _run_bare(given: list[str], program: str, missing: ImportError) -> None:
    """Do without typer and rich: help, the version, and the command that needs neither.

    Raises:
        SystemExit: At the end, with 0, or with what is missing.
    """
    cure = f"The command line needs {missing.name}. Install it with: pip install 'aioreplica[cli]'"
    command = given[0] if given and given[0] in COMMANDS else ""
    if given == ["doctor"]:
        from ._doctor import doctor

        doctor()
        raise SystemExit(0) from None
    if given == ["--version"]:
        lines = [f"aioreplica {__version__}"]
    elif command and "--help" in given:
        lines = [f"Usage: {program} {command}", "", COMMANDS[command]]
        lines += [] if command == "doctor" else ["", cure]
    elif given in ([], ["--help"]):
        lines = [f"Usage: {program} COMMAND [ARGS]...", "", SUMMARY, "", "Commands:"]
        lines += [f"  {name:<8} {summary}" for name, summary in COMMANDS.items()]
        lines += ["", cure, "Only doctor works without it."]
    else:
        raise SystemExit(cure) from missing
    sys.stdout.write("\n".join([*lines, ""]))
    raise SystemExit(0) from None


def _options(typer: ModuleType) -> Any:  # Any: typer need not be installed
    """Return what reads the options that stand before a command."""

    def show_version(wanted: bool) -> None:
        if wanted:
            with written():
                typer.echo(f"aioreplica {__version__}")
            raise typer.Exit

    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    return options
