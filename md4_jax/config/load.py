"""Configs as plain dicts: overriding keys, comparing and storing."""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import md4_jax
from md4_jax.config import imports
from md4_jax.config.mistakes import ELSEWHERE, all_of
from md4_jax.config.older import added, with_current_names
from md4_jax.config.values import parse
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime import paths
from md4_jax.runtime.commit import commit

FILE = "config.json"
# Location of the data; a check of the tokens tells whether it is the same data.
PLACES = ("data.path", "data.data_dir", "data.chat_template", "tokenizer.path")
# Keys that may change when a run is continued, because they do not change what is learned.
FREE = ("audit.", "mesh.", "evals.", "eval.", "sample.", "checkpoint.", "log.", "bench.", "plan.")
FREE += ("train.seconds", "train.microbatches", "data.store", "data.keep_files")
FREE += PLACES
# Keys that may also differ where a run is not trained further.
OF_USE = ("network.parameters",)
# Largest number of names that an error lists.
MOST_OWNERS, MOST_NAMED = 3, 5
# Sections of an evaluator that the command line may add.
OF_EVALUATORS = ("data", "objective", "features")


def override(
    config: dict[str, Any],
    assignments: Mapping[str, str],
    type_of: Callable[[str, str, str], Any],
) -> None:
    """Sets each 'section.key' in place, parsing its text as the type of the old value.

    Without an old value, type_of(section, name, key) gives the type; it is None for a key that the
    class of that name does not have. Names are set first and drop such keys. `evals.NAME.name` adds
    an evaluator.
    """
    in_order = sorted(assignments.items(), key=lambda item: _order(item[0]))
    all_of(*(partial(_set, config, *item, type_of) for item in in_order))


def _set(
    config: dict[str, Any], dotted: str, text: str, type_of: Callable[[str, str, str], Any]
) -> None:
    *parents, key = dotted.split(".")
    section = _section(config, parents, key)
    if not parents and key not in config:
        raise unknown("config section", key, sections(config))
    path, value = ".".join(parents), parse(text, section.get(key))
    if key == "name":
        for old in [k for k in section if k != "name" and type_of(path, text, k) is None]:
            del section[old]
    elif key not in section and type_of(path, section.get("name", ""), key) is str:
        value = text
    if isinstance(section.get(key), dict) and not isinstance(value, dict):
        ends = f", such as --config.{dotted}.every=0 --config.{dotted}.final=False, which end it"
        raise UserError(
            f"{dotted} must be a section, not {value!r}: set its keys, "
            f"--config.{dotted}.KEY=VALUE{ends if parents == ['evals'] else ''}"
        )
    section[key] = value


def _order(dotted: str) -> tuple[bool, int]:
    """Sorts names before other keys, and outer sections before inner ones."""
    return not dotted.endswith(".name"), dotted.count(".")


def _section(config: dict[str, Any], parents: list[str], key: str) -> dict[str, Any]:
    """Returns the section of a key, adding it where that is allowed; else UserError."""
    section = config
    for depth, parent in enumerate(parents):
        if _may_be_new(parents, depth, key):
            section.setdefault(parent, {"name": "none"} if parent == "reward" else {})
        if not isinstance(section.get(parent), dict):
            if parents[:2] == ["data", "parts"] and len(parents) > 2:
                part = ".".join(parents[:3])
                raise UserError(
                    f"{part} needs a source: give --config.{part}.name=text, or another"
                )
            error = unknown("config section", ".".join(parents[: depth + 1]), sections(config))
            hints = {
                "evals": f". To add an evaluator give --config.evals.{parent}.name=KIND",
                "process": ". To add it give --config.process.insertion.name=linear",
            }
            is_one = depth == 1 and (parents[0] == "evals" or parent == "insertion")
            raise UserError(f"{error}{hints.get(parents[0], '') if is_one else ''}")
        section = section[parent]
    return section


def _may_be_new(parents: list[str], depth: int, key: str) -> bool:
    """Returns whether the command line may add the section parents[depth]."""
    if parents[0] == "evals" and depth == 2:
        return parents[2] in OF_EVALUATORS
    if parents == ["sample", "reward"]:  # older runs lack it
        return depth == 1
    if parents == ["process", "insertion"]:  # the second schedule of process.name=insertion
        return (depth, key) == (1, "name")
    if parents[:2] == ["data", "parts"]:  # parts of a mixture
        return depth > 0 and (len(parents), key) == (3, "name")
    return (parents[0], depth, len(parents), key) == ("evals", 1, 2, "name")


