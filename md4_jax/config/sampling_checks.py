"""Checks of the section `sample`; errors name the keys and both values."""

import dataclasses

from md4_jax.config.draft_checks import check_drafts
from md4_jax.config.fit import check_whole, whole_blocks
from md4_jax.config.guide_checks import check_guidance, check_guide
from md4_jax.evals.samples import prompts_of
from md4_jax.experiment import Experiment, sample_block, sample_length
from md4_jax.generate.pictures import has_pictures
from md4_jax.generate.prompts import check_beginnings
from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.orders import AnyOrder
from md4_jax.samplers.transforms import Transform, predicts_ratios


def check_sampling(experiment: Experiment) -> None:
    """Raises UserError if sampling settings do not fit together; a classifier draws no samples."""
    if experiment.network.classifies:
        return
    transform, plain = experiment.sampler_step.transform, Transform()
    for key, value in dataclasses.asdict(transform).items():
        if value != getattr(plain, key) and predicts_ratios(experiment.process):
            key = {"excluded": "exclude", "postponed": "late"}.get(key, key)
            asked = experiment.config["sample"].get(key, value)  # vocabulary entries as text
            raise UserError(
                f"sample.{key}={asked} needs a network that predicts probabilities of symbols, "
                "but with process.parametrisation='score' it predicts ratios of probabilities"
            )
    check_drafts(experiment)
    _check_order(experiment)
    _check_label(experiment)
    _check_image(experiment)
    check_guidance(experiment)
    _check_blocks(experiment)
    _check_reward(experiment)
    check_guide(experiment)
    if experiment.sample.stride >= experiment.data.length:
        raise UserError(
            f"sample.stride={experiment.sample.stride} must be less than "
            f"data.length={experiment.data.length}, the length of the window that it shifts"
        )
    prompts = prompts_of(experiment)
    if experiment.network.gaps:
        check_beginnings(prompts)
        _check_growing(experiment, "network.gaps=True, where texts grow")
    if experiment.sampler_step.needs.hides:
        name = experiment.config["sample"]["name"]
        _check_growing(experiment, f"sample.name={name!r}, where texts change their length")
        _check_resizing(experiment)


def _check_order(experiment: Experiment) -> None:
    """Raises UserError for `late` or `split` if the sampler or the grid does not use them."""
    step, asked = experiment.sampler_step, experiment.config["sample"]
    split = getattr(step, "split", "grid")
    if step.transform.postponed and not isinstance(step, Confidence):
        raise UserError(
            f"sample.late={asked['late']!r} needs sample.name=confidence, which reveals the surest "
            f"tokens first, not {asked['name']!r}"
        )
    if split != "grid" and asked["grid"] != "uniform":
        raise UserError(
            f"sample.split={split!r} counts the steps of sample.grid='uniform', not of "
            f"{asked['grid']!r}"
        )


def _check_resizing(experiment: Experiment) -> None:
    """Raises UserError for further settings that do not support texts of changing length."""
    reward = experiment.config["sample"].get("reward", {}).get("name", "none")
    given, stop = experiment.steering is not None, experiment.sample.stop
    for key, value, fits, wrong, why in (
        ("stop", stop, "", bool(stop), "a text ends where its template ends"),
        ("reward.name", reward, "none", given, "rewards need texts of a fixed length"),
    ):
        if wrong:
            raise UserError(
                f"sample.{key}={value!r} cannot be used with "
                f"sample.name={experiment.config['sample']['name']!r}: {why}. Set "
                f"sample.{key}={fits!r}"
            )


