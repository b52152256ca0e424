"""`aioreplica bench`: the project's benchmarks, where its repository is at hand."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ._rows import print_rows

NOT_HERE = (
    "The benchmarks are in the project's repository, not in the installed package. Run the command "
    "in the folder of the repository."
)


def add_to(app: Any) -> None:  # Any: typer need not be installed where types are checked
    """Add the command to the app."""
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("bench", context_settings=settings)(bench)


def bench(
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.")] = "",
    options: Annotated[
        list[str] | None, typer.Argument(help="What it is given; `bench NAME -- --help`.")
    ] = None,
) -> None:
    """Run one of the project's benchmarks, or list them."""
    root = _repository()
    if root is None:
        raise _failed(NOT_HERE, 1)
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
        raise _failed(f"There is no benchmark {name!r}.{hint} There are {', '.join(names)}.", 2)
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


def _failed(text: str, status: int) -> Exception:
    Console(stderr=True, soft_wrap=True).print(Text(text, style="red"))
    error: Exception = typer.Exit(status)
    return error
