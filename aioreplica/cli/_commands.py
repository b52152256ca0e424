"""Commands about devices, running processes, journals of learners, and the project's benchmarks.

A learner that runs has its journal to itself; ask it over HTTP then.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..checkpoint import CheckpointManager
from ..devices import list_devices
from ..devices.backends import find_backends
from ..errors import CheckpointError, JournalError
from ..integrations._status import Status, read_status, socket_folder
from ..integrations.live import render
from ..online import Journal, roll_back_closed
from ._app import INTERRUPTED
from ._rows import failed, print_rows, written

KINDS = ("cpu", "cuda", "gpu", "tpu")
TAKEN = {"cupy": "cuda", "jax": ("cpu", "gpu", "tpu"), "numpy": "cpu", "torch": ("cpu", "cuda")}
"""The kinds of devices that arrays of each backend can live on."""


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
        raise failed(text, 2)
    rows = []
    for device in list_devices(wanted or None):
        takes = [each.name for each in find_backends() if _takes(each.name, device.kind)]
        rows.append((str(device), ", ".join(takes)))
    if not rows:
        raise failed(f"This machine has no device of kind {wanted}.")
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


OPT_IN = (
    "A process opts in with `async with aioreplica.integrations.live.serve(strategy):`; it must "
    "run as this user."
)


def top(
    process: Annotated[
        str, typer.Argument(help="Its process id, or the path of its socket; none if it is alone.")
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between pictures.", min=0.05)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Draw one picture and end, as into a pipe.")
    ] = False,
) -> None:
    """Watch the replicas and devices of a running process.

    Until it ends, or Ctrl-C; into a pipe or file one picture is drawn.
    """
    path = _find(process)
    console = Console()
    once = once or not sys.stdout.isatty()  # rich takes FORCE_COLOR for a terminal
    before = _read(path)
    time.sleep(min(interval, 0.25) if once else 0.0)
    if once:
        picture = render(_read(path), before)
        with written():
            console.print(picture)
        return
    try:
        with Live(render(before, None), console=console, auto_refresh=False, screen=True) as live:
            _draw(live, path, before, interval)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
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
        raise failed(f"No process can be watched: none has a socket in {folder}. {OPT_IN}")
    listed = ", ".join(path.stem for path in alive)
    raise failed(f"Several processes can be watched: {listed}. Name one: top {alive[0].stem}")


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
        raise failed(
            f"The process behind {path} does not answer: its event loop is held."
        ) from None
    except (OSError, ValueError) as error:
        raise failed(f"No status from {path}: {error.args[-1]}. {OPT_IN}") from None


NOT_HERE = (
    "The benchmarks are in the project's repository, not in the installed package. Run the command "
    "in the folder of the repository."
)


def bench(
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.")] = "",
    options: Annotated[
        list[str] | None, typer.Argument(help="What it is given; `bench NAME -- --help`.")
    ] = None,
) -> None:
    """Run one of the project's benchmarks, or list them."""
    root = _repository()
    if root is None:
        raise failed(NOT_HERE)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    command = importlib.import_module("benchmarks.__main__")
    names = command.subcommands()
    if not name:
        print_rows(("benchmark", "measures"), [(each, _about(root, each)) for each in names])
        return
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise failed(f"There is no benchmark {name!r}.{hint} There are {', '.join(names)}.", 2)
    command.main([name, *(options or [])])


def _repository() -> Path | None:
    """Return the folder of the repository: that of an editable install, or the current one."""
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if (folder / "benchmarks" / "__main__.py").is_file() and (folder / "aioreplica").is_dir():
            return folder
    return None


def _about(root: Path, name: str) -> str:
    """Return the first sentence of a benchmark, without importing it."""
    import ast

    path = root / "benchmarks" / f"{name}.py"
    if not path.is_file():
        path = root / "benchmarks" / name / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


JournalPath = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="Its journal.")
]
Folder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, readable=True, help="Its checkpoints.")
]
To = Annotated[int, typer.Option(min=0, help="Forget what was learned behind this example.")]
Skip = Annotated[list[int], typer.Option(min=1, help="An example not to learn; may be repeated.")]
MAX_LETTERS = 20


def show_journal(journal: JournalPath) -> None:
    """Show which examples a journal has, its rollbacks, and the oldest dead letters of each model.

    Nothing of it is changed.
    """
    file = Journal(journal).file()
    try:
        facts = file.open(only_looks=True)
        try:
            models = file.consumers()
            rollbacks = [(name, each) for name in models for each in file.rollbacks(name)]
            letters = [
                (name, each)
                for name in models
                for each in file.dead_letters(0, MAX_LETTERS, model=name)
            ]
        finally:
            file.close()
    except JournalError as error:
        raise failed(str(error)) from None
    rows = [("examples", f"{facts.first_number} to {facts.last_number}")]
    has_several = len(models) > 1
    for name, done in rollbacks:
        whose = f"{name} " if has_several else ""
        rows.append((f"rollback {whose}{done.generation}", f"to {done.rolled_to}"))
    if has_several:
        for name, each in models.items():
            role = "champion" if name == facts.champion else f"detached: {each.detached}"
            about = f", {role}" if each.detached or name == facts.champion else ""
            rows.append((f"model {name}", f"up to {each.learned}{about}"))
    print_rows(("what", "numbers"), rows)
    found = []
    for name, letter in letters:
        number = f"{letter.number} ({name})" if has_several else str(letter.number)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.time))
        found.append((number, since, letter.error))
    print_rows(("dead letter", "since", "error"), found)


def promote(journal: JournalPath, model: str) -> None:
    """Serve another model from the next start of the program on."""
    file = Journal(journal).file()
    try:
        file.open()
        try:
            file.promote(model)
        finally:
            file.close()
    except JournalError as error:
        raise failed(str(error)) from None
    print_rows(("what", "model"), [("champion", model)])


def roll_back(journal: JournalPath, checkpoints: Folder, to: To, skip: Skip = []) -> None:  # noqa: B006
    """Forget what was learned behind an example; the next learner learns it again, but for some.

    It begins with the newest checkpoint at or before that example, and removes the later ones.
    """
    try:
        manager = CheckpointManager(checkpoints)
        base = roll_back_closed(Journal(journal), manager, to, skip)
    except (ValueError, CheckpointError, JournalError) as error:
        raise failed(str(error)) from None
    rows = [("begins with checkpoint", str(base)), ("leaves out", " ".join(map(str, skip)) or "-")]
    print_rows(("the next learner", "numbers"), rows)
