"""A small pen: boxes, arrows and labels in the two palettes, as SVG.

Lengths are in the units of the viewBox. Pictures are about 500 wide with letters of 14, so that
they can be read on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

LETTER = 14
WIDTH_OF_A_LETTER = 0.53  # of its height, on average: wide enough for common sans-serif fonts


@dataclass(frozen=True)
class Palette:
    """The colours of one theme; each kind of box has those of its inside and its edge."""

    ink: str
    soft: str
    line: str
    kinds: dict[str, tuple[str, str]]


LIGHT = Palette(
    ink="#1f2933",
    soft="#5d6976",
    line="#8593a3",
    kinds={
        "plain": ("#f4f6f8", "#b4bfcb"),
        "frame": ("none", "#b4bfcb"),
        "device": ("#d9f0e8", "#2f7d6d"),
        "meeting": ("#fde9d2", "#c9731d"),
        "value": ("#e4e9fc", "#4b5fc0"),
        "loop": ("#f6e3ee", "#a8487f"),
    },
)
DARK = Palette(
    ink="#e6e9ee",
    soft="#a3aebc",
    line="#7b8797",
    kinds={
        "plain": ("#22272e", "#58626f"),
        "frame": ("none", "#58626f"),
        "device": ("#16382f", "#57b79d"),
        "meeting": ("#44301b", "#e6a04e"),
        "value": ("#242d52", "#8c9cf0"),
        "loop": ("#432538", "#d985b4"),
    },
)
PALETTES = {"light": LIGHT, "dark": DARK}


@dataclass
class Picture:
    """One picture in one palette.

    Raises:
        ValueError: From the methods, if something does not fit: a text into its box, a box into
            the picture.
    """

    width: int
    height: int
    title: str
    palette: Palette
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str | Sequence[str] = (),
        *,
        kind: str = "plain",
        top: bool = False,
        dashed: bool = False,
        code: bool = False,
    ) -> None:
        """Draw a box with lines of text in its middle, or at its top left."""
        if x < 0 or y < 0 or x + width > self.width or y + height > self.height:
            raise ValueError(f"The box at {x}, {y} with {text!r} leaves the picture.")
        fill, edge = self.palette.kinds[kind]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"{dash}/>'
        )
        lines = [text] if isinstance(text, str) else list(text)
        if not any(lines):
            return
        if max(map(len, lines)) * LETTER * WIDTH_OF_A_LETTER > width - 4:
            raise ValueError(f"{lines!r} does not fit into a box {width:g} wide.")
        if top:
            for number, line in enumerate(lines):
                self.label(x + 10, y + 20 + 18 * number, line, code=code)
            return
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.label(x + width / 2, first + 18 * number, line, anchor="middle", code=code)

    def label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        soft: bool = False,
        code: bool = False,
        size: int = LETTER,
    ) -> None:
        """Write a line of text; `x` is its start, or what the anchor says."""
        length = len(text) * size * WIDTH_OF_A_LETTER
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < -2 or left + length > self.width + 2:
            raise ValueError(f"The text {text!r} leaves the picture.")
        colour = self.palette.soft if soft else self.palette.ink
        font = ' font-family="ui-monospace, Consolas, monospace"' if code else ""
        shown = size - 1 if code else size
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{shown}" '
            f'fill="{colour}"{font}>{escape(text)}</text>'
        )

    def line(self, *points: tuple[float, float], dashed: bool = False, kind: str = "") -> None:
        """Draw a line through the points."""
        self._path(points, dashed=dashed, kind=kind, end="")

    def arrow(self, *points: tuple[float, float], dashed: bool = False, kind: str = "") -> None:
        """Draw a line through the points with a head at the end."""
        self._path(points, dashed=dashed, kind=kind, end=' marker-end="url(#head)"')

    def _path(
        self, points: Sequence[tuple[float, float]], *, dashed: bool, kind: str, end: str
    ) -> None:
        colour = self.palette.kinds[kind][1] if kind else self.palette.line
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{way}" fill="none" stroke="{colour}" '
            f'stroke-width="1.6"{dash}{end}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{self.palette.line}"/></marker></defs>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"
