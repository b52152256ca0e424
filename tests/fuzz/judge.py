"""The oracle: says what is wrong with how a program ended, if anything is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from aioreplica.errors import ContextError, MergeMismatchError, ReplicaCancelledError, StallError
from tests.fuzz import model
from tests.fuzz.calls import Outcome
from tests.fuzz.model import Verdict
from tests.fuzz.play import num_threads, play, play_beside_others
from tests.fuzz.program import (
    SLIDING,
    UNSEEN_WAYS,
    Program,
    has_messages,
    is_sliding,
    may_stall,
    smaller,
)

MAX_THREADS = 40  # lanes of 8 devices and of the host, reducing threads, what pytest brings
READ_ONLY = frozenset({
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "finish", "message",
})  # fmt: skip


def try_program(program: Program) -> str | None:
    """Run a program; return what is wrong, or None."""
    try:
        outcome = play(program)
    except Exception as error:
        text = f"{error}".split("\n\n")[0]
        return f"{type(error).__name__}: {text}"
    return problem(program, outcome)


def try_beside_others(program: Program) -> str | None:
    """Run a real program while other threads run theirs; return what is wrong, or None.

    What belongs to the process cannot be told apart then: warnings, threads that are left.
    """
    try:
        outcome = play_beside_others(program)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _refused(program, outcome) or _wrong_result(program, outcome)


def problem(program: Program, outcome: Outcome) -> str | None:
    """Say what is wrong with an outcome, or return None."""
    return (
        _refused(program, outcome)
        or _wrong_result(program, outcome)
        or _wrong_state(program, outcome)
        or _left_behind(program, outcome)
    )


def _refused(program: Program, outcome: Outcome) -> str | None:
    """Say why the program must not end like this; None if it may."""
    permitted = model.verdicts(program)
    if outcome.sent:
        permitted = [Verdict("cancelled" if program.outside == "cancel" else "timeout")]
    refused = [_refusal(program, outcome, verdict) for verdict in permitted]
    if None not in refused:
        return f"{' and '.join(map(str, refused))}; the run ended with {outcome.error!r}"
    return None


def shrink(program: Program, tries: int = 400) -> tuple[Program, str]:
    """Leave out what does not matter; return the smallest program found, and what is wrong."""
    wrong = try_program(program)
    assert wrong is not None
    goes_on = True
    while goes_on and tries > 0:
        goes_on = False
        for candidate in smaller(program):
            if candidate == program:
                continue
            tries -= 1
            found = try_program(candidate)
            if found is not None and _sort(found) == _sort(wrong):
                program, wrong, goes_on = candidate, found, True
                break
            if tries <= 0:
                break
    return program, wrong


def _sort(wrong: str) -> str:
    """Return what two problems of one kind have in common."""
    return re.sub(r"\d+|0x[0-9a-f]+", "#", wrong)[:40]


# ---- how it ended ---------------------------------------------------------------------------


def _refusal(program: Program, outcome: Outcome, verdict: Verdict) -> str | None:
    """Say why an outcome is not of a verdict; None if it is."""
    error = outcome.error
    booms = outcome.booms
    match verdict.kind:
        case "ok":
            return None if error is None else "it should have ended well"
        case "boom":
            planted = booms.get((verdict.replicas[0], verdict.uid))
            if planted is None:
                return f"replica {verdict.replicas[0]} should have raised at {verdict.uid}"
            return None if error is planted else f"it should have raised {type(planted).__name__}"
        case "booms":
            inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            if len(inside) == 2 and all(
                one in booms.values() or isinstance(one, ReplicaCancelledError) for one in inside
            ):
                return None
            return "it should have raised a group of both exceptions"
        case "group":
            planted = booms.get((verdict.replicas[0], verdict.uid))
            inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            if list(inside) != [planted]:
                return "it should have raised the group"
            return _no_note(program, error)
        case "mismatch":
            return _no_mismatch(program, error, verdict)
        case "context":
            return None if type(error) is ContextError else "it should have been a ContextError"
        case "context or mismatch":  # whoever finds it first; a mismatch lists the calls
            if type(error) is MergeMismatchError:
                found = "Not awaited so far" in str(error)
                return None if found else "the mismatch should list the calls not awaited"
            return None if type(error) is ContextError else "it should have been a ContextError"
        case "timeout":
            if type(error) is not TimeoutError:
                return "it should have been a TimeoutError"
            return _no_note(program, error) if verdict.replicas else None
        case "stall":
            if type(error) is not StallError:
                return "it should have been a StallError"
            is_unseen = any(UNSEEN_WAYS & set(s.ways) for s in program.statements)
            # Of a child task that waits for a message nothing is said for 10 s.
            is_told = outcome.circles or is_unseen or has_messages(program)
            return None if is_told else "a circle should have been warned of"
        case "replica cancelled":
            found = type(error) is ReplicaCancelledError
            return None if found else "it should have been a ReplicaCancelledError"
    cancelled = type(error).__name__ == "CancelledError"
    return None if cancelled else "it should have been cancelled"


def _no_note(program: Program, error: BaseException | None) -> str | None:
    """Say so if a withdrawal that ended the run for the others is not told of."""
    notes = "".join(getattr(error, "__notes__", ()))
    is_told = len(program.plants) > 1 or "It ended the run for the others: Replica" in notes
    is_told |= program.statement(program.plants[0].uid).kind == "message"  # then it did not
    return None if is_told else "the mismatch should be a note"


def _no_mismatch(program: Program, error: BaseException | None, verdict: Verdict) -> str | None:
    if type(error) is not MergeMismatchError:
        return "it should have been a MergeMismatchError"
    named = {int(number) for text in re.findall(_NAMES, error.reason)
             for number in re.findall(r"\d+", text)}  # fmt: skip
    if not set(verdict.replicas) <= named:
        return f"the mismatch should name replica {verdict.replicas[0]}"
    if [row.replica_id for row in error.rows] != list(range(program.size)):
        return "the mismatch should have a row for every replica"
    return None


_NAMES = r"[Rr]eplicas? (\d+(?:, \d+)*(?: and \d+)?)"


# ---- what it gave ---------------------------------------------------------------------------


def _wrong_result(program: Program, outcome: Outcome) -> str | None:
    order = [s.uid for s in program.statements]
    limits = [order.index(p.uid) for p in program.plants if is_sliding(program, p)]
    sound = order[: min(limits)] if limits else order
    for statement in program.statements:
        members = expected = None
        for replica in statement.members:
            got = outcome.results[replica]
            if statement.uid not in got:
                if outcome.error is None and not _is_spared(program, replica, statement.uid):
                    return f"replica {replica} got nothing of {statement.kind} {statement.uid}"
                continue
            if statement.uid not in sound or program.plant_of(replica, statement.uid):
                continue
            if members is None:
                members, expected = statement.members, model.expected(program, statement)
            assert expected is not None
            found = got[statement.uid]
            if not model.same(found, expected[replica]):
                return (
                    f"{statement.kind} {statement.uid} gave replica {replica} {found!r}, not "
                    f"{expected[replica]!r}"
                )
            if statement.kind in READ_ONLY and _is_writable(found):
                return f"{statement.kind} {statement.uid} gave replica {replica} a writable array"
    return None


def _is_spared(program: Program, replica: int, uid: int) -> bool:
    """Tell whether a replica need not have a result of a statement, though all went well."""
    statement = program.statement(uid)
    if statement.kind in {"start", "device"}:
        return True
    if program.flavour == "plain" and statement.kind in {"finish", "give_up"}:
        return True
    affected = {uid, *statement.handles}
    part = [s.uid for s in program.part_of(replica)]
    for plant in program.plants:
        if plant.replica != replica:
            continue
        if plant.uid in affected:
            return True
        if plant.kind == "return" and part.index(uid) > part.index(plant.uid):
            return True
    return False


def _is_writable(found: Any) -> bool:
    return any(
        isinstance(one, np.ndarray) and one.flags.writeable for one in model.leaves_of(found)
    )


def _wrong_state(program: Program, outcome: Outcome) -> str | None:
    written, assigned = model.states(program, "write"), model.states(program, "assign")
    slides = any(plant.kind in SLIDING - {"return"} for plant in program.plants)
    for u, v, w in outcome.snapshots:
        if slides and v == 2 * u:
            continue  # calls of different statements may have met
        if u not in written or v != 2 * u:
            return f"the variables held {u} and {v}, which no whole write gives: {written}"
        if w not in assigned:
            return f"the variable held {w}, which no whole write gives: {assigned}"
    if outcome.snapshots and outcome.error is None and not program.plants:
        u, _, w = outcome.snapshots[-1]
        if u != written[-1] or w != assigned[-1]:
            return f"the variables hold {u} and {w} at last, not {written[-1]} and {assigned[-1]}"
    return None


def _left_behind(program: Program, outcome: Outcome) -> str | None:
    if outcome.left:
        return f"left behind: {outcome.left}"
    if outcome.probe != (program.size,) * program.size:
        return f"a run on the strategy afterwards gave {outcome.probe}"
    if outcome.circles and not may_stall(program):
        return "a circle was warned of where there is none"
    if outcome.alarms:
        return f"complaints: {outcome.alarms}"
    if outcome.error is None and bool(outcome.warned) != model.forgotten(program):
        return f"{outcome.warned} lost handles were warned of"
    if num_threads() > MAX_THREADS:
        return f"there are {num_threads()} threads"
    return None
