"""Who may import whom, where third parties live, and how long files and functions are."""

import ast
import sys
from pathlib import Path

import pytest

import md4_jax

PACKAGE = Path(md4_jax.__file__).parent
ROOT = PACKAGE.parent

# Room (a folder or a module of the package) -> the rooms that it may import. `protocols` may be
# imported by all, and a room may import itself.
ALLOWED = {
    "protocols": set(),
    "paths": set(),
    "schedules": set(),
    "processes": {"schedules"},
    "objectives": {"processes"},
    "samplers": {"processes"},
    "networks": {"sharding"},
    "data": {"paths"},
    "sharding": set(),
    "metrics": {"paths"},
    "figures": {"paths"},
    "checksums": set(),
    "compiling": set(),
    "checkpoint": {"checksums", "paths", "sharding"},
    "config": {"paths"},
    "optim": {"sharding"},
    "step": {"sharding"},
    "trainlog": {"metrics"},
    "evaluate": {"compiling", "metrics", "sharding"},
    "prompts": {"paths"},
    "diversity": set(),
    "traces": {"paths"},
    "sample": {"compiling", "paths", "prompts", "sharding"},
    "report": {"config", "diversity", "figures", "metrics", "paths", "sharding", "traces"},
    "sections": {
        "checkpoint", "config", "data", "evaluate", "metrics", "networks", "objectives", "optim",
        "paths", "processes", "prompts", "sample", "samplers", "schedules", "sharding", "step",
    },
    "experiment": {"checkpoint", "evaluate", "metrics", "prompts", "sample", "sections", "step"},
    "corpus": {"data", "experiment", "paths", "sections", "sharding"},
    "checks": {"experiment", "processes", "samplers", "sections", "sharding"},
    "build": {
        "checkpoint", "checks", "config", "evaluate", "experiment", "metrics", "objectives",
        "prompts", "sample", "samplers", "sections", "sharding", "step",
    },
    "train": {
        "build", "checkpoint", "compiling", "corpus", "experiment", "metrics", "paths", "report",
        "sharding", "step", "trainlog",
    },
    "hlo": set(),
    "plan": {
        "bench", "compiling", "experiment", "hlo", "sample", "sharding", "step", "train",
    },
    "bench": {
        "compiling", "corpus", "experiment", "hlo", "sample", "samplers", "sections", "sharding",
        "step", "train",
    },
    "runs": {
        "build", "checkpoint", "config", "corpus", "experiment", "paths", "sharding", "train",
    },
    "modes": {
        "bench", "build", "config", "corpus", "data", "experiment", "paths", "plan", "report",
        "runs", "sample", "train",
    },
    "distributed": set(),
    "main": {"distributed", "modes", "paths", "sections"},
}  # fmt: skip

# Third party -> the only rooms that import it.
CAGES = {
    "flax": {"networks"},
    "orbax": {"checkpoint"},
    "optax": {"experiment", "optim", "step"},
    "grain": {"data"},
    "tensorflow_datasets": {"data"},
    "tokenizers": {"data"},
    "huggingface_hub": {"data"},
    "ml_collections": {"config"},
    "tensorboardX": {"metrics"},
    "tqdm": {"metrics", "data"},
    "matplotlib": {"figures", "traces"},
    "PIL": {"traces"},
    "etils": {"paths"},
    "jax": set(ALLOWED)
    - {
        "main",
        "config",
        "sections",
        "figures",
        "data",
        "metrics",
        "trainlog",
        "prompts",
        "hlo",
        "paths",
        "diversity",
        "traces",
    },
    "numpy": set(ALLOWED),
}
FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))


def room(path: Path) -> str:
    """The folder of the package that a file lies in, or its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(tree: ast.AST) -> set[str]:
    """The dotted names of all imports, also of those inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_of(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("md4_jax.")} & set(ALLOWED)


@every_file
def test_a_file_imports_only_the_rooms_that_it_may_enter(path):
    if path == PACKAGE / "__init__.py":
        assert imported(ast.parse(path.read_text())) == set()
        return
    here = room(path)
    assert here in ALLOWED, f"{here} is a new room: give it a row in ALLOWED"
    entered = rooms_of(imported(ast.parse(path.read_text()))) - {here, "protocols"}
    assert entered <= ALLOWED[here], f"{here} imports {entered - ALLOWED[here]}"


@every_file
def test_a_file_imports_only_the_third_parties_that_live_in_its_room(path):
    tops = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
    for top in tops - set(sys.stdlib_module_names) - {"md4_jax"}:
        assert top in CAGES, f"{top} is a new dependency: give it a row in CAGES"
        assert room(path) in CAGES[top], f"{top} is imported outside of {CAGES[top]}"


def test_the_tables_hold_no_row_too_many():
    """Every permission is used, so that the table is the picture of the package."""
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in FILES:
        if room(path) in ALLOWED:
            entered = rooms_of(imported(ast.parse(path.read_text())))
            used[room(path)] |= entered - {room(path), "protocols"}
    assert used == ALLOWED


def test_the_table_has_no_cycle():
    done: set[str] = {"protocols"}
    left = {name: needs for name, needs in ALLOWED.items() if name != "protocols"}
    while left:
        ready = {name for name, needs in left.items() if needs <= done}
        assert ready, f"a cycle in {left}"
        done |= ready
        left = {name: needs for name, needs in left.items() if name not in ready}


def test_configs_import_configs_and_ml_collections_alone():
    for path in (ROOT / "configs").glob("*.py"):
        tops = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert tops <= {"configs", "ml_collections"}, path


@every_file
def test_a_file_is_short(path):
    limit = 80 if room(path) == "main" else 300
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{lines} lines"


@every_file
def test_functions_are_short_and_take_few_parameters(path):
    """At most 60 lines, the loop excepted, and 7 parameters, without self."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        loop = path == PACKAGE / "train.py" and node.name == "train"
        assert lines <= 60 or loop, f"{node.name} has {lines} lines"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        assert count <= 7, f"{node.name} has {count} parameters"


@every_file
def test_every_public_name_says_what_it_is(path):
    """A module, class or function without a docstring is a private one or of one line."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            short = node.end_lineno - node.lineno < 4
            assert short or ast.get_docstring(node) or node.name == "main", node.name
