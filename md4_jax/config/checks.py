"""Checks of config sections against each other; errors name the keys and both values."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from md4_jax.config.evaluators import with_keys_of
from md4_jax.config.fit import (
    Component,
    check_dropout,
    check_fit,
    check_order,
    check_parts,
    objective_name,
)
from md4_jax.config.guide_checks import check_classifier
from md4_jax.config.load import unknown
from md4_jax.config.mesh_checks import check_batches, check_bound_batch, check_context
from md4_jax.config.mistakes import all_of
from md4_jax.config.policy_checks import check_policy, check_preferences
from md4_jax.config.sampling_checks import check_sampling
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment
from md4_jax.options.parts import words
from md4_jax.processes.capabilities import RevealsBySymbol, RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.training.keeping import check_best
from md4_jax.training.precision import check_matrices, check_trainable
from md4_jax.training.trackers import TRACKERS


def validate(experiment: Experiment) -> None:
    """Raises one UserError that names all sections of the config that do not fit together.

    Bounds, samples and evaluators are checked only if process, network and batches are valid.
    """
    bounds, components = _bounds(experiment), _components(experiment)
    evaluators = experiment.evals.items()
    of_experiment = [
        check_batches, check_context, _check_tables, _check_classes, _check_log, _check_clock,
        _check_documents, _check_rounds, _check_positions, check_parts, check_classifier,
    ]  # fmt: skip
    all_of(
        *(partial(check, experiment) for check in of_experiment),
        *(partial(check_bound_batch, experiment, *item) for item in bounds.items()),
        *(partial(_check_size, key, *size) for key, size in _sizes(experiment, bounds).items()),
        *(partial(check_fit, experiment, component) for component in components),
    )
    all_of(
        *(partial(_check_steps, experiment, component) for component in components),
        partial(_check_grid, experiment),
        *(partial(check_order, experiment, component) for component in components),
        partial(check_sampling, experiment),
        *(partial(_check_bound, experiment, *item) for item in _reporting(experiment)),
        *(partial(_check_stride, experiment, *item) for item in bounds.items()),
        *(partial(_check_length, experiment, *item) for item in _reporting(experiment)),
        *(partial(e.check, experiment, f"evals.{k}") for k, e in evaluators if hasattr(e, "check")),
        partial(check_best, experiment),
    )


def _check_clock(experiment: Experiment) -> None:
    """Raises UserError for a learning rate by elapsed time if the run has no time limit."""
    if experiment.learning_rate.follows_seconds and not experiment.train.seconds:
        raise UserError(
            "optim.clock='seconds' needs train.seconds, the time limit that the learning rate "
            "follows: set it, for example, by --config.train.seconds=600"
        )


def _check_rounds(experiment: Experiment) -> None:
    """Raises UserError if a distillation has more steps than its rounds."""
    if hasattr(experiment.objective, "check_rounds"):
        experiment.objective.check_rounds(experiment.train.num_steps)


def _check_documents(experiment: Experiment) -> None:
    """Raises UserError if documents are to be separated but no token marks their end."""
    if experiment.data.separate_documents and experiment.domain.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )
    names = {key: experiment.config[key]["name"] for key in ("objective", "network")}
    alone = {
        "network.gaps=True": experiment.network.gaps,
        f"objective.name={names['objective']!r}": experiment.objective.needs.hides,
        f"network.name={names['network']!r}": experiment.network.marked,
    }
    said = next((key for key, is_so in alone.items() if is_so), "")
    if experiment.data.separate_documents and said:
        raise UserError(
            "data.separate_documents=True packs several documents into one sequence, but with "
            f"{said} each sequence must be one text: set data.windows='documents' and "
            "data.separate_documents=False"
        )


def _check_log(experiment: Experiment) -> None:
    """Raises UserError for an unknown tracker, and for an invalid range of steps to trace."""
    for name in words(experiment.log.trackers):
        if name not in TRACKERS:
            raise unknown("tracker in log.trackers", name, list(TRACKERS))
    steps, num_steps = list(experiment.log.profile), experiment.train.num_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= num_steps):
        raise UserError(
            f"log.profile={steps} must be the first and the last step to profile, such as 10,12, "
            f"and the last must be at most train.num_steps={num_steps}"
        )


def _sizes(experiment: Experiment, bounds: Mapping[str, Any]) -> dict[str, tuple[int, str, int]]:
    """Returns {section: (sequences of a batch, key of the length, its value)}."""
    own = ("data.length", experiment.data.length)
    sizes = {f"evals.{name}": (bound.sequences(experiment), *own) for name, bound in bounds.items()}
    sizes["train"] = experiment.train.batch_size, *own
    own = own if not experiment.sample.length else ("sample.length", experiment.sample.length)
    sizes["sample"] = experiment.sample.batch_size, *own
    return sizes


def _check_size(name: str, sequences: int, key: str, length: int) -> None:
    """Raises UserError for a batch with more tokens than an int32 can count."""
    if sequences * length >= 2**31:
        raise UserError(
            f"{name}.batch_size={sequences} times {key}={length} is {sequences * length} tokens, "
            f"and must be below {2**31} = 2^31: reduce the batch size"
        )


def _check_positions(experiment: Experiment) -> None:
    """Raises UserError for texts longer than the network's learned position embeddings."""
    network, sample = experiment.config["network"], experiment.sample
    most = network.get("positions", 0) - experiment.network.gaps
    asked = {"data.length": experiment.data.length}
    for name, evaluator in experiment.evals.items():
        if hasattr(evaluator, "length_of"):
            key, length = _length(experiment, name, evaluator)
            asked[key] = length
    if not sample.stride:
        asked["sample.length"] = sample.length
    for key, length in asked.items():
        if network.get("positions", 0) and length > most:
            raise UserError(
                f"{key}={length} must be at most {most}: network.positions={network['positions']} "
                "learns a vector for only so many positions"
            )


