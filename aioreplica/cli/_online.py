"""`python -m aioreplica online`: the journal of an online learner that is closed, and ways back.

A learner that runs has its journal to itself; ask it over HTTP then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint import CheckpointManager
from ..errors import CheckpointError, JournalError
from ..online import Journal, roll_back_closed
from ._rows import failed, print_rows

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
    """Show which examples a journal has, its rollbacks, and its oldest dead letters."""
    file = Journal(journal).file()
    try:
        facts = file.open()
        try:
            letters = file.dead_letters(0, MAX_LETTERS)
        finally:
            file.close()
    except JournalError as error:
        raise failed(str(error)) from None
    rows = [
        ("examples", f"{facts.first_number} to {facts.last_number}"),
        *((f"rollback {each.generation}", f"to {each.rolled_to}") for each in facts.rollbacks),
    ]
    print_rows(("what", "numbers"), rows)
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)) for each in letters]
    print_rows(
        ("dead letter", "since", "error"),
        [(str(x.number), when, x.error) for x, when in zip(letters, times, strict=True)],
    )


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
