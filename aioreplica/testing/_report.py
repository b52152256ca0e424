"""Report of an exploration, the failure in it, and its timeline as text and as a page."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, final

from ..context import REGISTRY
from ._repro import Program, save_scripts
from ._trace import CALLBACKS_KEY, Step

MAX_LINES: Final = 60
MAX_EQUAL: Final = 3
"""How many equal steps in a row of one task have a line each."""
TELLING: Final = frozenset({"failed", "failure", "complete"})
COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
ROW: Final = 30
COLUMN: Final = 26
LABEL: Final = 220
MAX_COLUMNS: Final = 400
"""How many steps a picture shows, the last ones."""


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """One schedule under which the program fails.

    Attributes:
        error: What it raised, or what was found: `DeadlockError`, `StarvationError`, `LeakError`
            or `NondeterminismError`.
        token: Replays the schedule: `art.replay(main, token)`. It was run from its text before it
            was reported; empty if it has too many decisions, or if none was seen to fail again.
        constraints: What makes it fail, in words; empty if asyncio's own order does, or if no
            constraints were seen to make it fail.
        schedule: Who took each step, by number.
        steps: A failing schedule, step by step: the shrunk one where there is one.
        schedule_number: How many schedules had passed before.
        shrink_runs: How many schedules shrinking took.
        causes: Wake-ups that were lost, in words, where the program got stuck.
    """

    error: BaseException
    token: str
    constraints: tuple[str, ...]
    schedule: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    schedule_number: int = 0
    shrink_runs: int = 0
    causes: tuple[str, ...] = ()

    @property
    def timeline(self) -> str:
        """The failing schedule as text, one line a step."""
        return text_timeline(self.steps)

    @property
    def story(self) -> str:
        """The error, the constraints, how to replay it, and the timeline."""
        lines = [*_error_lines(self.error), *self.summary]
        return "\n".join([*lines, "", self.timeline])

    @property
    def summary(self) -> list[str]:
        """The constraints and how to replay, in lines."""
        lines = [f"It fails when {', and '.join(self.constraints)}."] if self.constraints else []
        is_struck = any(
            effect.endswith("(a fault)") for each in self.steps for effect in each.effects
        )
        if self.steps and not (self.constraints or self.schedule_number or is_struck):
            lines.append("It fails in asyncio's own order: no interleaving is needed.")
        lines += [f"A wake-up is lost: {cause}." for cause in self.causes]
        if not self.token:
            text = "has too many decisions for a token, or none was seen to fail again"
            return [*lines, f"It cannot be replayed: it {text}."]
        lines.append(f"Replay it with art.replay(main, {self.token!r}) or --ar-replay {self.token}")
        return lines

    def save_html(self, path: str | Path) -> Path:
        """Write the timeline as a page, with a lane for each task and device.

        Returns:
            The path of the file.
        """
        target = Path(path)
        text = html_timeline(self.steps, "\n".join(_error_lines(self.error)), self.summary)
        target.write_text(text, encoding="utf-8")
        return target

    def save_png(self, path: str | Path) -> Path:
        """Draw the timeline as a picture, with a lane for each task and device.

        Returns:
            The path of the file.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        target = Path(path)
        title = "\n".join([*_error_lines(self.error)[:3], *self.constraints])
        png_timeline(self.steps, title, target)
        return target


@final
@dataclass(frozen=True, slots=True)
class UnreadReport:
    """A failed report that nobody has looked at, so that its failure may pass for success.

    Attributes:
        text: The failure in words, and its token.
        file: Source file of the call that gave it.
        line: Source line of the call.
    """

    text: str
    file: str
    line: int

    def warn(self) -> None:
        """Warn of it at the call, if it is still unread: nobody has the report any more.

        Warns:
            RuntimeWarning: At the line of the call.
        """
        if any(each is self for each in unread_reports()):
            warnings.warn_explicit(self.text, RuntimeWarning, self.file, self.line)

    def read(self) -> None:
        """Learn that somebody has looked at it; idempotent."""
        unread = unread_reports()
        unread[:] = [each for each in unread if each is not self]


def unread_reports() -> list[UnreadReport]:
    """Return the failed reports of this process that nobody has looked at, in their order."""
    return REGISTRY.once("unread_reports", list)


