"""Config files: Python files with a function get_config, found by path or by shipped name."""

import contextlib
import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import md4_jax
from md4_jax.config.load import unknown
from md4_jax.config.values import spelled
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

# Configs of the package: inside an installed package, beside it in a checkout.
INSTALLED = Path(md4_jax.__file__).resolve().parent / "configs"
CONFIGS = INSTALLED if INSTALLED.is_dir() else PACKAGE_ROOT / "configs"


def load(path: str) -> dict[str, Any]:
    """Returns the dict of get_config() in FILE, or of get_config(ARG) for FILE:ARG.

    FILE may be the name of a shipped config, such as quickstart. If the file has a dict FAMILIES,
    its keys are the known ARGs. UserError if the config cannot be loaded.
    """
    name, _, argument = path.partition(":")
    file = _found(name)
    if not file.is_file():
        known = sorted(f.stem for f in CONFIGS.glob("*.py") if "get_config(" in f.read_text())
        near = difflib.get_close_matches(file.stem, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"--config {path}: there is no such file, and no config of the package has this name."
            f"{hint} Known: {', '.join(known)}"
        )
    said = f"--config {path}: a config is a Python file with a function get_config(), and this is"
    if file.suffix != ".py":
        raise UserError(f"{said} no .py file")
    try:
        with _importable(file):
            module = _executed(file)
            if not callable(getattr(module, "get_config", None)):
                raise UserError(f"{said} without one: see configs/quickstart.py")
            config = module.get_config(*_arguments(path, module, argument))
    except UserError:
        raise
    except Exception as error:
        said = _of_config(error) or f"{type(error).__name__}: {error}"
        raise UserError(f"--config {path}{_line(file, error)}: {said}") from error
    if not isinstance(config, ConfigDict):
        hint = ". Does it lack a return?" if config is None else ""
        raise UserError(
            f"--config {path}: get_config() must return an ml_collections.ConfigDict, not "
            f"{type(config).__name__}{hint}"
        )
    return config.to_dict()


def shipped(name: str) -> Any:
    """Returns the module of a shipped config."""
    file = CONFIGS / f"{name}.py"
    with _importable(file):
        return _executed(file)


def _found(name: str) -> Path:
    """Returns the path of a file or shipped config; configs/ and .py may be omitted."""
    file = Path(name)
    own = CONFIGS / f"{file.stem}.py"
    is_name = file.suffix in ("", ".py") and str(file.parent) in (".", CONFIGS.name)
    return own if is_name and not file.is_file() and own.is_file() else file


@contextlib.contextmanager
def _importable(file: Path) -> Iterator[None]:
    """Makes `from configs import ...` find the folder of the file and that of the package.

    Files beside it can be imported by `import NAME`, but do not shadow other modules.
    """
    folder = file.resolve().parent
    roots, beside = [str(folder.parent), str(CONFIGS.parent)], str(folder)
    sys.path[:] = [*roots, *sys.path, beside]
    try:
        yield
    finally:
        del sys.path[: len(roots)]
        if sys.path[-1] == beside:
            del sys.path[-1]


def _executed(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("md4_jax_config_file", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(file: Path, error: Exception) -> str:
    """Names the line of the file that raised the error; '' if the message already names it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file.absolute()]
    return f", line {lines[-1]}" if lines else ""


def _of_config(error: Exception) -> str:
    """Rewords an error of ConfigDict as the command line would; '' for any other error.

    ConfigDict raises errors for an unknown key and for a value of another type.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    section = frames[-1][0].f_locals.get("self") if frames else None
    if not isinstance(section, ConfigDict):
        return ""
    if isinstance(error, (AttributeError, KeyError)):
        name, known = re.search(r"'(\w+)\\?'", str(error)), list(section.keys())
        is_top = all(isinstance(section[key], ConfigDict) for key in known)
        kind = "section" if is_top else "key"
        return str(unknown(f"config {kind}", name[1], known)) if name else ""
    found = re.search(r"field '(\w+)' .*?\. (.*) is of .* type <class '(\w+)'>$", str(error))
    types = {"bool": bool, "int": int, "float": float, "str": str}
    if found and found[3] in types:
        return f"{found[1]} must be {spelled(types[found[3]])}, not {found[2]}"
    return ""


def _arguments(path: str, module: Any, argument: str) -> list[str]:
    """Returns the arguments of get_config; UserError if one is missing, unknown or too many."""
    takes = bool(inspect.signature(module.get_config).parameters)
    known = list(getattr(module, "FAMILIES", ()))
    if takes != bool(argument):
        named = f"one of {', '.join(known)}" if known else "an argument"
        wants = f"needs {named}: {path}:NAME" if takes else "takes no :ARGUMENT"
        raise UserError(f"--config {path}: its get_config {wants}")
    if known and argument not in known:
        raise unknown(f"name in --config {path}:", argument, known)
    return [argument] if takes else []
