"""Check built pages: `python -m tests.docs.check_html FOLDER`.

Every link inside the pages leads to a page, and to a place on it, that exists; every picture is
there and says what it shows; every name in the index leads to its description; no page takes long
to load. Links to other hosts are not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAX_BYTES = 600_000
FOLLOWED = {"a": "href", "img": "src", "link": "href", "script": "src"}


@dataclass
class Page(HTMLParser):
    """What a page has: places, links, pictures without a text, names that lead nowhere."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unlinked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._name = False
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        self._depth += tag == "a"
        if target := found.get(FOLLOWED.get(tag, "")):
            self.links.append(target)
        if tag == "img" and not found.get("alt"):
            self.silent.append(str(found.get("src")))
        if tag == "code" and "py-obj" in (found.get("class") or "").split() and not self._depth:
            self._name = True

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "a"

    def handle_data(self, data: str) -> None:
        if self._name:
            self.unlinked.append(data)
            self._name = False


def problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        yield f"There are no pages in {folder}."
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        if (size := path.stat().st_size) > MAX_BYTES:
            yield f"{name}: it has {size} bytes, {MAX_BYTES} at most"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif target in pages and unquote(parts.fragment) not in {"", *pages[target].ids}:
                yield f"{name}: {link} leads to no place on that page"
        yield from (f"{name}: the picture {each} has no text" for each in page.silent)
        if path.stem == "api_index":
            yield from (f"{name}: {each} has no description" for each in page.unlinked)


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    sys.exit("\n".join(found) if found else 0)
