"""Labels that come later, what is submitted again, and dead letters that are taken again.

A prediction is kept with its input under an id, until its label joins.

The journal's side, and what makes a label exactly one example, is in `_journal_keys.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ContextError
from ..tree import Tree
from ._example import as_example
from ._intake import ExampleGroup, checked_key, is_unicode
from ._journal_format import Entry, Label, Waiting
from ._ticket import Ticket

if TYPE_CHECKING:
    from ._engine import Engine


def expect(engine: Engine, x: object, prediction: object, name: str | None) -> str:
    """See `OnlineLearner.expect`."""
    _require_kept(engine)
    kept = {"input": as_example(x)}
    if prediction is not None:
        kept["prediction"] = as_example(prediction)
    name = secrets.token_hex(16) if name is None else checked_key("prediction_id", name)
    engine.intake.expect(Waiting(name, kept, engine.settings.schema.version))
    return name


async def expected(engine: Engine, name: str) -> Mapping[str, Tree]:
    """See `OnlineLearner.expected`."""
    found = await waiting(engine, name)
    if found is None:
        raise KeyError(name)
    return found.kept


async def waiting(engine: Engine, name: str) -> Waiting | None:
    """Return what waits for a label, None if nothing of that id does."""
    _require_kept(engine)
    return await engine.intake.expected(checked_key("prediction_id", name))


async def label(
    engine: Engine,
    name: str,
    target: object,
    *,
    waits: bool = True,
    spec_version: int | None = None,
) -> Ticket:
    """See `OnlineLearner.label`.

    Args:
        engine: That of the learner.
        name: The id.
        target: In the form of the version that has kept the input.
        waits: Whether to wait for a place in the queue; else raises anyio.WouldBlock.
        spec_version: That version as the caller believes; None if it does not say.
    """
    found = await waiting(engine, name)
    label = Label(name, as_example(target))
    examples: list[object] = []  # none for a label that is known already, or nobody asked for
    if found is not None:
        if spec_version not in {None, found.spec_version}:
            raise ValueError(
                f"The prediction {name!r} waits in the form of spec version {found.spec_version}, "
                f"and its label has that of {spec_version}. Send the label in the form of "
                f"{found.spec_version}."
            )
        examples.append(_joined(engine, found, label.target))
    submission = ExampleGroup(examples or [label.target], (Ticket(),), Entry(examples, label=label))
    await _take(engine, submission, waits=waits)
    return await submission.tickets[0].saved()


def _joined(engine: Engine, found: Waiting, target: object) -> object:
    """Return the example of an input and its label, as the program has it now."""
    schema, validate = engine.settings.schema, engine.settings.validate
    try:
        made = schema.labelled({"input": found.kept["input"], "target": target}, found)
        return as_example(made if validate is None else validate(made))
    except ValueError as error:
        if found.spec_version == schema.version:
            raise
        raise ValueError(
            f"The prediction {found.id!r} waits in the form of spec version {found.spec_version}, "
            f"so its label has to be in that form, too, and is {target!r:.100}: {error}"
        ) from error


def _require_kept(engine: Engine) -> None:
    journal = engine.settings.journal
    if journal is None or journal.label_ttl_s is None:
        raise ContextError(
            "No predictions are kept for later labels. Pass journal=ar.online.Journal(path, "
            "label_ttl_s=86400)."
        )


async def _take(engine: Engine, submission: ExampleGroup, *, waits: bool) -> None:
    if waits:
        await engine.intake.take(submission)
    else:
        engine.intake.take_nowait(submission)


async def replayed(engine: Engine, key: str | None, size: int) -> tuple[Ticket, ...]:
    """Return tickets of what an older program took with a key, none if it did not.

    Its form is not that of now, so `validate` refuses a client that sends it again, and whether it
    is the same cannot be told any more.

    Raises:
        JournalError: If the journal cannot be read.
    """
    journal, intake, is_newer = engine.journal, engine.intake, engine.settings.schema.version > 1
    if journal is None or not is_newer or not isinstance(key, str) or not is_unicode(key):
        return ()
    first = await journal.taken_before(key, size)
    if first is None:
        return ()
    found = tuple([await intake.ticket_of(first + at) for at in range(size)])
    intake.num_duplicates += size
    intake.settle_followers(engine.served.learning.learned_number, engine.served.version)
    return found


async def taken_again(engine: Engine, number: int, *, waits: bool = True) -> Ticket:
    """Take a dead letter of the served model again; `waits` as in `label`."""
    if engine is not engine.owner.champion:
        raise ContextError(
            f"{engine.model!r} is not served, so none of its dead letters is taken again: those "
            "who wait for an example wait for the champion. Promote it, or discard them."
        )
    example = (await engine.dead.find(number)).example
    if engine.journal is not None:
        example = engine.journal.migrated(number, example)
    is_journalled = engine.journal is not None
    submission = ExampleGroup.of([example], None, is_journalled, revived=(engine.model, number))
    if is_journalled:
        await _take(engine.owner, submission, waits=waits)
    else:
        engine.intake.take_nowait(submission)
        await engine.dead.discard(number)
    return submission.tickets[0]
