"""Whole services over HTTP: left out of a plain `pytest`, since they need web frameworks.

`python -m pytest tests/web` runs these; it needs redis-server, nginx, and
`pip install -e ".[test,web]" litestar river redis trustme`.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out, unless the command line names it or something in it."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True