def _check_growing(experiment: Experiment, kind: str) -> None:
    """Raises UserError for settings that need texts of a fixed length; kind: for messages."""
    options, place = experiment.sample, "needs fixed positions in the text"
    block = "sample.block" if options.block else "objective.block"
    for key, value, fits, why in (
        (block, sample_block(experiment), 0, f"a block {place}"),
        ("sample.stride", options.stride, 0, f"a window {place}"),
        ("sample.guidance", options.guidance, 1.0, "guidance needs texts of a fixed length"),
        ("sample.judge", options.judge, "", "a judge needs texts of a fixed length"),
    ):
        if value != fits:
            raise UserError(
                f"{key}={value!r} cannot be used with {kind}: {why}. Set {key}={fits!r}"
            )
    masks = getattr(experiment.process, "masks", 0)
    own = ("data.length", experiment.data.length)
    for key, length in (own, ("sample.length", sample_length(experiment))):
        if masks > length:
            raise UserError(
                f"process.masks={masks} must be at most {key}={length}: every text begins with "
                "that number of masks"
            )


def _check_reward(experiment: Experiment) -> None:
    """Raises UserError for settings that do not support resampling of particles."""
    if experiment.steering is None:
        return
    sections, options = experiment.config, experiment.sample
    name = sections["sample"]["reward"]["name"]
    if hasattr(experiment.steering.reward, "compared"):
        raise UserError(
            f"sample.reward.name={name!r} compares texts with the answers in the data, which do "
            "not exist in sampling: it can only be used in training with objective.name='policy'"
        )
    check_whole(experiment, f"sample.reward.name={name!r}", "sample.reward.name=none")
    refused = (
        (
            "sample.block",
            options.block,
            0,
            "the tokens of a block are final before the next block begins",
        ),
        (
            "sample.stride",
            options.stride,
            0,
            "the tokens of a window are final before the next window begins",
        ),
        ("network.gaps", experiment.network.gaps, False, "rewards need texts of a fixed length"),
        ("sample.stop", options.stop, "", "rewards need texts of a fixed length"),
        ("sample.trace", options.trace, False, "a sample has particles and no single path"),
        ("sample.per_step", _in_one_step(experiment), 0, "all tokens are drawn in the first step"),
    )
    for key, value, fits, why in refused:
        if value != fits:
            raise UserError(
                f"sample.reward.name={name!r} cannot be combined with {key}={value}: {why}. Set "
                f"{key}={fits} or sample.reward.name=none"
            )
    if experiment.sampler_step.needs.ordered:
        raise UserError(
            f"sample.reward.name={name!r} needs a network that predicts all missing tokens at "
            f"once, but with sample.name={sections['sample']['name']!r} it predicts them one "
            "after another: set sample.reward.name=none"
        )
    if experiment.network.causal:
        raise UserError(
            f"sample.reward.name={name!r} needs a network that predicts all missing tokens at "
            "once, but with network.causal=True it predicts them one after another: set "
            "sample.reward.name=none"
        )


def _in_one_step(experiment: Experiment) -> int:
    """Returns `per_step` of a sampler with its own number of steps; 0 if it follows the grid."""
    step = experiment.sampler_step
    return step.per_step if isinstance(step, AnyOrder) else 0


def _check_label(experiment: Experiment) -> None:
    """Raises UserError if the network does not have the class `sample.label`."""
    label, classes = experiment.sample.label, experiment.config["network"].get("classes", 0)
    if label >= 0 and not classes:
        raise UserError(
            f"sample.label={label} asks for samples of a class, but the network has no classes "
            "(network.classes=0): train with network.classes on data with labels, or set "
            "sample.label=-1"
        )
    if label >= classes > 0:
        raise UserError(
            f"sample.label={label} must be less than network.classes={classes}, or -1 for no class"
        )


def _check_image(experiment: Experiment) -> None:
    """Raises UserError if sampled images would not have the size of the data's images."""
    options, whole = experiment.sample, experiment.data.length
    if not has_pictures(experiment.domain):
        return
    for key, value, allowed in (
        ("length", options.length, (0, whole)),
        ("stride", options.stride, (0,)),
    ):
        if value not in allowed:
            raise UserError(
                f"sample.{key}={value} is only for text, and this run has images of {whole} "
                f"values: set sample.{key}=0"
            )


