"""The timeline of a schedule: as text, one line a step, and as a page with a lane for each."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from ._story import Step

MAX_LINES: Final = 60
COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
ROW: Final = 30
COLUMN: Final = 26
LABEL: Final = 220


def text_timeline(steps: Sequence[Step]) -> str:
    """Return one line a step; the middle of a long schedule is left out.

    Columns: number of the step, virtual time in seconds, who, what.
    """
    width = max((len(step.who) for step in steps), default=0)
    lines = [
        f"{number:5d}  {step.time_s:9.4f}  {step.who:<{width}}  {step.did}"
        for number, step in enumerate(steps, 1)
    ]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} steps ...", *lines[-half:]]
    return "\n".join(lines)


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


def _bar(x: int, y: int, width: int, height: int, colour: str, step: Step, number: int) -> str:
    text = f"step {number + 1}, {step.time_s:.4f} s: {step.who}: {step.did}"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}">'
        f"<title>{escape(text)}</title></rect>"
    )
