"""Folder of a model to share: parameters, config, domain and a model card."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import md4_jax
from md4_jax.config.load import FILE
from md4_jax.config.schema import build_section
from md4_jax.data.definitions import files_of
from md4_jax.data.domains import keep_domain
from md4_jax.evals import report
from md4_jax.model import adapters, beginning
from md4_jax.model.agreement import Meaning
from md4_jax.model.layout import exported, with_mask
from md4_jax.model.own_layouts import layout_of
from md4_jax.networks.quality import HEAD
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime import tensors
from md4_jax.runtime.distributed import is_first
from md4_jax.runtime.errors import cause
from md4_jax.runtime.paths import Place, place, replace
from md4_jax.runtime.sharding import max_over_processes, path_name, to_host

CARD = "README.md"
HEAD_LOST = (
    "the export is without the head of network.quality, for which the layout has no place, so it "
    "cannot be sampled from by sample.name='prism'; save keeps the head"
)


def named(path: Any) -> Place:
    """Returns the folder that a user names to write to; UserError if it is empty or no path."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            f"the folder to write to must be text or a Path, not {path!r}: give one, such as "
            "'models/mine'"
        )
    if not str(path).strip():  # it would mean the current directory
        raise UserError(
            "the name of the folder to write to is empty: give one, such as 'models/mine'"
        )
    return place(path, "the folder")


def check_empty(folder: Place) -> None:
    """Raises UserError for a folder with files other than hidden ones, such as those of git."""
    there = folder.exists()
    if there and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder")
    names = sorted(path.name for path in folder.iterdir()) if there else []
    seen = [name for name in names if not name.startswith(".")]
    # No process writes before all have checked.
    if max_over_processes(len(seen)):
        raise UserError(
            f"{folder} is not empty: it holds {', '.join(seen)}. Existing files are not "
            "overwritten: use another folder, or empty this one"
        )


@contextlib.contextmanager
def filling(folder: Place) -> Iterator[None]:
    """Makes a folder whose files are written in the block.

    If the block does not end, because of a full disk or Ctrl-C, they are removed, so that the same
    command can be repeated. UserError if the system fails to write them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} could not be made: {cause(error)}") from error
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in set(folder.iterdir()) - before:
                path.rmtree() if path.is_dir() else path.unlink()
        if not isinstance(error, OSError):
            raise
        said = f"the model could not be written to {folder}: {cause(error)}"
        raise UserError(said) from error


def write(model: Any, folder: Place) -> None:
    """Writes the folder, in the first process; the config is last and marks a complete folder.

    UserError for a folder that is not empty.
    """
    check_empty(folder)
    several = jax.process_count() > 1
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    arrays = {path_name(path): to_host(leaf) if several else leaf for path, leaf in leaves}
    if not is_first():
        return
    content = {
        "package": "md4_jax",
        "version": md4_jax.__version__,
        **model.facts,
        "step": model.step,
        "config": model.config,
    }
    with filling(folder):
        tensors.write(folder, arrays)
        keep_domain(model.domain, folder)
        if model.form is not None:
            model.form.keep(folder)
        if model.layout is not None:
            model.layout.keep(folder)
        (folder / CARD).write_text(card(model), encoding="utf-8")
        replace(folder / FILE, json.dumps(content, indent=2) + "\n")


def export(model: Any, folder: Place) -> Place:
    """Writes the folder in the layout of the model's original project, and returns it.

    A model trained from scratch with this package is written in the first layout of `own_layouts`
    that supports its network. Adapters are merged into the matrices; a head of quality is left out,
    with a warning. UserError for a model that no layout supports, and for a folder that is not
    empty.
    """
    check_empty(folder)
    if model.experiment.network.adapters:
        model = adapters.merged(model)
    layout = model.layout or layout_of(model)
    options = build_section("network", model.config["network"], vocab_size=model.domain.vocab_size)
    meaning = Meaning(options, model.experiment.process, model.config["objective"])
    params = {name: x for name, x in model.params["network"].items() if name != HEAD}
    told, arrays = exported(layout, params, meaning, model.origin)
    parted, lost = beginning.parted(model, layout, options), ""
    if parted is not None:
        is_tied = getattr(options, "tied", False)
        changed = beginning.with_head(told, arrays, parted, model.origin) if is_tied else None
        told, arrays = changed or (told, arrays)
        lost = beginning.warning(parted, has_head=changed is not None or not is_tied)
    if not is_first():
        return folder
    for said in filter(None, (lost, HEAD_LOST if model.experiment.network.quality else "")):
        print(f"warning: {said}", file=sys.stderr)
    with filling(folder):
        tensors.write(folder, arrays, form="pt")
        for name, text in (_files(model.domain, folder) | layout.files).items():
            (folder / name).write_text(text, encoding="utf-8")
        if model.form is not None:
            model.form.export(folder)
        told = with_mask(told, folder, layout.mask)
        replace(folder / FILE, json.dumps(told, indent=2) + "\n")
    return folder


def _files(domain: Any, folder: Place) -> dict[str, str]:
    """Returns the files of the tokenizer; writes the autoencoder of images, which has none."""
    if hasattr(domain, "tokenizer"):
        return files_of(domain.tokenizer)
    domain.keep(folder)
    return {}


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result as it was before JSON, which has no nan."""
    return {key: math.nan if value is None else value for key, value in result.items()}


def card(model: Any) -> str:
    """Returns the model card in Markdown."""
    config, network = model.config, model.experiment.network
    count = network.size(model.params["network"])
    train, optim = config["train"], config["optim"]
    data = ", ".join(f"{key}={value!r}" for key, value in config["data"].items())
    sections = [
        f"{name}: " + ", ".join(f"{k}={v!r}" for k, v in config[name].items())
        for name in ("process", "objective", "network", "tokenizer")
        if name in config
    ]
    bounds = [
        f"- {report.label(name, result['split'])}: {report.line(_numbers(result))}"
        for name, result in model.facts["results"].items()
        if "bits_per_token" in result
    ]
    return "\n".join(
        [
            "---",
            "library_name: md4_jax",
            "tags: [discrete-diffusion, jax]",
            "---",
            f"# {config['objective']['name']} with {count:,} parameters",
            "",
            "Discrete diffusion model trained with md4_jax.",
            "",
            "## Data",
            data,
            "",
            "## Recipe",
            f"{amount(model.step, 'step')} of {amount(train['batch_size'], 'sequence')} of "
            f"{amount(model.length, 'token')}, {optim['name']} with learning rate "
            f"{optim['learning_rate']}, moving average {train['ema']}, seed {train['seed']}. "
            f"Commit {model.facts['commit']}.",
            "",
            *(f"- {line}" for line in sections),
            "",
            "## Bound",
            *(bounds or ["Not evaluated."]),
            "",
            "## Use",
            "```python",
            "import md4_jax",
            "",
            'model = md4_jax.load("FOLDER")  # or hf:USER/NAME',
            "model.sample(num=4)",
            "```",
            "",
        ]
    )
