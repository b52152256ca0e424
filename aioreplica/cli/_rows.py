"""Output of commands: a table on a terminal, one line per row with tabs into a pipe.

Only tables and errors need rich: `doctor` also prints where the extra `cli` is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

RIGHT = {"count", "longest", "mean", "ops", "size", "total"}
"""Titles of the columns with numbers."""


def printable(text: str) -> str:
    """Keep what is read from files from moving the cursor or changing colours."""
    return text if text.isprintable() else repr(text)[1:-1]


def failed(problem: str, status: int = 1) -> Exception:
    """Print what is wrong; return the exception that ends the program."""
    import typer
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(printable(problem), style="red"))
    error: Exception = typer.Exit(status)
    return error


@contextmanager
def written() -> Iterator[None]:
    """End the program with a sentence if what is written in the block cannot be.

    Raises:
        BrokenPipeError: If nobody reads it.
        SystemExit: If it cannot be written for another reason; with 1.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left
        raise SystemExit(f"The output cannot be written: {error}.") from None


def print_rows(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", red: Iterable[int] = ()
) -> None:
    """Print rows of text.

    Args:
        head: The titles of the columns.
        rows: One text per column.
        title: What the rows are about; a pipe gets it as the first field of each row.
        red: Numbers of the rows that tell of something wrong; these are red on a terminal.
    """
    safe = [[printable(cell) for cell in row] for row in rows]
    if not safe:
        return
    try:
        from rich.console import Console
    except ImportError:
        _print_plain(head, safe, title)
        return
    console = Console()
    if not console.is_terminal:
        _print_plain(head, safe, title)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    wrong = set(red)
    for number, row in enumerate(safe):
        table.add_row(*map(Text, row), style="red" if number in wrong else None)
    with written():
        if title:
            console.print(Text(title, style="bold cyan"))
        console.print(table)
        if title:
            console.print()


@written()
def _print_plain(head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    first = [title] if title else []
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join([*first, *row]) + "\n" for row in rows)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in ([title] if title else []), head, *rows:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