def _check_classes(experiment: Experiment) -> None:
    """Raises UserError if network.classes differs from the number of classes of the data."""
    labels = getattr(experiment.domain, "labels", None)
    classes = experiment.config["network"].get("classes")
    if None in (labels, classes) or classes == len(labels):
        return
    if not labels:
        raise UserError(
            f"network.classes={classes} needs data with labels, such as data.name='text' with "
            "data.label_key, or images with data.labels=True, but the data of this run have "
            "none: set network.classes=0"
        )
    names = ", ".join(map(repr, labels[:20])) + (", ..." if len(labels) > 20 else "")
    raise UserError(
        f"network.classes={classes} must be {len(labels)}, the number of classes of the data "
        f"(data.label_key; of images, data.labels): {names}"
    )


def _bounds(experiment: Experiment) -> dict[str, Any]:
    """Returns the evaluators that report a bound, by name."""
    return {name: e for name, e in experiment.evals.items() if isinstance(e, LikelihoodBound)}


def _reporting(experiment: Experiment) -> list[tuple[str, Any]]:
    """Returns the names and evaluators that have an objective."""
    return [(name, e) for name, e in experiment.evals.items() if hasattr(e, "objective")]


def _components(experiment: Experiment) -> list[Component]:
    """Returns the objective, other objectives of the evaluators, and the sampler.

    A classifier has no samples.
    """
    config = experiment.config
    sampler = Component("sample", config["sample"]["name"], experiment.sampler_step)
    return [
        Component("objective", config["objective"]["name"], experiment.objective),
        *(
            Component(f"evals.{name}.objective", objective_name(e.objective), e.objective)
            for name, e in _reporting(experiment)
            if e.objective != experiment.objective
        ),
        *(() if experiment.network.classifies else (sampler,)),
    ]


def _check_bound(experiment: Experiment, evaluation: str, evaluator: Any) -> None:
    """Raises UserError if the objective of an evaluator is not a bound."""
    key, name = f"evals.{evaluation}", objective_name(evaluator.objective)
    if not evaluator.objective.is_bound(experiment.process):
        raise UserError(
            f"{key}.objective.name={name!r} is not a bound of -log p with this process "
            f"({experiment.process}), so it cannot be reported as a likelihood. "
            "objective.name='any_order' with weight_power=1 is a bound for every schedule"
        )


