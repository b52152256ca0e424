"""The rules for source files that no linter checks: sizes, names, docstrings, public paths."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "aioreplica"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 350
# Nearly all of these documents what they forward; mixins hid the length.
FACADES = {"CheckpointManager": 480, "Extended": 410, "OnlineLearner": 545, "Strategy": 500}
FRONT_DOOR = (
    'pip install -e ".[examples]" && python examples/train_digits.py',
    'pip install -e ".[test]" && pytest',
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Every source, parsed once; not kept behind these tests, for collectors to walk."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def nodes(trees: Trees) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path, tree in trees.items() for node in ast.walk(tree))


def packages() -> list[str]:
    """Packages that users may import: an inner one may need a library that is not installed."""
    inits = (path.parent for path in SOURCES if path.name == "__init__.py")
    names = [".".join(folder.relative_to(ROOT).parts) for folder in inits]
    return [name for name in names if "._" not in name]


def public_objects(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Classes and functions of `__all__`: other values have no module of their own."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value


def test_there_are_sources_to_check() -> None:
    assert PACKAGE / "__init__.py" in SOURCES


def test_no_file_is_too_long() -> None:
    lengths = {named(p): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}

    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit"),
    [(FUNCTIONS, MAX_FUNCTION_LINES), ((ast.ClassDef,), MAX_CLASS_LINES)],
    ids=["functions", "classes"],
)
def test_no_definition_is_too_long(
    trees: Trees, kind: tuple[type[ast.stmt], ...], limit: int
) -> None:
    too_long = [
        f"{named(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, node in nodes(trees)
        if isinstance(node, kind)
        and node.end_lineno - node.lineno + 1 > FACADES.get(node.name, limit)
    ]

    assert too_long == []


def test_file_names_say_what_the_file_is_about() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "base.py"}

    assert [named(p) for p in SOURCES if p.name.lstrip("_") in vague] == []


@pytest.mark.slow
def test_every_module_starts_with_one_sentence(trees: Trees) -> None:
    def opening(tree: ast.Module) -> str:
        return (ast.get_docstring(tree) or "").split("\n\n")[0].strip()

    assert [named(p) for p, tree in trees.items() if not opening(tree).endswith(".")] == []


@pytest.mark.slow
def test_no_summary_begins_with_a_question_word(trees: Trees) -> None:
    """A function's begins with a verb, that of a class, a module or a property with a noun."""
    words = {"What", "Who", "Whom", "Whose", "How", "Where", "Whether", "When", "Why", "Which"}
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    summaries = [
        (f"{named(path)}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or "")
        for path, node in nodes(trees)
        if isinstance(node, documented)
    ]

    assert [place for place, text in summaries if text.partition(" ")[0] in words] == []


@pytest.mark.slow
def test_asyncio_barrier_is_not_used(trees: Trees) -> None:
    def is_barrier(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module in {"asyncio", "asyncio.locks"} and any(
                alias.name == "Barrier" for alias in node.names
            )
        return isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.Barrier"

    assert [named(path) for path, node in nodes(trees) if is_barrier(node)] == []


@pytest.mark.slow
def test_package_inits_are_tables_of_contents(trees: Trees) -> None:
    def belongs(statement: ast.stmt) -> bool:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                return True
            case ast.Expr(value=ast.Call(func=ast.Name(id="export_public"))):
                return True
            case ast.Assign(value=ast.Call(func=ast.Name(id="export_lazily"))):
                return True  # the kit loads no library, a first run little of it
        return False

    logic = [
        f"{named(path)}:{statement.lineno}"
        for path, tree in trees.items()
        if path.name == "__init__.py"
        for statement in tree.body
        if not belongs(statement)
    ]

    assert logic == []


@pytest.mark.parametrize("package", packages())
def test_all_lists_existing_names_once(package: str) -> None:
    module = importlib.import_module(package)

    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", packages())
def test_public_names_show_their_public_path(package: str) -> None:
    module = importlib.import_module(package)
    homes = {path: str(value.__module__) for path, value in public_objects(module)}

    wrong = {
        path: home
        for path, home in homes.items()
        if home.split(".")[0] != "aioreplica" or "._" in home
    }
    assert wrong == {}


@pytest.mark.parametrize("package", packages())
def test_public_names_are_documented(package: str) -> None:
    module = importlib.import_module(package)
    bare: list[str] = []
    for path, value in public_objects(module):
        if not inspect.getdoc(value):
            bare.append(path)
        if inspect.isclass(value):
            bare += [f"{path}.{name}" for name in undocumented_members(value)]

    assert bare == []


def undocumented_members(cls: type) -> list[str]:
    """Public methods and properties without a docstring of their own or an inherited one."""
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and not inspect.getdoc(getattr(cls, name))
    ]


@pytest.mark.parametrize("command", FRONT_DOOR)
@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_front_door_commands_are_the_ones_that_ci_runs(file: str, command: str) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if line.strip().startswith(command)] != []


