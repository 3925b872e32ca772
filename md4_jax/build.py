"""The composition root: config sections -> objects, and every check that spans sections."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from md4_jax import config as config_lib
from md4_jax.checkpoint import CheckpointOptions
from md4_jax.config import unknown
from md4_jax.data import SOURCES, TOKENIZERS, loader
from md4_jax.data.loader import TrainIterator, train_iterator
from md4_jax.data.packing import token_stream
from md4_jax.data.tokenizers import from_json
from md4_jax.evaluate import EvalOptions, Evaluator
from md4_jax.metrics import LogOptions
from md4_jax.networks import NETWORKS
from md4_jax.objectives import OBJECTIVES
from md4_jax.optim import OPTIMIZERS
from md4_jax.processes import PROCESSES
from md4_jax.protocols import Batch, Network, Objective, UserError
from md4_jax.sample import SampleOptions
from md4_jax.samplers import GRIDS, SAMPLERS
from md4_jax.samplers.transforms import Transform, check_transform
from md4_jax.schedules import SCHEDULES
from md4_jax.sharding import MeshOptions, batch_shards, make_mesh
from md4_jax.step import TrainOptions, make_eval_step

TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The part of the `data` section that does not depend on the source."""

    length: int = 256
    separate_documents: bool = False

    def __post_init__(self):
        if self.length < 2:
            raise UserError(f"data.length must be at least 2, not {self.length}")


# A section is `name` and arguments of its registry's entry, or fields of one class.
REGISTRIES = {
    "data": SOURCES,
    "tokenizer": TOKENIZERS,
    "process": PROCESSES,
    "process.schedule": SCHEDULES,
    "process.schedule.base": SCHEDULES,
    "objective": OBJECTIVES,
    "network": NETWORKS,
    "optim": OPTIMIZERS,
    "eval.objective": OBJECTIVES,
    "sample": SAMPLERS,
}
CLASSES = {
    "data": (DataOptions,),
    "train": (TrainOptions,),
    "mesh": (MeshOptions,),
    "eval": (EvalOptions,),
    "sample": (SampleOptions, Transform),
    "checkpoint": (CheckpointOptions,),
    "log": (LogOptions,),
}
# Arguments that build supplies itself, or that a nested section makes.
SUPPLIED = ("vocab_size", "transform", "schedule", "base", "objective")


class Experiment(NamedTuple):
    """Everything that a mode of `main` needs, made from one config."""

    config: dict[str, Any]
    tokenizer: Any
    network: Network
    process: Any
    objective: Objective
    eval_objective: Objective
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    sampler_step: Any
    grid: np.ndarray
    mesh: Mesh
    data: DataOptions
    train: TrainOptions
    eval: EvalOptions
    sample: SampleOptions
    checkpoint: CheckpointOptions
    log: LogOptions


def arguments_of(section: str, name: str | None) -> dict[str, Any]:
    """The keys that a section may have, with their types; UserError for an unknown name."""
    takers = list(CLASSES.get(section, ()))
    if section in REGISTRIES:
        if name not in REGISTRIES[section]:
            raise unknown(f"{section}.name", str(name), list(REGISTRIES[section]))
        takers.append(REGISTRIES[section][name])
    found = {}
    for taker in takers:
        found |= {f.name: f.type for f in dataclasses.fields(taker) if f.init}
        found |= {k: v for k, v in typing.get_type_hints(taker).items() if k in found}
    return {k: v for k, v in found.items() if k not in ("vocab_size", "transform")}


def keeps(section: str, name: str, key: str) -> bool:
    """Whether a section keeps that key when it gets that name."""
    return section not in REGISTRIES or key in arguments_of(section, name)


def check_keys(config: Mapping[str, Any]) -> None:
    """UserError for an unknown, missing or wrongly typed section or key."""
    top = {path for path in [*REGISTRIES, *CLASSES] if "." not in path}
    for section in config:
        if section not in top:
            raise unknown("config section", section, sorted(top))
    for section in sorted(top):
        if section not in config:
            raise UserError(f"the config has no section {section!r}; start from configs/base.py")
        _check_section(section, config[section])


