"""Who may import whom, where third parties live, and what files and docstrings look like."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import md4_jax

PACKAGE = Path(md4_jax.__file__).parent
ROOT = PACKAGE.parent

# Room (a folder or a module of the package) -> the rooms that it may import. `protocols` may be
# imported by all, and a room may import itself.
ALLOWED = {
    "protocols": set(),
    "options": set(),
    "processes": set(),
    "objectives": {"processes", "runtime"},
    "auditor": {"processes"},
    "runtime": {"options"},
    "networks": {"runtime"},
    "autoencoders": {"runtime"},
    "data": {"autoencoders", "options", "runtime"},
    "samplers": {"options", "processes", "runtime"},
    "generate": {"options", "runtime"},
    "experiment": {"options", "runtime"},
    "evals": {
        "data", "experiment", "generate", "objectives", "options", "processes", "runtime",
        "samplers",
    },
    "training": {
        "data", "evals", "experiment", "generate", "objectives", "options", "runtime",
    },
    "config": {
        "auditor", "autoencoders", "data", "evals", "experiment", "generate", "networks",
        "objectives", "options", "processes", "runtime", "samplers", "training",
    },
    "perf": {
        "data", "evals", "experiment", "options", "runtime", "samplers", "training",
    },
    "model": {
        "config", "data", "evals", "experiment", "generate", "networks", "objectives", "options",
        "processes", "runtime", "samplers", "training",
    },
    "server": {"generate"},
    "modes": {
        "config", "data", "evals", "experiment", "options", "perf", "runtime", "training",
    },
    "main": {"config", "model", "modes", "runtime", "server"},
}  # fmt: skip

# Third party -> the only rooms that import it.
CAGES = {
    "flax": {"networks"},
    "orbax": {"training"},
    "tensorstore": {"training"},
    "optax": {"experiment", "training"},
    "grain": {"data"},
    "tensorflow_datasets": {"data"},
    "tokenizers": {"data"},
    "pyarrow": {"data"},
    "ml_collections": {"config"},
    "tensorboardX": {"training"},
    "tqdm": {"training", "data"},
    "wandb": {"training"},
    "matplotlib": {"generate"},
    "PIL": {"data", "generate"},
    "scipy": {"samplers"},
    "etils": {"runtime"},
    "safetensors": {"runtime"},
    "huggingface_hub": {"model", "data"},
    "jinja2": {"data"},
    "lm_eval": {"model"},
    "torch": {"evals"},
    "transformers": {"evals"},
    "mauve": {"evals"},
    "fsspec": {"runtime"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "anyio": {"server"},
    "jax": set(ALLOWED) - {"main", "data", "generate", "options"},
    "numpy": set(ALLOWED),
}
# Words that no docstring opens with, so that it says at once what a thing is or does.
NO_OPENING = re.compile(
    r"(Of|What|As|Those|That|Who|From|By|In|On|To|With|Where|When|It|Not|For|At|Also|Because|Until|"
    r"Whose|Here|There|Such|Without|Per|Over|After|Before|How|Its|They|Like|None|Between)\b"
)
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def room(name: str) -> str:
    """The folder of the package that a file lies in, or its own name; __main__ is main."""
    return Path(name).with_suffix("").parts[0].replace("__main__", "main")


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


def entered(name: str) -> set[str]:
    """The rooms that a file imports from, besides its own and `protocols`."""
    return rooms_of(imported(TREES[name])) - {room(name), "protocols"}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_every_file_is_in_a_room_with_a_row():
    outside = [node for node in TREES["__init__.py"].body if not isinstance(node, ast.FunctionDef)]
    names = imported(ast.Module(outside, [])) - {"md4_jax.model.model.Model"}  # for type checkers
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
    assert {room(name) for name in FILES} - {"__init__"} == set(ALLOWED)


def test_files_import_only_the_rooms_that_they_may_enter():
    wrong = {name: entered(name) - ALLOWED[room(name)] for name in FILES if name != "__init__.py"}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def test_files_import_only_the_third_parties_that_live_in_their_room():
    wrong = []
    for name, tree in TREES.items():
        tops = {imported_name.split(".")[0] for imported_name in imported(tree)}
        others = tops - set(sys.stdlib_module_names) - {"md4_jax"}
        wrong += [(name, top) for top in others if room(name) not in CAGES.get(top, set())]
    assert wrong == []


def test_the_tables_hold_no_row_too_many():
    """Every permission is used, so that the table is the picture of the package."""
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for name in FILES.keys() - {"__init__.py"}:
        used[room(name)] |= entered(name)
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


def test_files_are_short():
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    limits = {name: 100 if name == "main.py" else 300 for name in FILES}
    assert {name: n for name, n in lines.items() if n > limits[name]} == {}


def test_functions_are_short_and_take_few_parameters():
    """At most 60 lines, and 7 parameters without self."""
    wrong = []
    for name, tree in TREES.items():
        for node in functions(tree):
            lines = node.end_lineno - node.lineno + 1
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([a for a in given if a.arg not in ("self", "cls")])
            if lines > 60 or count > 7:
                wrong.append(f"{name}: {node.name} has {lines} lines and {count} parameters")
    assert wrong == []


def test_every_public_name_says_what_it_is():
    """A module, class or function without a docstring is a private one or of one line."""
    wrong = [name for name, tree in TREES.items() if not ast.get_docstring(tree)]
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                short = node.end_lineno - node.lineno < 4
                if not (short or ast.get_docstring(node) or node.name == "main"):
                    wrong.append(f"{name}: {node.name}")
    assert wrong == []


def test_docstrings_open_with_a_verb_or_a_noun():
    wrong = []
    for path in [*FILES.values(), *sorted((ROOT / "tools").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = NO_OPENING.match(ast.get_docstring(node) or "")
                if first:
                    name = getattr(node, "name", "the module")
                    wrong.append(f"{path.relative_to(ROOT)}: {name}: {first.group()}")
    assert wrong == []


def test_the_wheel_has_every_folder_of_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {file.parent.relative_to(ROOT) for file in PACKAGE.rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders} | {"md4_jax.configs"}
    assert set(listed["tool"]["setuptools"]["packages"]) == found