def sections(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted names of all sections."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += [prefix + key, *sections(value, f"{prefix}{key}.")]
    return found


def merged(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `data` section with changes; a new `name` drops the keys of the old source."""
    if changes.get("name", section["name"]) == section["name"]:
        return {**section, **changes}
    of_all = {field.name for field in dataclasses.fields(DataOptions)}
    return {**{key: value for key, value in section.items() if key in of_all}, **changes}


def unknown(
    what: str, name: str, known: list[str], choice: str = "", owners: Sequence[str] = ()
) -> UserError:
    """Makes the error for an unknown name; it lists the known names and suggests one.

    owners: values of the key `choice` that have the name
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    if owners:
        more = " and others" if len(owners) > MOST_OWNERS else ""
        named = ", ".join(map(repr, owners[:MOST_OWNERS]))
        hint = f", which belongs to {choice}={named}{more}."
    return UserError(f"unknown {what} {name!r}{hint} Known: {', '.join(sorted(known))}")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ('section.key', value) pairs, with lists in place of tuples."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value


def store(workdir: paths.Place, config: Mapping[str, Any]) -> None:
    """Writes config.json with the package's version and commit, atomically."""
    content = {
        "package": "md4_jax",
        "version": md4_jax.__version__,
        "commit": commit(),
        "config": config,
    }
    paths.replace(workdir / FILE, json.dumps(content, indent=2) + "\n")


def stored(workdir: paths.Place, *, may_be_empty: bool = False) -> dict[str, Any] | None:
    """Returns the config of a run directory, with current key names; None for a new directory.

    may_be_empty: also return None for an empty file, which the caller then rewrites. UserError if
    this package did not write it.
    """
    file = workdir / FILE
    if not paths.exists(file):
        imports.check_ended(workdir)
        if (workdir / "checkpoints").exists():
            raise UserError(
                f"{workdir} holds checkpoints but no {FILE}, which says what was trained: restore "
                "it from a copy, or use another --workdir"
            )
        return None
    try:
        text = file.read_text("utf-8")
        if not text.strip("\0 \n"):
            return _of_empty(file, may_be_empty)
        content = json.loads(text)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of too many digits
        raise UserError(f"{file} is not readable JSON: {error}. Use another --workdir") from error
    is_ours = isinstance(content, dict) and content.get("package") == "md4_jax"
    if not is_ours or not isinstance(content.get("config"), dict):
        raise UserError(f"{file} was not written by md4_jax. Use another --workdir")
    return with_current_names(content["config"])


def check_one(folder: paths.Place) -> None:
    """Raises UserError for a folder that contains runs but is not a run itself."""
    try:
        below = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError:  # the folder may be entered but not listed
        return
    runs = [run.name for run in below if (run / FILE).exists() and (run / "checkpoints").exists()]
    if runs:
        named = ", ".join([*runs[:MOST_NAMED], *(["..."] if runs[MOST_NAMED:] else [])])
        raise UserError(f"{folder} is a folder of runs ({named}): name one")


def missing(workdir: paths.Place | None) -> UserError:
    """Makes the error for a command without --config if --workdir holds no run.

    Raises UserError for a folder of runs. For a checkpoint of a run, the error names the run.
    """
    where = "no --workdir of a run"
    if workdir is not None:
        check_one(workdir)
        run, step, where = workdir.parent.parent, workdir.name, f"no run in --workdir {workdir}"
        if workdir.parent.name == "checkpoints" and step.isdecimal() and paths.exists(run / FILE):
            return UserError(
                f"{workdir} is a checkpoint of a run: give --workdir {run} and "
                f"--config.eval.checkpoint={step}"
            )
    return UserError(
        f"there is no --config and {where}: give --config FILE, such as a file of configs/, to "
        "start a run, or the --workdir of a run to use its config"
    )


def _of_empty(file: paths.Place, may_be_empty: bool) -> None:
    if not may_be_empty:
        raise UserError(
            f"{file} is empty, perhaps after a power failure. Repeat the command that trained the "
            "run, with its --config: it writes the file again"
        )
    print(f"warning: {file} was empty; it is written again from --config", flush=True)


def check_same(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    workdir: paths.Place,
    free: tuple[str, ...] = (),
) -> None:
    """Raises UserError if two configs differ; it lists all keys that do.

    A key that did not exist when the run began may be ''. With a constant learning rate,
    train.num_steps may change, because no earlier step depends on it.

    free: keys that may differ in addition to FREE; the name of the optimizer may not
    """
    before, after = (added(config) | dict(flatten(config)) for config in (old, new))
    missing = object()
    after = {key: value for key, value in after.items() if key in before or value != ""}
    is_constant = before.get("optim.decay") == after.get("optim.decay") == "constant"
    differing = [
        key
        for key in sorted(before.keys() | after.keys())
        if not _of_all(key).startswith((*FREE, *free)) or key == "optim.name"
        if before.get(key, missing) != after.get(key, missing)
        if not (key == "train.num_steps" and is_constant)
    ]
    if not differing:
        return
    lines = [
        f"  {key}: {before[key]!r} in the workdir, {after[key]!r} asked for"
        if key in before and key in after
        else f"  {key}: only in {'the workdir' if key in before else 'what is asked for'}"
        for key in differing
    ]
    steps = (
        f"\nThe learning rate (optim.decay={before.get('optim.decay')!r}) was planned for "
        f"{before.get('train.num_steps')} steps. To train longer, use another --workdir and "
        f"--config.train.initial={workdir}, which starts from the parameters of this run; only a "
        "run with optim.decay='constant' can be given more steps"
    )
    raise UserError(
        f"{workdir} was made by another config:\n"
        + "\n".join(lines)
        + "\nuse another --workdir, or use the old values to continue that run"
        + (steps if "train.num_steps" in differing else "")
        + (f"\n{ELSEWHERE}" if any(key.startswith("data.") for key in differing) else "")
    )


def moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Returns whether the location of the data has changed since the run began."""
    before, after = dict(flatten(old)), dict(flatten(new))
    places = [key for key in before.keys() | after.keys() if _of_all(key) in PLACES]
    return any(before.get(key) != after.get(key) for key in places)


def is_place(key: str) -> bool:
    """Returns whether a key is a location of data, which may differ between machines."""
    name = _of_all(re.sub(r"^evals\.\w+\.(data\.)?", "data.", key))
    return name in (*PLACES, "data.store")


def _of_all(key: str) -> str:
    """Returns data.KEY for a key of a part of a mixture, data.parts.NAME.KEY."""
    return re.sub(r"^data\.parts\.\w+\.", "data.", key)
