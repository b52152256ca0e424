"""Numbers and texts that steps record, for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..strategies import Strategy
from ..telemetry import Event, Observer, printable
from ._metrics import missing

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

__all__ = ["export"]


@contextmanager
def export(
    strategy: Strategy, destination: SummaryWriter | str | os.PathLike[str]
) -> Iterator[SummaryWriter]:
    """Write what steps record with `ctx.record` while a `with` block runs; gives the writer.

    Numbers become scalars and texts become texts, under the number of their step. The writer has
    a thread of its own for the file.

    Args:
        strategy: Whose.
        destination: A folder, or a writer of tensorboardX (or torch), which stays open.

    Raises:
        ImportError: If tensorboardX is not installed and a folder is given.
        TypeError: If the destination is neither a path nor a writer.
    """
    writer, close = _writer(destination)

    def add(event: Event) -> None:
        if event.kind != "scalar":
            return
        if isinstance(event.value, str):
            writer.add_text(printable(event.name), event.value, event.step)
        else:
            writer.add_scalar(printable(event.name), event.value, event.step)

    remove = strategy.observers.add(Observer(event_added=add))
    try:
        yield writer
    finally:
        remove()
        close()


def _writer(
    destination: SummaryWriter | str | os.PathLike[str],
) -> tuple[SummaryWriter, Callable[[], None]]:
    """Return the writer, and what closes or flushes it."""
    if isinstance(destination, (str, os.PathLike)):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise missing("tensorboardX", error) from error
        writer = SummaryWriter(os.fspath(destination))
        return writer, writer.close
    if not callable(getattr(destination, "add_scalar", None)):
        raise TypeError(
            f"TensorBoard events go to a folder or a SummaryWriter, got {destination!r}."
        )
    return destination, destination.flush
