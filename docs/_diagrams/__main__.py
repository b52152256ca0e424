"""Write the pictures of these pages: `python -m docs._diagrams`."""

from pathlib import Path

from .pictures import files

FOLDER = Path(__file__).resolve().parents[1] / "_static"

for name, content in files().items():
    (FOLDER / name).write_text(content, encoding="utf-8")
