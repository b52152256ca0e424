"""Changes a line at a time and asks the tests: `python -m tests.mutants aioreplica/replica`.

A tool for people, not a check: it copies the tree, makes as many mutants of the given files or
packages as `--number` says, chosen by `--seed`, runs the tests beside each (`tests/<package>` and
what `--extra` lists), and prints which lived. A mutant that lives is a fault that no test sees, or
a change that makes no difference; only a reader can tell. Texts, annotations and reprs are left
alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    what: str
    text: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    places = list(_places(tree))
    seen = {ast.unparse(tree)}
    for number, node in enumerate(places):
        for what in _changes(node):
            other = copy.deepcopy(tree)
            _apply(list(_places(other))[number], what)
            text = ast.unparse(ast.fix_missing_locations(other))
            if text not in seen:
                seen.add(text)
                yield Mutant(path, node.lineno, what, text)


def _places(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Walk over what may be changed: no annotations, no texts of errors, no reprs."""
    if isinstance(node, SKIPPED) or getattr(node, "name", "") in {"__repr__", "describe"}:
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _places(child)


def _changes(node: ast.AST) -> list[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            return ["comparison flipped"]
        case ast.UnaryOp(op=ast.Not()):
            return ["not removed"]
        case ast.BoolOp():
            return ["and, or exchanged"]
        case ast.Constant(value=bool()):
            return ["constant negated"]
        case ast.Constant(value=int()):
            return ["constant one larger"]
        case ast.If(orelse=[]) | ast.While():
            return ["condition negated"]
        case ast.If():
            return ["branches exchanged"]
        case ast.Try():
            handled = ["except emptied"] if node.handlers else []
            return handled + (["finally emptied"] if node.finalbody else [])
        case ast.Expr(value=ast.Call()):
            return ["call dropped"]
        case ast.AugAssign() | ast.Delete():
            return ["statement dropped"]
    return []


def _apply(node: ast.AST, what: str) -> None:
    """Change a node where it is."""
    match node:
        case ast.Compare():
            node.ops = [FLIPPED[type(node.ops[0])]()]
        case ast.UnaryOp():
            _become(node, ast.Call(ast.Name("bool", ast.Load()), [node.operand], []))
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant():
            node.value = not node.value if what == "constant negated" else node.value + 1  # type: ignore[operator]  # an int
        case ast.If() if what == "branches exchanged":
            node.body, node.orelse = node.orelse, node.body
        case ast.If() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Try() if what == "except emptied":
            for handler in node.handlers:
                handler.body = [ast.Pass()]
        case ast.Try():
            node.finalbody = [ast.Pass()]
        case _:
            _become(node, ast.Pass())


def _become(node: ast.AST, other: ast.AST) -> None:
    place = {name: getattr(node, name) for name in ("lineno", "col_offset")}
    node.__class__ = other.__class__
    node.__dict__ = {**other.__dict__, **place}


def tests_of(path: Path, extra: list[str]) -> list[str]:
    """Return the tests that a file's mutants have to pass."""
    package = ROOT / "tests" / path.relative_to(ROOT / "aioreplica").parts[0]
    return [str(package.relative_to(ROOT)), *extra] if package.is_dir() else extra


def judge(mutant: Mutant, tree: Path, extra: list[str], timeout_s: float) -> str:
    """Run the tests on a mutant in a copy of the tree; say what became of it."""
    target = tree / mutant.path.relative_to(ROOT)
    before = target.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               "-m", "not slow", *tests_of(mutant.path, extra)]  # fmt: skip
    target.write_text(mutant.text, encoding="utf-8")
    try:
        done = subprocess.run(
            command, cwd=tree, env={"PYTHONPATH": str(tree), "PATH": ""}, timeout=timeout_s,
            capture_output=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "killed (time)"
    finally:
        target.write_text(before, encoding="utf-8")
    return "LIVED" if done.returncode == 0 else "killed"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files or packages of aioreplica")
    parser.add_argument("--number", type=int, default=20, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutant")
    parser.add_argument("--extra", nargs="*", default=[], help="further tests to run")
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    options = parser.parse_args()
    found = [path.resolve() for given in options.paths
             for path in (sorted(given.rglob("*.py")) if given.is_dir() else [given])]  # fmt: skip
    mutants = [mutant for path in found for mutant in mutants_of(path)]
    chosen = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    lived = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        if not options.list:
            left_out = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "_build")
            shutil.copytree(ROOT, tree, ignore=left_out)
        for mutant in chosen:
            fate = ""
            if not options.list:
                fate = judge(mutant, tree, options.extra, options.timeout)
            lived += fate == "LIVED"
            place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            print(f"{fate:14}{place:50}{mutant.what}", flush=True)
    print(f"{len(chosen)} of {len(mutants)} possible mutants, {lived} lived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
