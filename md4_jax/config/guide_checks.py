"""Checks of classifiers and of classifier guidance."""

from md4_jax.config.fit import check_whole
from md4_jax.evals import EVALUATORS
from md4_jax.evals.classification import Classification
from md4_jax.evals.ngrams import NGramModels
from md4_jax.experiment import Experiment, clean_prompts
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.orders import AnyOrder, FirstHitting

# Samplers that classifier guidance supports.
GUIDED = (Ancestral, Euler, TauLeaping, FirstHitting, AnyOrder)


def check_classifier(experiment: Experiment) -> None:
    """Raises UserError for settings that a classifier, which predicts no tokens, cannot have."""
    if not experiment.network.classifies:
        return
    own = {cls: name for name, cls in EVALUATORS.items()}
    for name, evaluator in experiment.evals.items():
        kind = own.get(type(evaluator))
        if kind and not isinstance(evaluator, Classification | NGramModels):
            raise UserError(
                f"evals.{name}.name={kind!r} needs a network that predicts tokens, not "
                f"network.name={experiment.config['network']['name']!r}: take "
                f"evals.{name}.name='classification', or leave evals.{name} out"
            )
    if experiment.network.time_free and not isinstance(experiment.process, RevealsMasks):
        raise UserError(
            "objective.name='classifier' needs network.time_conditioning=True with "
            f"process.name={experiment.config['process']['name']!r}: how sure a class is depends "
            "on how noisy the sequence is, which only masks show"
        )


def check_guide(experiment: Experiment) -> None:
    """Raises UserError for sampling settings that classifier guidance does not support."""
    guide, options = experiment.guide, experiment.sample
    if guide is None:
        return
    said, sections = f"sample.classifier={guide.options.classifier}", experiment.config
    if guide.label < 0:
        raise UserError(f"{said} guides samples to a class: set sample.label to its number, from 0")
    name = sections["sample"]["name"]
    if not isinstance(experiment.sampler_step, GUIDED):
        raise UserError(
            f"{said} cannot guide sample.name={name!r}: take ancestral, tweedie, euler, "
            "tau_leaping or, with masks, first_hitting or any_order"
        )
    if clean_prompts(sections["data"]) and not experiment.process.shows_clean:
        raise UserError(
            f"{said} would see noise where this model was trained on clean prompts "
            "(data.prompt_key or data.messages_key): leave sample.classifier empty"
        )
    check_whole(experiment, said, "sample.classifier empty")
    refused = (
        ("network.gaps", experiment.network.gaps, False, "a classifier reads texts of one length"),
        ("sample.block", options.block, 0, "a classifier reads whole texts"),
        ("sample.stride", options.stride, 0, "a classifier reads whole texts"),
        ("sample.guidance", options.guidance, 1.0, "samples are guided in one way at a time"),
        ("sample.reward.name", _reward(experiment), "none", "samples are guided in one way"),
    )
    for key, value, fits, why in refused:
        if value != fits:
            raise UserError(
                f"{said} is not for {key}={value}: {why}. Leave {key}={fits}, or sample.classifier "
                "empty"
            )


def _reward(experiment: Experiment) -> str:
    """Returns the name of the reward that steers samples or trains the model."""
    if experiment.steering is None and experiment.rewarded is None:
        return "none"
    return experiment.config["sample"]["reward"]["name"]
