"""The mutation tool: its mutants compile, differ, and leave alone what they should."""

import ast
from pathlib import Path

from tests.mutants.__main__ import mutants_of

SOURCE = '''
def f(a: int = 1, *, b: bool = True) -> int:
    """Return 7."""
    try:
        if a < 2 and not b:
            a += 1
        else:
            print(a)
    finally:
        g(3)
        h(a)
    raise ValueError(f"{a} is not {b == 4}")
'''


def test_mutants_differ_and_compile(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE, encoding="utf-8")

    mutants = list(mutants_of(path))

    texts = [mutant.text for mutant in mutants]
    assert len(set(texts)) == len(texts)
    assert ast.unparse(ast.parse(SOURCE)) not in texts
    assert all(ast.parse(text) for text in texts)
    assert {mutant.what for mutant in mutants} == {
        "constant one larger", "constant negated", "finally emptied", "branches exchanged",
        "and, or exchanged", "comparison flipped", "not removed", "statement dropped",
        "call dropped",
    }  # fmt: skip
    assert all("b == 4" in text and '"""Return 7."""' in text for text in texts)