def _check_dual_cache(experiment: Experiment) -> None:
    """Raises UserError for the dual cache if a block does not attend to the tokens after it."""
    options = experiment.sample
    if not options.dual_cache:
        return
    if options.memory or not options.cached:
        raise UserError(
            "sample.dual_cache=True caches the keys and values of all tokens outside of a block: "
            f"set sample.memory=0 and sample.cached=True, not {options.memory} and "
            f"{options.cached}"
        )
    if experiment.config["network"].get("causal_context", False):
        raise UserError(
            "sample.dual_cache=True needs network.causal_context=False: the cached tokens before "
            "a block would have attended to tokens after them"
        )
    if experiment.network.encodes:
        raise UserError(
            "sample.dual_cache=True cannot be used with "
            f"network.name={experiment.config['network']['name']!r}: its encoder does not read "
            "the tokens after a block. Set sample.dual_cache=False"
        )
    if not experiment.network.time_free:
        raise UserError(
            "sample.dual_cache=True needs network.time_conditioning=False: the block that is "
            "drawn and the cached masks after it have different times"
        )


def _check_masks_in_blocks(experiment: Experiment) -> None:
    """Raises UserError for settings that need masks, if blocks have other noise."""
    if isinstance(experiment.process, RevealsMasks):
        return
    for key, plain, why in (
        ("min_entropy", 0.0, "masks fill the text after its end"),
        (
            "dual_cache",
            False,
            "a block attends to masks in place of the tokens that are not drawn yet",
        ),
        ("next_token", False, "the first token of a block is put in place of a mask"),
    ):
        if (value := getattr(experiment.sample, key)) != plain:
            raise UserError(
                f"sample.{key}={value} needs process.name='masking', not "
                f"{experiment.config['process']['name']!r}: {why}. Set sample.{key}={plain}"
            )


def _check_blocks(experiment: Experiment) -> None:
    """Raises UserError if `sample` options do not fit sampling block by block."""
    options, block = experiment.sample, sample_block(experiment)
    if options.judge and (options.stop or options.min_entropy):
        raise UserError(
            f"sample.judge={options.judge!r} needs texts of a fixed length, but "
            f"sample.stop={options.stop!r} with sample.min_entropy={options.min_entropy} may end "
            "some early"
        )
    if not block:
        for key in ("memory", "min_entropy", "dual_cache", "next_token"):
            if getattr(options, key):
                raise UserError(
                    f"sample.{key}={getattr(options, key)} is only for sampling block by block: "
                    "set sample.block too"
                )
        return
    if experiment.sampler_step.needs.ordered:
        name = experiment.config["sample"]["name"]
        raise UserError(
            f"sample.block={block} cannot be used with sample.name={name!r}, which reads a text in "
            "an order that is not that of blocks: set sample.block=0"
        )
    window = options.memory or experiment.data.length
    for key, size in (("sample.length", sample_length(experiment)), ("sample.memory", window)):
        if size % block and not options.dual_cache:
            raise UserError(f"sample.block={block} must divide {key}={size}")
    if not isinstance(experiment.process, RevealsMasks | RedrawsUniformly):
        raise UserError(
            f"sample.block={block} needs process.name='masking' or 'uniform', not "
            f"{experiment.config['process']['name']!r}"
        )
    if not experiment.network.blockwise:
        raise UserError(f"sample.block={block} needs {whole_blocks(experiment.config['network'])}")
    _check_masks_in_blocks(experiment)
    _check_dual_cache(experiment)
    network = experiment.config["network"]
    shifted, causal = (network.get(key, False) for key in ("shifted", "causal_context"))
    if options.next_token and not (shifted or causal):
        raise UserError(
            "sample.next_token=True draws the first token of a block from the end of the block "
            "before: it needs network.shifted=True or network.causal_context=True"
        )
    if options.stride:
        raise UserError(
            f"sample.stride={options.stride} is only for sampling without blocks: set it to 0. "
            f"With sample.block={block} each block sees the sample.memory={window} tokens before "
            "it"
        )
    if options.min_entropy and window > sample_length(experiment):
        raise UserError(
            f"sample.min_entropy={options.min_entropy} is computed on the last sample.memory="
            f"{window} tokens, more than sample.length={sample_length(experiment)}"
        )
