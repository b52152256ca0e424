"""Nothing here is a test: `python -m tests.libraries` runs these programs, with their libraries."""

collect_ignore_glob = ["*.py"]
