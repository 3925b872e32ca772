"""Reads the models that guide samples: the model of a reward, and a compatible classifier."""

from typing import Any

from md4_jax.data.domains import other_class, same_symbols
from md4_jax.evals.context import RunOf
from md4_jax.experiment import Experiment, sample_length
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError

KEY = "sample.classifier"


def opened(experiment: Experiment, run_of: RunOf, programs: dict[Any, Any]) -> Experiment:
    """Returns the experiment after loading its reward and its guide, if it has any.

    They are cached in `programs`. UserError if one is missing, or does not fit the model.
    """
    guide, steering = experiment.guide, experiment.steering
    if steering is not None:
        experiment = experiment._replace(steering=steering.opened(run_of, programs))
    if guide is None:
        return experiment
    asked = guide.options.classifier
    if (KEY, asked) not in programs:
        programs[KEY, asked] = run_of(KEY, asked)
    other, params, _ = programs[KEY, asked]
    check(experiment, other)
    own = guide._replace(network=other.network, params=params)
    return experiment._replace(guide=own)


def check(experiment: Experiment, other: Experiment) -> None:
    """Raises UserError if another run cannot guide the samples of this one."""
    options = experiment.guide.options
    said = f"{KEY}={options.classifier}"
    if not other.network.classifies:
        raise UserError(
            f"{said} has network.name={other.config['network']['name']!r}, which predicts tokens: "
            "give a run that was trained with objective.name='classifier'"
        )
    if not same_symbols(other.domain, experiment.domain):
        raise UserError(
            f"{said} was trained with another tokenizer, or on images of another shape, than this "
            "run: train a classifier on data with the same symbols"
        )
    length, its = sample_length(experiment), other.data.length
    if length != its:
        raise UserError(
            f"{said} was trained on sequences of data.length={its}, but samples have {length} "
            "tokens (sample.length, data.length): the two must be equal"
        )
    _check_process(experiment, other, said)
    classes = other.config["network"]["classes"]
    if experiment.guide.label >= classes:
        raise UserError(
            f"sample.label={experiment.guide.label} must be below {classes}, the number of "
            f"classes of {said}"
        )
    own = experiment.config["network"].get("classes", 0)
    if own not in (0, classes):
        raise UserError(
            f"{said} was trained with network.classes={classes}, but this run has "
            f"network.classes={own}, so that a label has another meaning for the classifier: use "
            "a classifier with the same classes, or a model without classes"
        )
    if own and (different := other_class(other.domain, experiment.domain)):
        raise UserError(
            f"{said} was trained on other classes than this run: {different}. Use a classifier "
            "with the same classes, or a model without classes"
        )
    if options.classifier_method == "taylor" and not other.network.mixtures:
        raise UserError(
            "sample.classifier_method='taylor' needs a classifier with embeddings of symbols, "
            f"but {said} has network.input='intensity': set sample.classifier_method=exact"
        )


def _check_process(experiment: Experiment, other: Experiment, said: str) -> None:
    """Raises UserError if the classifier was trained with other noise than the model.

    For masks the schedules may differ if the classifier is time-free: p(y | z) is the same.
    """
    both = (experiment.process, other.process)
    masks = all(isinstance(process, RevealsMasks) for process in both)
    if (masks and other.network.time_free) or both[0] == both[1]:
        return
    raise UserError(
        f"{said} was trained with the process {both[1]}, but this run has {both[0]}: train a "
        "classifier with the same section `process`"
    )
