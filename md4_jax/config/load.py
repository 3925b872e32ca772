"""Configs: reading a file, overriding keys, comparing and storing. Plain dicts come out."""

import ast
import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import md4_jax
from md4_jax.protocols import UserError
from md4_jax.runtime import paths
from md4_jax.runtime.commit import PACKAGE_ROOT, commit

FILE = "config.json"
# What may differ when a run is continued: it decides where and how often, never what is learned.
FREE = ("mesh.", "eval.", "sample.", "checkpoint.", "log.", "bench.", "plan.", "train.seconds")

# Keys that older runs and short configs leave out -> what they mean by that.
ADDED = {"data.windows": "grid"}
# (section, its name, key, value) that a run may have stored -> what that value is called now.
RENAMED = {("process", "rates", "kernel", "gaussian"): "gaussian_symmetric"}


def load(path: str) -> dict[str, Any]:
    """The dict of get_config() of FILE, or of get_config(ARG) for FILE:ARG.

    UserError when it cannot be made; an unknown ARG lists the known ones, where the file has
    them as the keys of its one dict of that kind, FAMILIES.
    """
    name, _, argument = path.partition(":")
    file = Path(name)
    if not file.is_file():
        raise UserError(f"--config {path}: there is no such file")
    if file.suffix != ".py":
        raise UserError(f"--config {path}: a config is a Python file with a get_config()")
    roots = [str(file.resolve().parent.parent), str(PACKAGE_ROOT)]
    spec = importlib.util.spec_from_file_location("md4_jax_config_file", file)
    module = importlib.util.module_from_spec(spec)
    sys.path[:0] = roots
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*_arguments(path, module, argument))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--config {path}: {type(error).__name__}: {error}") from error
    finally:
        del sys.path[: len(roots)]
    if not isinstance(config, ConfigDict):
        raise UserError(f"--config {path}: get_config() must return an ml_collections.ConfigDict")
    return config.to_dict()


def _arguments(path: str, module: Any, argument: str) -> list[str]:
    """What get_config is called with; UserError if that is not what it takes."""
    takes = bool(inspect.signature(module.get_config).parameters)
    known = list(getattr(module, "FAMILIES", ()))
    if takes != bool(argument):
        wants = f"needs one of {', '.join(known)}: FILE:NAME" if takes else "takes no :ARGUMENT"
        raise UserError(f"--config {path}: its get_config {wants}")
    if known and argument not in known:
        raise unknown(f"name in --config {path}:", argument, known)
    return [argument] if takes else []


def override(
    config: dict[str, Any],
    assignments: Mapping[str, str],
    keeps: Callable[[str, str, str], bool],
) -> None:
    """Sets 'section.key' -> text in place; a text becomes the type that the key has.

    A section's name is set first: arguments that the new constructor does not
    take (keeps(section, name, key) is False) go with the old name.
    """
    for dotted, text in sorted(assignments.items(), key=lambda item: not _is_name(item[0])):
        *parents, key = dotted.split(".")
        section = config
        for depth, parent in enumerate(parents):
            if not isinstance(section.get(parent), dict):
                where = ".".join(parents[: depth + 1])
                raise unknown("config section", where, sections(config))
            section = section[parent]
        if not parents and key not in config:
            raise unknown("config section", key, sections(config))
        if key == "name":
            for old in [
                k for k in section if k != "name" and not keeps(".".join(parents), text, k)
            ]:
                del section[old]
        section[key] = parse(text, section.get(key))


def _is_name(dotted: str) -> bool:
    return dotted.endswith(".name")


def parse(text: str, current: Any) -> Any:
    """A command-line text as a value: text stays text where the key holds text."""
    if isinstance(current, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def sections(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all sections."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += [prefix + key, *sections(value, f"{prefix}{key}.")]
    return found


def unknown(what: str, name: str, known: list[str]) -> UserError:
    """The error for a name that is not known: lists the known ones, suggests the nearest."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UserError(f"unknown {what} {name!r}{hint} Known: {', '.join(sorted(known))}")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """('section.key', value) pairs."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value


def store(workdir: paths.Place, config: Mapping[str, Any]) -> None:
    """Writes config.json with the package's version and commit, whole or not at all."""
    content = {
        "package": "md4_jax",
        "version": md4_jax.__version__,
        "commit": commit(),
        "config": config,
    }
    paths.replace(workdir / FILE, json.dumps(content, indent=2) + "\n")


def stored(workdir: paths.Place) -> dict[str, Any] | None:
    """The config of a run directory, in the names of today; None for a new one.

    UserError if it is not one of ours.
    """
    file = workdir / FILE
    if not paths.exists(file):
        if (workdir / "checkpoints").exists():
            raise UserError(
                f"{workdir} holds checkpoints but no {FILE}: they are not of this package; "
                "choose another --workdir"
            )
        return None
    try:
        content = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file} is not readable JSON: {error}; choose another --workdir"
        ) from error
    if not isinstance(content, dict) or content.get("package") != "md4_jax":
        raise UserError(f"{file} was not written by md4_jax; choose another --workdir")
    return _with_names_of_today(content["config"])


def _with_names_of_today(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a run whose version called the same thing by another name."""
    for (section, name, key, old), new in RENAMED.items():
        part = config.get(section)
        if isinstance(part, dict) and (part.get("name"), part.get(key)) == (name, old):
            config = {**config, section: {**part, key: new}}
    return config


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], workdir: paths.Place) -> None:
    """UserError that lists every key in which a run's config and the asked one differ.

    A key that the run's version did not have yet is no difference where it is empty.
    """
    before, after, missing = ADDED | dict(flatten(old)), ADDED | dict(flatten(new)), object()
    after = {key: value for key, value in after.items() if key in before or value != ""}
    differing = [
        f"  {key}: {before[key]!r} in the workdir, {after[key]!r} asked for"
        if key in before and key in after
        else f"  {key}: only in {'the workdir' if key in before else 'what is asked for'}"
        for key in sorted(before.keys() | after.keys())
        if not key.startswith(FREE) and before.get(key, missing) != after.get(key, missing)
    ]
    if differing:
        raise UserError(
            f"{workdir} was made by another config:\n" + "\n".join(differing) + "\n"
            "choose another --workdir, or give the old values back to continue that run"
        )