@final
@dataclass(frozen=True, slots=True, weakref_slot=True)
class Report:
    """Result of an exploration.

    A failed one that is collected before anyone has asked for `failed`, `failure`, `complete`,
    `check()` or its `repr` is a RuntimeWarning with the failure; in pytest the test fails that
    made it.

    Attributes:
        failed: Whether a schedule failed.
        failure: The first that did, or None.
        schedules_run: How many schedules were run, without those of shrinking.
        complete: Whether every schedule was run that there is, within the bound; always False
            after sampling, and after a failure.
        schedules_per_second: How fast that went.
        seed: The seed of the exploration.
        strategy: How schedules were made.
        fidelity: What they varied.
        warnings: What did not fail but could, such as orders of collectives that only chance
            kept; and what was not simulated, such as tasks of a class of the program's own.
        cross_checked: After `exhaustive`, how many schedules of the portfolio were run besides,
            which know no bound on preemptions.
        confirmed: Whether the failure comes at fidelity "asyncio" too, where tasks keep their real
            queue and only events from outside vary: True if a schedule of it fails alike, False
            only if every one was run and none does; None if none was found, or without a failure.
        confirmed_token: Replays the failure at that fidelity; empty if it was not confirmed.
        confirmation_runs: How many schedules of that fidelity were run to find out.
    """

    failed: bool
    failure: Failure | None
    schedules_run: int
    complete: bool
    schedules_per_second: float
    seed: int = 0
    strategy: str = "portfolio"
    fidelity: str = "reorder"
    warnings: tuple[str, ...] = ()
    cross_checked: int = 0
    confirmed: bool | None = None
    confirmed_token: str = ""
    confirmation_runs: int = 0
    _program: Program | None = field(default=None, init=False, repr=False, compare=False)
    _unread: UnreadReport | None = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattribute__(self, name: str) -> object:
            if name in TELLING:
                unread = object.__getattribute__(self, "_unread")
                if unread is not None:
                    unread.read()
            return object.__getattribute__(self, name)

    @property
    def verdict(self) -> str:
        """Line on the failure at fidelity "asyncio": confirmed, excluded or not found; or ""."""
        if self.failure is None:
            return ""
        tried = self.confirmation_runs
        if self.confirmed:
            token = self.confirmed_token
            how = f", as token {token!r} replays" if token else ""
            return f"Confirmed at fidelity 'asyncio', where tasks keep their real queue{how}."
        if self.confirmed is False:
            return (
                f"Excluded at fidelity 'asyncio': every schedule of it was run, {tried}, and none "
                "fails so. It takes a task that is held although it is ready."
            )
        return f"Not found at fidelity 'asyncio' in {tried} schedules." if tried else ""

    def check(self) -> Report:
        """Raise the failure with its trace as a note; return the report itself if there is none.

        Raises:
            BaseException: The error of the failure, with the constraints, the token and the
                timeline as notes.
        """
        __tracebackhide__ = True  # pytest shows the program's own frames
        if self.failure is not None:
            error = self.failure.error
            lines = filter(None, [*self.failure.summary, self.verdict])
            note = "\n".join([*lines, "", self.failure.timeline])
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise error
        return self

    def save_repro(self, path: str | Path) -> tuple[Path, ...]:
        """Write scripts that show the failure to others.

        Of a confirmed failure, the one at `path` needs nothing but Python and the program: it runs
        the program on plain asyncio up to 1,000 times, for a minute at most, with calls, timers and
        sockets that come a little later each time, and says how often it failed so. The other one,
        beside it with `_replay` in its name, replays the token under the kit.

        Args:
            path: A file to be written, such as "repro.py".

        Returns:
            The files that were written; without the first if the failure was not confirmed, or
            where faults or cancellations of the kit may have a part in it, without the second if
            it has no token.

        Raises:
            ValueError: If there is no failure, or no script can import the program: it is not a
                function of a module.
        """
        if self.failure is None or self._program is None:
            raise ValueError("There is no failure to be shown: no schedule that was run fails.")
        title = _error_lines(self.failure.error)[0]
        about = [*self.failure.summary, *filter(None, [self.verdict])]
        return save_scripts(
            Path(path), self._program, title, about, (self.failure.token, self.confirmed_token)
        )

    def __repr__(self) -> str:
        if self.failure is not None:
            end = f"failed: {type(self.failure.error).__name__}, token {self.failure.token}"
        else:
            end = "complete" if self.complete else "no failure"
        return f"<Report {self.strategy} | {self.schedules_run} schedules, {end}>"


def handed_out(report: Report, program: Program, name: str, frame: FrameType) -> Report:
    """Return a report to the user, who has to look at it if it is a failed one.

    Args:
        report: What was found.
        program: In which.
        name: What was called for it.
        frame: Where.
    """
    failure, file, line = report.failure, frame.f_code.co_filename, frame.f_lineno
    if failure is not None:
        told = [*_error_lines(failure.error)[:1], *failure.summary, report.verdict]
        lines = "\n".join(filter(None, told))
        unread = UnreadReport(
            f"art.{name}, called at {file}:{line}, found a schedule that fails, and nobody looked "
            f"at its report. Call report.check(), which raises the failure.\n{lines}",
            file,
            line,
        )
        unread_reports().append(unread)
        object.__setattr__(report, "_program", program)
        object.__setattr__(report, "_unread", unread)
        weakref.finalize(report, unread.warn)  # when it is collected, at exit at the latest
    return report


