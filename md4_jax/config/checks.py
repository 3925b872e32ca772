"""Checks of config sections against each other; errors name the keys and both values."""

import dataclasses
from typing import Any, NamedTuple

from md4_jax.config.schema import REGISTRIES
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment, sample_block, sample_length
from md4_jax.generate.pictures import has_pictures
from md4_jax.generate.prompts import templates
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import batch_shards
from md4_jax.samplers.transforms import Transform
from md4_jax.training.keeping import check_best


class Component(NamedTuple):
    """Objective or sampler that process and network must suit: config key, name and object."""

    key: str
    name: str
    value: Any


def validate(experiment: Experiment) -> None:
    """Raises UserError if sections of the config do not fit together."""
    shards = batch_shards(experiment.mesh)
    parts = experiment.train.microbatches * shards
    mesh = "x".join(str(size) for size in experiment.mesh.shape.values())
    if experiment.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={experiment.train.batch_size} must be divisible by "
            f"train.microbatches={experiment.train.microbatches} times the {shards} batch shards "
            f"of the mesh {mesh} (data x fsdp x tensor), which is {parts}"
        )
    bounds = _bounds(experiment)
    for name, evaluator in bounds.items():
        if evaluator.sequences(experiment) % shards:
            raise UserError(
                f"evals.{name}.batch_size={evaluator.sequences(experiment)} must be divisible by "
                f"the {shards} batch shards of the mesh {mesh} (data x fsdp x tensor)"
            )
    _check_fit(experiment)
    _check_steps(experiment)
    _check_sampling(experiment)
    for name, evaluator in bounds.items():
        _check_bound(experiment, f"evals.{name}", evaluator)
    for name, evaluator in experiment.evals.items():
        if hasattr(evaluator, "check"):
            evaluator.check(experiment, f"evals.{name}")
    _check_classes(experiment)
    check_best(experiment)
    if experiment.data.separate_documents and experiment.domain.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _check_classes(experiment: Experiment) -> None:
    """Raises UserError if network.classes is not the number of classes of the data."""
    labels = getattr(experiment.domain, "labels", None)
    classes = experiment.config["network"].get("classes")
    if None in (labels, classes) or classes == len(labels):
        return
    if not labels:
        raise UserError(
            f"network.classes={classes} needs data with labels, such as data.name='text' with "
            "data.label_key, or images with data.labels=True; this data has none"
        )
    names = ", ".join(map(repr, labels[:20])) + (", ..." if len(labels) > 20 else "")
    raise UserError(
        f"network.classes={classes} must be {len(labels)}, the number of classes of the data "
        f"(data.label_key; of images, data.labels): {names}"
    )


def _bounds(experiment: Experiment) -> dict[str, Any]:
    """Returns the evaluators that report a bound, by name."""
    return {name: e for name, e in experiment.evals.items() if isinstance(e, LikelihoodBound)}


def _objective_name(objective: Any) -> str:
    """Returns the name of an objective in a config, also of one that `auto` chose."""
    names = {cls: name for name, cls in REGISTRIES["objective"].items()}
    kind = type(objective)
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}")


def _components(experiment: Experiment) -> list[Component]:
    """Returns the objective, the objectives of the evaluators, and the sampler."""
    config = experiment.config
    return [
        Component("objective", config["objective"]["name"], experiment.objective),
        *(
            Component(f"evals.{name}.objective", _objective_name(e.objective), e.objective)
            for name, e in experiment.evals.items()
            if hasattr(e, "objective")
        ),
        Component("sample", config["sample"]["name"], experiment.sampler_step),
    ]


def _check_bound(experiment: Experiment, key: str, evaluator: Any) -> None:
    """Raises UserError if an evaluator's objective is no bound or does not fit its lengths."""
    name = _objective_name(evaluator.objective)
    if not evaluator.objective.is_bound(experiment.process):
        raise UserError(
            f"{key}.objective.name={name!r} is not a bound of -log p with this process "
            f"({experiment.process}), so it cannot be reported as a likelihood; any_order "
            "with weight_power=1 is a bound for every schedule"
        )
    length = evaluator.data.get("length", experiment.data.length)
    if hasattr(evaluator.objective, "check_length"):
        evaluator.objective.check_length(length)
    stride = evaluator.stride
    if not stride:
        return
    if stride > length:
        raise UserError(f"{key}.stride={stride} must be at most data.length={length}")
    block = getattr(evaluator.objective, "block", 1)
    if (length - stride) % block:
        raise UserError(
            f"{key}.stride={stride} leaves data.length={length} - {stride} tokens before each "
            f"sequence, which {key}.objective.block={block} must divide"
        )