def _check_section(path: str, section: Any) -> None:
    if not isinstance(section, Mapping):
        raise UserError(f"{path} must be a section (a dict), not {section!r}")
    known = arguments_of(path, section.get("name"))
    for key, value in section.items():
        nested = f"{path}.{key}"
        if key == "name" and path in REGISTRIES:
            continue
        if nested in REGISTRIES:
            _check_section(nested, value)
        elif key not in known or key in SUPPLIED:
            takes = [*known, *(["name"] if path in REGISTRIES else [])]
            raise unknown(f"key in {path}", key, takes)
        elif not _fits(value, known[key]):
            raise UserError(f"{nested} must be {_spell(known[key])}, not {value!r}")


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a config value has an annotated type; whole numbers are floats too."""
    if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(wanted))
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, (tuple, list)) and all(
            _fits(item, typing.get_args(wanted)[0]) for item in value
        )
    if wanted in (None, type(None)):
        return value is None
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted) if wanted in (bool, str) else False


def _spell(wanted: Any) -> str:
    options = [o for o in typing.get_args(wanted) or (wanted,) if o in (bool, int, float, str)]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return " or ".join(dict.fromkeys(words[o] for o in options)) or str(wanted)


def make(path: str, section: Mapping[str, Any], **supplied: Any) -> Any:
    """The object of a section with a name: nested sections are made first."""
    constructor = REGISTRIES[path][section["name"]]
    takes = inspect.signature(constructor).parameters
    arguments = dict(supplied)
    for key, value in section.items():
        if f"{path}.{key}" in REGISTRIES:
            arguments[key] = make(f"{path}.{key}", value)
        elif key in takes and key != "name":
            arguments[key] = tuple(value) if isinstance(value, list) else value
    missing = [
        key
        for key, parameter in takes.items()
        if parameter.default is parameter.empty and key not in arguments
    ]
    if missing:
        raise UserError(f"{path}.{missing[0]} is needed by {path}.name={section['name']!r}")
    return constructor(**{key: value for key, value in arguments.items() if key in takes})


def fields(cls: type, section: Mapping[str, Any]) -> Any:
    """An options class from those keys of a section that it has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in section.items() if key in names})


def tokenizer_and_source(config: Mapping[str, Any], workdir: Path | None) -> tuple[Any, Any]:
    """The tokenizer (the run's own if it has one, else fitted to the training split) and source."""
    source = make("data", config["data"])
    kept = workdir / TOKENIZER_FILE if workdir else None
    if kept is not None and kept.exists():
        return from_json(kept.read_text()), source
    tokenizer = make("tokenizer", config["tokenizer"])
    return tokenizer.fit(source.documents("train")), source


def stored_tokenizer(workdir: Path) -> Any:
    """The tokenizer that a run keeps, so that sampling needs no data; UserError if it is gone."""
    kept = workdir / TOKENIZER_FILE
    if not kept.exists():
        raise UserError(f"{kept} is missing: train in this --workdir first")
    return from_json(kept.read_text())


def stream(source: Any, tokenizer: Any, split: str) -> np.ndarray:
    """The tokens of a split, memory-mapped."""
    return token_stream(source, tokenizer, split)


def experiment(config: dict[str, Any], tokenizer: Any) -> Experiment:
    """Builds and checks everything but the data."""
    train = fields(TrainOptions, config["train"])
    sample = fields(SampleOptions, config["sample"])
    optimizer, rate = make("optim", config["optim"]).build(train.num_steps)
    if sample.grid not in GRIDS:
        raise unknown("sample.grid", sample.grid, list(GRIDS))
    transform = fields(Transform, config["sample"])
    check_transform(transform.temperature, transform.top_k, transform.top_p)
    built = Experiment(
        config=config,
        tokenizer=tokenizer,
        network=make("network", config["network"], vocab_size=tokenizer.vocab_size).build(),
        process=make("process", config["process"], vocab_size=tokenizer.vocab_size),
        objective=make("objective", config["objective"]),
        eval_objective=make("eval.objective", config["eval"]["objective"]),
        optimizer=optimizer,
        learning_rate=rate,
        sampler_step=make("sample", config["sample"], transform=transform),
        grid=GRIDS[sample.grid](sample.steps),
        mesh=make_mesh(fields(MeshOptions, config["mesh"])),
        data=fields(DataOptions, config["data"]),
        train=train,
        eval=fields(EvalOptions, config["eval"]),
        sample=sample,
        checkpoint=fields(CheckpointOptions, config["checkpoint"]),
        log=fields(LogOptions, config["log"]),
    )
    validate(built)
    return built


