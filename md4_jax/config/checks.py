"""Every check that spans sections of a config, in the user's words."""

import dataclasses
from typing import Any, NamedTuple

from md4_jax.config.schema import REGISTRIES
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment, sample_block, sample_length
from md4_jax.generate.prompts import templates
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import batch_shards
from md4_jax.samplers.transforms import Transform


class User(NamedTuple):
    """What the process and the network must suit: its key in the config, its name, itself."""

    key: str
    name: str
    user: Any


def validate(experiment: Experiment) -> None:
    """UserError, with the numbers, for sections that do not go together."""
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
    if experiment.data.separate_documents and experiment.domain.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _check_classes(experiment: Experiment) -> None:
    """UserError for a network with other classes than the data."""
    labels = getattr(experiment.domain, "labels", None)
    classes = experiment.config["network"].get("classes")
    if None in (labels, classes) or classes == len(labels):
        return
    if not labels:
        raise UserError(
            f"network.classes={classes} needs data with labels, such as data.name='text' with "
            "data.label_key; this data has none"
        )
    names = ", ".join(map(repr, labels[:20])) + (", ..." if len(labels) > 20 else "")
    raise UserError(
        f"network.classes={classes} must be {len(labels)}, the number of classes of the data "
        f"(data.label_key): {names}"
    )


def _bounds(experiment: Experiment) -> dict[str, Any]:
    """The evaluators that report a bound, by name."""
    return {name: e for name, e in experiment.evals.items() if isinstance(e, LikelihoodBound)}


def _objective_name(objective: Any) -> str:
    """The name of an objective in a config, which for `auto` is not written there."""
    names = {cls: name for name, cls in REGISTRIES["objective"].items()}
    kind = type(objective)
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}")


def _users(experiment: Experiment) -> list[User]:
    """The objectives, those of evaluators too, and the sampler."""
    config = experiment.config
    return [
        User("objective", config["objective"]["name"], experiment.objective),
        *(
            User(f"evals.{name}.objective", _objective_name(e.objective), e.objective)
            for name, e in experiment.evals.items()
            if hasattr(e, "objective")
        ),
        User("sample", config["sample"]["name"], experiment.sampler_step),
    ]


def _check_bound(experiment: Experiment, key: str, evaluator: Any) -> None:
    """UserError for an evaluator whose objective is no bound, or does not fit its text."""
    name = _objective_name(evaluator.objective)
    if not evaluator.objective.is_bound(experiment.process):
        raise UserError(
            f"{key}.objective.name={name!r} is not a bound of -log p with this process "
            f"({experiment.process}), so it cannot be reported as a likelihood; any_order "
            "(weight_power=1) is one for every schedule"
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
    """UserError for an objective or a sampler that is not defined for the process."""
    chosen = experiment.config["process"]["name"]
    network = experiment.network
    for section, name, user in _users(experiment):
        key = f"{section}.name"
        needs = user.needs
        if not isinstance(experiment.process, needs.processes):
            fits = " or ".join(map(repr, _able(needs.processes)))
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
                f"{key}={name!r} needs network.local_width=0 and network.causal=False, which a "
                "border between blocks would cut"
            )
        allowed = needs.parametrisations
        # A process without one leaves nothing to choose.
        own = getattr(experiment.process, "parametrisation", None)
        if None not in (allowed, own) and own not in allowed:
            fits = " or ".join(repr(option) for option in allowed)
            raise UserError(
                f"{key}={name!r} needs process.parametrisation={fits}, not {own!r}: {needs.why}"
            )


def _able(protocols: tuple[type, ...]) -> list[str]:
    """The names of the processes in the registry that have one of these protocols."""
    made = {name: make(vocab_size=2) for name, make in REGISTRIES["process"].items()}
    return [name for name, process in made.items() if isinstance(process, protocols)]


def _check_sampling(experiment: Experiment) -> None:
    """UserError for sampling settings that do not go together."""
    transform, plain = experiment.sampler_step.transform, Transform()
    for key, value in dataclasses.asdict(transform).items():
        if (
            value != getattr(plain, key)
            and getattr(experiment.process, "parametrisation", "") == "score"
        ):
            raise UserError(
                f"sample.{key}={value} needs a distribution over symbols, and with "
                "process.parametrisation='score' the network gives ratios"
            )
    _check_label(experiment)
    _check_blocks(experiment)
    if experiment.sample.stride >= experiment.data.length:
        raise UserError(
            f"sample.stride={experiment.sample.stride} must be less than data.length="
            f"{experiment.data.length}, the window that it moves"
        )
    templates(experiment.prompt, experiment.domain, sample_length(experiment))


def _check_label(experiment: Experiment) -> None:
    """UserError for samples of a class that the network does not have."""
    label, classes = experiment.sample.label, experiment.config["network"].get("classes", 0)
    if label >= 0 and not classes:
        raise UserError(
            f"sample.label={label} asks for samples of one class and network.classes=0: train "
            "with network.classes on data that have labels, or leave sample.label=-1"
        )
    if label >= classes > 0:
        raise UserError(
            f"sample.label={label} must be below network.classes={classes}; -1 is for no label"
        )


def _check_blocks(experiment: Experiment) -> None:
    """UserError for text that cannot be sampled block by block as it is asked for."""
    options, block = experiment.sample, sample_block(experiment)
    if not block:
        for key in ("memory", "stop", "min_entropy"):
            if getattr(options, key):
                raise UserError(
                    f"sample.{key}={getattr(options, key)} is for text that is sampled block by "
                    "block: give sample.block too"
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
            f"sample.stride={options.stride} moves a window over a text that is sampled at once; "
            f"with sample.block={block} every block sees the sample.memory={window} tokens before"
        )
    if options.judge and (options.stop or options.min_entropy):
        raise UserError(
            f"sample.judge={options.judge!r} needs texts of one length, and sample.stop="
            f"{options.stop!r} with sample.min_entropy={options.min_entropy} ends some before"
        )
    if options.min_entropy and window > sample_length(experiment):
        raise UserError(
            f"sample.min_entropy={options.min_entropy} is of the last sample.memory={window} "
            f"tokens, more than a text has: sample.length={sample_length(experiment)}"
        )
    if options.stop and experiment.domain.eot_id is None:
        raise UserError(
            "sample.stop='end_of_text' needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _check_steps(experiment: Experiment) -> None:
    """UserError where the process has its own steps, and an objective or the sampler others."""
    for _, _, user in _users(experiment):
        if hasattr(user, "check"):
            user.check(experiment.process)
    for user in (experiment.objective, experiment.sampler_step):
        if hasattr(user, "check_length"):
            user.check_length(experiment.data.length)
    own, sample = experiment.process.timesteps, experiment.sample
    if own is not None and (sample.steps, sample.grid) != (own, "uniform"):
        raise UserError(
            f"sample.steps={sample.steps} and sample.grid={sample.grid!r} must be {own} and "
            f"'uniform': the process has process.timesteps={own} steps and a matrix for each"
        )