def _error_lines(error: BaseException, indent: str = "") -> list[str]:
    """Return an error's class and text; those of a group are listed below it."""
    lines = [f"{indent}{type(error).__name__}: {error}"]
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            lines += _error_lines(each, indent + "  ")
    return lines


def text_timeline(steps: Sequence[Step]) -> str:
    """Return one line a step; the middle of a long schedule is left out.

    Columns: number of the step, virtual time in seconds, who, what.
    """
    width = max((len(step.who) for step in steps), default=0)
    lines = []
    for number, step, times in _folded(steps):
        line = f"{number:5d}  {step.time_s:9.4f}  {step.who:<{width}}  {step.story}"
        lines.append(line if times == 1 else f"{line} ({times} times)")
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} steps ...", *lines[-half:]]
    return "\n".join(lines)


def _folded(steps: Sequence[Step]) -> Iterator[tuple[int, Step, int]]:
    """Yield steps with their numbers, and how often: a step may come many times in a row.

    A scope of anyio tells a task that it is cancelled until the task listens; a task may spin.
    """
    number = 1
    for _, group in groupby(steps, key=lambda step: (step.who, step.story, step.time_s)):
        same = list(group)
        if same[0].key == CALLBACKS_KEY or len(same) > MAX_EQUAL:
            yield number, same[0], len(same)
        else:
            yield from ((at, step, 1) for at, step in enumerate(same, number))
        number += len(same)


def html_timeline(steps: Sequence[Step], title: str, notes: Sequence[str]) -> str:
    """Return a page that needs nothing else: steps from left to right, a lane for each."""
    lanes = list(dict.fromkeys(step.lane for step in steps))
    row_of = {lane: row for row, lane in enumerate(lanes)}
    width = LABEL + COLUMN * (len(steps) + 1)
    height = ROW * (len(lanes) + 1)
    size = f'width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>']
    for lane, row in row_of.items():
        y = ROW * row + ROW
        parts.append(f'<text x="4" y="{y}">{escape(lane)}</text>')
        parts.append(f'<line x1="{LABEL}" y1="{y - 4}" x2="{width}" y2="{y - 4}" stroke="#ddd"/>')
    flights: dict[str, int] = {}
    for number, step in enumerate(steps):
        x, y = LABEL + COLUMN * number, ROW * row_of[step.lane] + ROW
        colour = COLOURS[row_of[step.lane] % len(COLOURS)]
        if step.lane != step.who:  # an op: a bar from its start to its end
            if step.did == "starts":
                flights[step.who] = x
            elif step.who in flights:
                start = flights[step.who]
                parts.append(_bar(start, y - 9, x - start + COLUMN - 6, 10, colour, step, number))
                continue
        parts.append(_bar(x, y - 14, COLUMN - 6, 20, colour, step, number))
    parts.append("</svg>")
    shown = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        "<!doctype html><meta charset='utf-8'>"
        f"<title>{escape(title.splitlines()[0])}</title>"
        f"<h1 style='font:bold 16px sans-serif;white-space:pre-wrap'>{escape(title)}</h1>"
        f"<div style='font:13px sans-serif'>{shown}</div>"
        f"<div style='overflow-x:auto'>{''.join(parts)}</div>"
        f"<pre>{escape(text_timeline(steps))}</pre>\n"
    )


def png_timeline(steps: Sequence[Step], title: str, target: Path) -> None:
    """Write a picture: steps from left to right, a lane for each participant.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A timeline as PNG is drawn with matplotlib, which is not installed. Install it with "
            "`pip install aioreplica[examples]`, or use save_html, which needs nothing."
        ) from error
    lanes = list(dict.fromkeys(step.lane for step in steps))
    columns = min(len(steps), MAX_COLUMNS)
    shown = steps[-columns:]
    figure = Figure(figsize=(3 + 0.28 * columns, 1.6 + 0.4 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    first = len(steps) - columns + 1
    for number, step in enumerate(shown, first):
        row = lanes.index(step.lane)
        axes.barh(row, 0.8, left=number - 0.4, height=0.6, color=COLOURS[row % len(COLOURS)])
        for effect in step.effects:
            whom = effect.partition(" ")[2].removesuffix(" (a fault)")
            if whom in lanes:
                axes.annotate(
                    "", (number + 0.5, lanes.index(whom)), (number, row),
                    arrowprops={"arrowstyle": "->", "color": "#888"},
                )  # fmt: skip
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(first - 1, first + columns)
    axes.set_xlabel("step")
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=9, wrap=True)
    figure.savefig(target, format="png", dpi=120)


def _bar(x: int, y: int, width: int, height: int, colour: str, step: Step, number: int) -> str:
    text = f"step {number + 1}, {step.time_s:.4f} s: {step.who}: {step.story}"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}">'
        f"<title>{escape(text)}</title></rect>"
    )
