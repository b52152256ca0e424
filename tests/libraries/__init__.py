"""Programs over popular libraries of others: none may alarm, and planted bugs have to be found.

`python -m tests.libraries` runs them; it needs the packages named in `.ci/run`.
"""