def test_what_pytest_leaves_out_is_a_step_of_its_own() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = settings["tool"]["pytest"]["ini_options"]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    beside = ' -p no:cacheprovider|AIOREPLICA_TEST_PART="[$]chosen" '
    commands = [re.sub(beside, "", line).strip() for line in script.splitlines()]

    assert options["addopts"][:2] == ["-m", "not xslow"]
    assert 'pytest -q -m xslow "${files[@]}"' in commands
    folders = [name for name in options["norecursedirs"] if (ROOT / "tests" / name).is_dir()]
    assert folders == ["cluster_engines", "parameter_server_engine", "repo"]
    assert [name for name in folders if f"pytest -q tests/{name}" not in commands] == []


def test_the_hosted_checks_are_the_local_ones() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")

    assert "- run: .ci/run\n" in workflow


# --- the layer contract -----------------------------------------------------------------------


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the `aioreplica` found in a folder, with the folder's contract."""
    main = "from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", main, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def contract_layers() -> list[list[str]]:
    """The layers of the contract, highest first; each a list of siblings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["id"] == "layers"]
    return [[name.strip(" ()") for name in layer.split("|")] for layer in layers]


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A package with our contract and one empty package for each layer."""
    package = tmp_path / "aioreplica"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in (name for layer in contract_layers() for name in layer):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(settings, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_package_keeps_its_layers() -> None:
    result = lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_imports_where_they_belong_are_legal(skeleton: Path) -> None:
    (skeleton / "aioreplica/replica/__init__.py").write_text("import aioreplica.values\n")
    (skeleton / "aioreplica/autodiff/_jax.py").write_text("import jax\n")
    (skeleton / "aioreplica/devices/_lane.py").write_text("import concurrent.futures\n")

    result = lint_imports(skeleton)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("values", "aioreplica.strategies"),
        ("errors", "aioreplica.tree"),
        ("_export", "aioreplica.errors"),
        ("devices", "jax"),
        ("replica", "concurrent.futures"),
        ("input", "socket"),
    ],
    ids=["upward", "sideways", "from the floor", "optional package", "threads", "network"],
)
def test_an_illegal_import_is_caught(skeleton: Path, importer: str, imported: str) -> None:
    (skeleton / f"aioreplica/{importer}/__init__.py").write_text(f"import {imported}\n")

    result = lint_imports(skeleton)

    assert result.returncode == 1
    assert f"aioreplica.{importer} -> {imported.removesuffix('.futures')}" in result.stdout


@pytest.mark.slow
def test_a_package_outside_every_layer_is_caught(skeleton: Path) -> None:
    (skeleton / "aioreplica/misc").mkdir()
    (skeleton / "aioreplica/misc/__init__.py").touch()

    result = lint_imports(skeleton)

    assert result.returncode == 1
    assert "misc" in result.stdout