def _check_stride(experiment: Experiment, evaluation: str, bound: LikelihoodBound) -> None:
    """Raises UserError if the stride of a bound does not fit the lengths of its evaluator."""
    key, length = _length(experiment, evaluation, bound)
    with with_keys_of(evaluation, experiment.config["evals"]):
        bound.check_stride(length, f"evals.{evaluation}.", key)


def _check_length(experiment: Experiment, evaluation: str, evaluator: Any) -> None:
    """Raises UserError if the sequences of an evaluator do not fit its objective."""
    if not hasattr(evaluator.objective, "check_length") or not hasattr(evaluator, "length_of"):
        return
    key, length = _length(experiment, evaluation, evaluator)
    with with_keys_of(evaluation, experiment.config["evals"]):
        evaluator.objective.check_length(length, key)


def _length(experiment: Experiment, evaluation: str, evaluator: Any) -> tuple[str, int]:
    """Returns (full key that sets the sequence length of an evaluator, that length)."""
    key, length = evaluator.length_of(experiment)
    return f"evals.{evaluation}.{key}" if key else "data.length", length


def _check_tables(experiment: Experiment) -> None:
    """Raises UserError if tables of neighbours are enabled where they cannot be trained."""
    if experiment.network.companion is None:
        return
    asked = f"network.tables={experiment.config['network']['tables']}"
    if not isinstance(experiment.process, RevealsMasks | RevealsBySymbol):
        raise UserError(
            f"{asked} needs masks, not process.name={experiment.config['process']['name']!r}: "
            "with other noise a table cannot tell which neighbours are still correct. Set "
            "network.tables=0"
        )
    if experiment.network.causal:
        raise UserError(
            f"{asked} needs network.causal=False: a table sees the neighbours on both sides. Set "
            "network.tables=0"
        )


def check_training(experiment: Experiment, kept: Mapping[str, Any] | None = None) -> None:
    """Raises UserError for settings that cannot train this network; it may still be evaluated.

    kept: config with which the run began, if it is resumed
    """
    _check_names(experiment, kept)
    if experiment.network.companion is not None and experiment.data.windows == "every":
        raise UserError(
            f"network.tables={experiment.config['network']['tables']} needs data.windows='grid', "
            "not 'every': with overlapping windows a text would be predicted from counts that "
            "include itself. Change one of the two keys"
        )
    check_preferences(experiment)
    check_policy(experiment, kept)
    check_trainable(experiment)
    check_dropout(experiment)
    if kept is None:
        check_matrices(experiment)


def _check_names(experiment: Experiment, kept: Mapping[str, Any] | None) -> None:
    """Raises UserError for a new evaluator with the name that trackers use for the loss."""
    if "train" in experiment.evals and "train" not in (kept or {}).get("evals", {}):
        raise UserError(
            "evals.train is not allowed as the name of an evaluator, because TensorBoard and W&B "
            "show the training loss as train/...: choose another name, such as evals.train_split"
        )


def _check_steps(experiment: Experiment, component: Component) -> None:
    """Raises UserError if an objective or the sampler has other steps than the process."""
    is_own, evaluation = component.key in ("objective", "sample"), component.key.split(".")[1:2]
    if hasattr(component.value, "check"):
        with with_keys_of("".join(evaluation), experiment.config["evals"]):
            component.value.check(experiment.process)
    if is_own and hasattr(component.value, "check_length"):  # evaluators may have another length
        component.value.check_length(experiment.data.length)


def _check_grid(experiment: Experiment) -> None:
    """Raises UserError if sampling has other steps than a process in discrete time."""
    own, sample = experiment.process.timesteps, experiment.sample
    if own is not None and (sample.steps, sample.grid) != (own, "uniform"):
        raise UserError(
            f"sample.steps={sample.steps} must be {own} and sample.grid={sample.grid!r} must be "
            f"'uniform', because the process has process.timesteps={own} steps with one "
            "transition matrix each"
        )