def validate(built: Experiment) -> None:
    """UserError, with the numbers, for sections that do not go together."""
    shards = batch_shards(built.mesh)
    parts = built.train.microbatches * shards
    mesh = "x".join(str(size) for size in built.mesh.shape.values())
    if built.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={built.train.batch_size} must be divisible by "
            f"train.microbatches={built.train.microbatches} times the {shards} batch shards of "
            f"the mesh {mesh} (data x fsdp x tensor), which is {parts}"
        )
    if eval_batch_size(built) % shards:
        raise UserError(
            f"eval.batch_size={eval_batch_size(built)} must be divisible by the {shards} batch "
            f"shards of the mesh {mesh} (data x fsdp x tensor)"
        )
    if not built.eval_objective.is_bound(built.process):
        raise UserError(
            f"eval.objective.name={built.config['eval']['objective']['name']!r} is not a bound of "
            f"-log p with this process ({built.process}), so it cannot be reported as a "
            "likelihood; any_order (weight_power=1) is one for every schedule"
        )
    if built.data.separate_documents and built.tokenizer.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{built.config['tokenizer']['name']!r} has none"
        )


def eval_batch_size(built: Experiment) -> int:
    return built.eval.batch_size or built.train.batch_size


def data_sizes(built: Experiment, source: Any) -> dict[str, loader.SplitSize]:
    """Tokenises every split that the run will need; UserError now for one that is too short."""
    splits = ["train", *(["validation"] if built.eval.every else []), built.eval.split]
    sizes = {
        split: loader.split_size(stream(source, built.tokenizer, split), built.data.length)
        for split in dict.fromkeys(splits)
    }
    for split, size in sizes.items():
        if size.tokens == 0 or (split == "train" and size.sequences == 0):
            raise UserError(
                f"the {split} split has {size.tokens} tokens, fewer than "
                f"{'one sequence of' if split == 'train' else 'needed with'} "
                f"data.length={built.data.length}: take a larger corpus or lower data.length"
            )
    return sizes


def train_batches(built: Experiment, source: Any) -> TrainIterator:
    """This process's rows of the endless shuffled training batches."""
    return train_iterator(
        stream(source, built.tokenizer, "train"),
        built.data.length,
        batch_size=built.train.batch_size,
        seed=built.train.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        segments_eot=_segments_eot(built),
    )


def eval_batches(built: Experiment, source: Any, split: str) -> Iterator[Batch]:
    """This process's rows of a whole split, in order."""
    return loader.eval_batches(
        stream(source, built.tokenizer, split),
        built.data.length,
        batch_size=eval_batch_size(built),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        segments_eot=_segments_eot(built),
    )


def _segments_eot(built: Experiment) -> int | None:
    return built.tokenizer.eot_id if built.data.separate_documents else None


def evaluator(built: Experiment) -> Evaluator:
    """What estimates the bound of the `eval` section."""
    step = make_eval_step(built.network, built.eval_objective, built.eval.draws, built.eval.seed)
    return Evaluator(step, built.mesh, built.eval.draws, characters=built.tokenizer.is_character)


def load_config(path: str, assignments: Mapping[str, str]) -> dict[str, Any]:
    """A config file with its overrides applied and its keys checked."""
    config = config_lib.load(path)
    config_lib.override(config, assignments, keeps)
    check_keys(config)
    return config
