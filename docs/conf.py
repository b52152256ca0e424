"""Sphinx configuration: Markdown pages through MyST, the reference from docstrings."""

import sys
from pathlib import Path
from typing import Any

import aioreplica

sys.path.insert(0, str(Path(__file__).parent))

project = "aioreplica"
author = "the aioreplica contributors"
copyright = author
release = aioreplica.__version__
version = release

extensions = [
    "_api_index",
    "_pictures",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_diagrams"]
default_role = "code"  # `name` in a docstring is code
html_theme = "furo"
pygments_dark_style = "one-dark"  # the default underlines every imported name
html_title = f"aioreplica {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(Path(__file__).parent / "_search_scorer.js")

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
}
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a documented field is listed with its class, and only there
# Sections of this project's docstrings that Google's convention does not know.
napoleon_custom_sections = [
    "Shapes",
    "Units",
    "Cancellation",
    "Determinism",
    "Invariants",
    "Source",
]


def skip_tuple_fields(
    _app: object, _what: str, _name: str, member: object, skip: bool, _options: Any
) -> bool | None:
    """Leave out the fields of named tuples: their generated text says nothing."""
    return True if type(member).__name__ == "_tuplegetter" else skip or None


def setup(app: Any) -> None:
    """Connect the hook above."""
    app.connect("autodoc-skip-member", skip_tuple_fields)
