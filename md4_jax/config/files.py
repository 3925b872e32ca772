"""Config files: Python files with a function get_config, found by path or by shipped name."""

import contextlib
import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import md4_jax
from md4_jax.config.load import unknown
from md4_jax.config.mistakes import messages_of, raise_all, texts
from md4_jax.config.values import spelled
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

# Configs of the package: inside an installed package, beside it in a checkout.
INSTALLED = Path(md4_jax.__file__).resolve().parent / "configs"
CONFIGS = INSTALLED if INSTALLED.is_dir() else PACKAGE_ROOT / "configs"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
            found = config.to_dict() if isinstance(config, ConfigDict) else None
    except UserError:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise UserError(
            f"--config {path}{_line(file, error)}: it ends the program by exit({code}), but a "
            "config must return its values or raise an error"
        ) from error
    except Exception as error:
        said = _of_config(error) or f"{type(error).__name__}: {error}"
        raise UserError(f"--config {path}{_line(file, error)}: {said}") from error
    if found is None:
        hint = ". Does it lack a return?" if config is None else ""
        raise UserError(
            f"--config {path}: get_config() must return an ml_collections.ConfigDict, not "
            f"{type(config).__name__}{hint}"
        )
    return found


@contextlib.contextmanager
def named(path: str | None, check: Callable[[], object]) -> Iterator[None]:
    """Adds the config file, and the line, to those mistakes found in the block that it contains.

    path: --config, if it was given. check: raises the mistakes of the file by itself
    """
    try:
        yield
    except UserError as error:
        if path is None:
            raise
        own = messages_of(check)
        raise_all([_located(path, text) if text in own else text for text in texts(error)], error)


def _located(path: str, message: str) -> str:
    """Adds to the message of a mistake the config file and the line with its key.

    message: text that begins with the key, or has its name in quotes, as those of `schema` do
    """
    key = re.match(r"unknown .*?'(\w+)'|(?:\w+\.)*(\w+)[ :=]", message)
    name = re.escape((key[1] or key[2]) if key else "")
    text = _found(path.partition(":")[0]).read_text("utf-8", "replace")
    pattern = re.compile(rf"\b{name}[\"']?\]?\s*[=:]|[\"']{name}[\"']" if name else "(?!)")
    lines = [n for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    return f"--config {path}{f', line {lines[-1]}' if lines else ''}: {message}"


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


def _line(file: Path, error: BaseException) -> str:
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
    found = re.search(r"field '(\w+)' .*?\. (.*) is of .*? type (.*) and .* type (.*)$", str(error))
    if not found:
        return ""
    key, value, *kinds = found.groups()
    given, wanted = (kind.removeprefix("<class '").removesuffix("'>") for kind in kinds)
    types = {"bool": bool, "int": int, "float": float, "str": str}
    if wanted.endswith("ConfigDict"):
        return f"{key} must be a section (a dict), not {value}"
    if wanted not in types:
        return ""
    shown = repr(value) if given == "str" else value
    named = f" of the type {given}" if given not in types else ""
    return f"{key} must be {spelled(types[wanted])}, not {shown}{named}"


def _arguments(path: str, module: Any, argument: str) -> list[str]:
    """Returns the arguments of get_config; UserError if one is missing, unknown or too many."""
    parameters = inspect.signature(module.get_config).parameters.values()
    takes, known = bool(parameters), list(getattr(module, "FAMILIES", ()))
    needs = any(each.default is each.empty and each.kind not in VARIADIC for each in parameters)
    if (needs and not argument) or (argument and not takes):
        named = f"one of {', '.join(known)}" if known else "an argument"
        wants = f"needs {named}: {path}:NAME" if takes else "takes no :ARGUMENT"
        raise UserError(f"--config {path}: its get_config {wants}")
    if argument and known and argument not in known:
        raise unknown(f"name in --config {path}:", argument, known)
    return [argument] if argument else []
