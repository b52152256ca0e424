"""The directive `picture`: one of the drawn pictures, in the colours of the reader's theme."""

from __future__ import annotations

from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives


class DrawnPicture(Directive):
    """Shows `_static/NAME-light.svg` or `-dark.svg`; `alt` says what there is to see."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return both pictures, of which the theme shows one."""
        if "alt" not in self.options:
            raise self.error("A picture needs an alt text.")
        name, alt = self.arguments[0], self.options["alt"]
        return [
            nodes.image(uri=f"/_static/{name}-{theme}.svg", alt=alt, classes=[f"only-{theme}"])
            for theme in ("light", "dark")
        ]


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("picture", DrawnPicture)
    return {"parallel_read_safe": True}