def _check_fit(experiment: Experiment) -> None:
    """Raises UserError if an objective or a sampler does not fit the process or network."""
    chosen = experiment.config["process"]["name"]
    network = experiment.network
    for section, name, component in _components(experiment):
        key, needs = f"{section}.name", component.needs
        if not isinstance(experiment.process, needs.processes):
            fits = " or ".join(map(repr, _satisfying(needs.processes)))
            raise UserError(f"{key}={name!r} needs process.name={fits}, not {chosen!r}")
        if needs.time and network.time_free:
            raise UserError(f"{key}={name!r} needs network.time_conditioning=True: {needs.why}")
        if needs.causal != network.causal:
            raise UserError(
                f"{key}={name!r} needs network.causal={needs.causal}: "
                + (
                    "it predicts each token from those before it"
                    if needs.causal
                    else "it predicts each token from those on both sides"
                )
            )
        if needs.blockwise and not network.blockwise:
            raise UserError(
                f"{key}={name!r} needs network.local_width=0 and network.causal=False: a "
                "convolution would cross the borders of blocks, and a causal mask would cut blocks"
            )
        allowed = needs.parametrisations
        # Some processes have no parametrisation.
        own = getattr(experiment.process, "parametrisation", None)
        if None not in (allowed, own) and own not in allowed:
            fits = " or ".join(repr(option) for option in allowed)
            raise UserError(
                f"{key}={name!r} needs process.parametrisation={fits}, not {own!r}: {needs.why}"
            )


def _satisfying(protocols: tuple[type, ...]) -> list[str]:
    """Returns the names of registered processes that satisfy one of these protocols."""
    made = {name: make(vocab_size=2) for name, make in REGISTRIES["process"].items()}
    return [name for name, process in made.items() if isinstance(process, protocols)]


def _check_sampling(experiment: Experiment) -> None:
    """Raises UserError if sampling settings do not fit together."""
    transform, plain = experiment.sampler_step.transform, Transform()
    for key, value in dataclasses.asdict(transform).items():
        if (
            value != getattr(plain, key)
            and getattr(experiment.process, "parametrisation", "") == "score"
        ):
            raise UserError(
                f"sample.{key}={value} needs a distribution over symbols, but with "
                "process.parametrisation='score' the network predicts ratios"
            )
    _check_label(experiment)
    _check_image(experiment)
    _check_blocks(experiment)
    if experiment.sample.stride >= experiment.data.length:
        raise UserError(
            f"sample.stride={experiment.sample.stride} must be less than data.length="
            f"{experiment.data.length}, the window that it moves"
        )
    templates(experiment.prompt, experiment.domain, sample_length(experiment))


def _check_label(experiment: Experiment) -> None:
    """Raises UserError if the network does not have the class `sample.label`."""
    label, classes = experiment.sample.label, experiment.config["network"].get("classes", 0)
    if label >= 0 and not classes:
        raise UserError(
            f"sample.label={label} asks for samples of a class, and network.classes=0: train "
            "with network.classes on data with labels, or leave sample.label=-1"
        )
    if label >= classes > 0:
        raise UserError(
            f"sample.label={label} must be below network.classes={classes}; -1 means no label"
        )


def _check_image(experiment: Experiment) -> None:
    """Raises UserError if samples of images would have another size than the images."""
    options, whole = experiment.sample, experiment.data.length
    if not has_pictures(experiment.domain):
        return
    for key, value, allowed in (
        ("length", options.length, (0, whole)),
        ("stride", options.stride, (0,)),
    ):
        if value not in allowed:
            raise UserError(
                f"sample.{key}={value} is for text: this run has images of {whole} values; leave "
                f"sample.{key}=0"
            )


def _check_blocks(experiment: Experiment) -> None:
    """Raises UserError if `sample` options do not fit sampling block by block."""
    options, block = experiment.sample, sample_block(experiment)
    if not block:
        for key in ("memory", "stop", "min_entropy"):
            if getattr(options, key):
                raise UserError(
                    f"sample.{key}={getattr(options, key)} is for sampling block by block: "
                    "set sample.block too"
                )
        return
    window = options.memory or experiment.data.length
    for key, size in (("sample.length", sample_length(experiment)), ("sample.memory", window)):
        if size % block:
            raise UserError(f"sample.block={block} must divide {key}={size}")
    if not (isinstance(experiment.process, RevealsMasks) and experiment.network.blockwise):
        raise UserError(
            f"sample.block={block} needs process.name='masking', network.local_width=0 and "
            "network.causal=False"
        )
    if options.stride:
        raise UserError(
            f"sample.stride={options.stride} is for sampling without blocks: set it to 0. With "
            f"sample.block={block} each block sees the sample.memory={window} tokens before it"
        )
    if options.judge and (options.stop or options.min_entropy):
        raise UserError(
            f"sample.judge={options.judge!r} needs texts of one length, and sample.stop="
            f"{options.stop!r} with sample.min_entropy={options.min_entropy} may end some early"
        )
    if options.min_entropy and window > sample_length(experiment):
        raise UserError(
            f"sample.min_entropy={options.min_entropy} is computed on the last sample.memory="
            f"{window} tokens, more than sample.length={sample_length(experiment)}"
        )
    if options.stop and experiment.domain.eot_id is None:
        raise UserError(
            "sample.stop='end_of_text' needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _check_steps(experiment: Experiment) -> None:
    """Raises UserError if objectives or the sampler have other steps than the process."""
    for component in _components(experiment):
        if hasattr(component.value, "check"):
            component.value.check(experiment.process)
    for value in (experiment.objective, experiment.sampler_step):
        if hasattr(value, "check_length"):
            value.check_length(experiment.data.length)
    own, sample = experiment.process.timesteps, experiment.sample
    if own is not None and (sample.steps, sample.grid) != (own, "uniform"):
        raise UserError(
            f"sample.steps={sample.steps} and sample.grid={sample.grid!r} must be {own} and "
            f"'uniform': the process has process.timesteps={own} steps and a matrix for each"
        )
