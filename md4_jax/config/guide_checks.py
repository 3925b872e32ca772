"""Checks of classifiers and of guidance: by a classifier, a label or a prompt."""

from md4_jax.config.fit import check_whole
from md4_jax.evals import EVALUATORS
from md4_jax.evals.classification import Classification
from md4_jax.evals.ngrams import NGramModels
from md4_jax.evals.samples import check_guided, has_prompt
from md4_jax.experiment import Experiment, clean_prompts, drawn_classes
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
                f"network.name={experiment.config['network']['name']!r}: set "
                f"evals.{name}.name='classification', or remove evals.{name}"
            )
    if experiment.network.time_free and not isinstance(experiment.process, RevealsMasks):
        raise UserError(
            "objective.name='classifier' needs network.time_conditioning=True with "
            f"process.name={experiment.config['process']['name']!r}: the probability of a class "
            "depends on the amount of noise, which the network can see from the sequence only if "
            "the noise consists of masks"
        )


def check_guide(experiment: Experiment) -> None:
    """Raises UserError for sampling settings that classifier guidance does not support."""
    guide, options = experiment.guide, experiment.sample
    if guide is None:
        return
    said, sections = f"sample.classifier={guide.options.classifier}", experiment.config
    if guide.label < 0:
        raise UserError(
            f"{said} guides samples towards a class: set sample.label to the number of the class, "
            "counted from 0"
        )
    name = sections["sample"]["name"]
    if not isinstance(experiment.sampler_step, GUIDED):
        raise UserError(
            f"{said} cannot guide sample.name={name!r}: use ancestral, tweedie, euler, "
            "tau_leaping or, with masks, first_hitting or any_order"
        )
    if clean_prompts(sections["data"]) and not experiment.process.shows_clean:
        raise UserError(
            f"{said} would read prompts with noise, but this model has clean prompts "
            "(data.prompt_key or data.messages_key): set sample.classifier=''"
        )
    check_whole(experiment, said, "sample.classifier=''")
    refused = (
        ("network.gaps", experiment.network.gaps, False, "a classifier reads texts of one length"),
        ("sample.block", options.block, 0, "a classifier reads whole texts"),
        ("sample.stride", options.stride, 0, "a classifier reads whole texts"),
        ("sample.guidance", options.guidance, 1.0, "only one kind of guidance can be used"),
        (
            "sample.reward.name",
            _reward(experiment),
            "none",
            "only one kind of guidance can be used",
        ),
    )
    for key, value, fits, why in refused:
        if value != fits:
            raise UserError(
                f"{said} cannot be combined with {key}={value}: {why}. Set {key}={fits}, or "
                "sample.classifier=''"
            )


def _reward(experiment: Experiment) -> str:
    """Returns the name of the reward that steers samples or trains the model."""
    if experiment.steering is None and experiment.rewarded is None:
        return "none"
    return experiment.config["sample"]["reward"]["name"]


def check_guidance(experiment: Experiment) -> None:
    """Raises UserError if guidance lacks a condition, or an unconditional prediction."""
    options, transform = experiment.sample, experiment.sampler_step.transform
    said = f"sample.guidance={options.guidance}"
    if options.guidance == 1.0:
        return
    if drawn_classes(experiment):
        raise UserError(
            f"{said} also needs the prediction without a label, which a network learns only if it "
            "is trained with network.label_dropout above 0, such as 0.1. This one was trained "
            "with 0.0"
        )
    if options.label < 0 and has_prompt(experiment):
        _check_guiding_prompt(experiment, said)
        return
    # Samples with labels of their own need none; others are checked when their evaluators begin.
    if not any(getattr(each, "labels", False) for each in experiment.evals.values()):
        check_guided(experiment)
    if not experiment.process.shows_clean and (transform.top_k, transform.top_p) != (0, 1.0):
        raise UserError(
            f"{said} with noise other than masks combines the probabilities of all symbols: set "
            f"sample.top_k=0 and sample.top_p=1.0, not {transform.top_k} and {transform.top_p}"
        )


def _check_guiding_prompt(experiment: Experiment, said: str) -> None:
    """Raises UserError if samples without a label cannot be guided by a prompt."""
    options = experiment.sample
    if not isinstance(experiment.process, RevealsMasks):
        raise UserError(
            f"{said} towards a prompt also predicts with the prompt replaced by masks: it needs "
            f"process.name='masking', not {experiment.config['process']['name']!r}"
        )
    if experiment.sampler_step.needs.ordered:
        raise UserError(
            f"{said} towards a prompt also predicts with the prompt replaced by masks, but "
            f"sample.name={experiment.config['sample']['name']!r} always reads the prompt first: "
            "set sample.guidance=1.0"
        )
    check_whole(experiment, f"{said} towards a prompt", "sample.guidance=1.0")
    for key, value in (("block", options.block), ("stride", options.stride)):
        if value:
            raise UserError(
                f"{said} towards a prompt needs samples that are drawn as a whole: set "
                f"sample.{key}=0, not {value}, or sample.guidance=1.0"
            )
