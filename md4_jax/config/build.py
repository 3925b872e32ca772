"""Composition root: makes an experiment from a config."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from md4_jax.config.checks import validate
from md4_jax.config.evaluators import evaluators, trained_options
from md4_jax.config.load import parse, unknown
from md4_jax.config.mistakes import all_of
from md4_jax.config.schema import build_section, class_of, options_from
from md4_jax.data.domains import Domain
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.evals.rewards import NoReward
from md4_jax.experiment import Experiment, clean_prompts
from md4_jax.networks.quality import built
from md4_jax.options import (
    CheckpointOptions,
    EvalOptions,
    LogOptions,
    MeshOptions,
    PromptOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.options.data import DataOptions
from md4_jax.options.guide import ClassifierOptions
from md4_jax.options.parts import BenchOptions, PlanOptions
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Objective, UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.paths import Place
from md4_jax.samplers import GRIDS, loop, profile
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.classifier import Guide
from md4_jax.samplers.grids import listed
from md4_jax.samplers.particles import SteeringOptions
from md4_jax.samplers.steering import Steering
from md4_jax.samplers.stops import Stop
from md4_jax.samplers.transforms import Transform, check_transform
from md4_jax.training.optim import Rate


def experiment(
    config: dict[str, Any],
    domain: Domain,
    devices: list | None = None,
    workdir: Place | None = None,
    *,
    prompted: bool = False,
) -> Experiment:
    """Builds and checks everything but the data, for these devices; None: all devices.

    workdir: directory of the run, with its information profile (for sample.grid=optimal)
    prompted: whether the caller passes prompts as token ids, which are not in the config
    """
    made = _sections(config, domain, devices)
    made["sample"], made["guide"] = _guide(config, made["sample"], made["guide"])
    if isinstance(domain, RandomTokens):  # its symbols have no text for a prompt
        prompted, made["prompt"] = prompted or made["prompt"].is_given, PromptOptions()
    process, objective, sample, data = (
        made[name] for name in ("process", "objective", "sample", "data")
    )
    (optimizer, rate), network = all_of(
        lambda: made.pop("optim").build(made["train"].num_steps),
        lambda: built(made.pop("network"), made["mesh"].devices.flat[0].platform),
    )
    if getattr(process, "conditioning", "time") == "zero":
        network = network._replace(time_free=True)
    transform, ends = made.pop("transform"), _ends(sample.stop, domain)
    sampler_step, grid, evals = all_of(
        lambda: _sampler(
            config["sample"],
            objective,
            transform=transform,
            stops=ends,
            shape=tuple(domain.shape),
        ),
        lambda: (
            _optimal(sample, data, process, objective, workdir)
            if sample.grid == "optimal"
            else _grid(sample)
        ),
        lambda: evaluators(config, objective, process, network),
    )
    # A reward that training learns from does not steer samples.
    made["rewarded" if objective.needs.rewards else "steering"] = made.pop("steering")
    experiment = Experiment(
        **made,
        config=config,
        domain=domain,
        network=network,
        optimizer=optimizer,
        learning_rate=Rate.of(rate),
        sampler_step=sampler_step,
        loop=_loop(objective, sampler_step, sample, data, ends, clean_prompts(config["data"])),
        ends=ends,
        grid=grid,
        evals=evals,
        prompted=prompted,
    )
    validate(experiment)
    return experiment


def _sections(config: dict[str, Any], domain: Domain, devices: list | None) -> dict[str, Any]:
    """Builds the objects that depend on one section each; one UserError names all mistakes."""
    size = {"vocab_size": domain.vocab_size}
    shaped = {**size, "shape": tuple(domain.shape)}
    makers = {
        "train": partial(options_from, TrainOptions, config["train"]),
        "sample": partial(options_from, SampleOptions, config["sample"]),
        "prompt": partial(options_from, PromptOptions, config["sample"]),
        "guide": partial(options_from, ClassifierOptions, config["sample"]),
        "transform": partial(_transform, config["sample"], domain),
        "steering": partial(_steering, config["sample"].get("reward"), domain),
        "data": partial(options_from, DataOptions, config["data"]),
        "mesh": lambda: make_mesh(options_from(MeshOptions, config["mesh"]), devices),
        "network": partial(build_section, "network", config["network"], **shaped),
        "optim": partial(build_section, "optim", config["optim"]),
        "process": partial(build_section, "process", config["process"], **size),
        "objective": partial(build_section, "objective", config["objective"]),
        "log": partial(options_from, LogOptions, config["log"]),
        "checkpoint": partial(options_from, CheckpointOptions, config.get("checkpoint", {})),
        "eval": partial(options_from, EvalOptions, config.get("eval", {})),
        "bench": partial(options_from, BenchOptions, config.get("bench", {})),
        "plan": partial(options_from, PlanOptions, config.get("plan", {})),
    }
    return dict(zip(makers, all_of(*makers.values()), strict=True))


def _sampler(section: dict[str, Any], objective: Objective, **supplied: Any) -> Any:
    """Builds the sampler's step; options that its section omits are those of the objective.

    supplied: transform, and for samplers with such keys `shape`, that of the data, and `stops`, the
    symbols that end a text. One that verifies drafts is told the blocks or windows of training
    """
    trained = trained_options(class_of("sample", section["name"]), objective)
    windows = objective.needs.windows
    size = getattr(objective, "block_size" if windows else "block", 0)
    of_drafts = {"trained": size, "in_windows": windows}
    return build_section("sample", section, **supplied, **of_drafts, **trained)


def _transform(section: dict[str, Any], domain: Domain) -> Transform:
    """Returns the transform of token distributions in sampling, such as temperature or top-p."""
    transform = options_from(Transform, section)
    check_transform(transform.temperature, transform.top_k, transform.top_p)
    exclude = section.get("exclude", "")
    if isinstance(domain, RandomTokens):  # its symbols have no names
        return transform
    excluded = _entries("exclude", exclude, domain, "names entries of a vocabulary")
    if len(set(excluded)) == domain.vocab_size:
        raise UserError(
            f"sample.exclude={exclude!r} excludes all symbols of the vocabulary, so that none can "
            "be drawn"
        )
    late = _entries("late", section.get("late", ""), domain, "names entries of a vocabulary")
    return dataclasses.replace(transform, excluded=excluded, postponed=late)


def _steering(section: dict[str, Any] | None, domain: Domain) -> Steering | None:
    """Returns the reward that steers samples, with its options; None if there is none."""
    section = section or {"name": "none"}
    reward = build_section("sample.reward", section)
    options = options_from(SteeringOptions, section)
    if isinstance(reward, NoReward):
        return None
    if hasattr(reward, "check"):
        reward.check(domain)
    return Steering(options, reward, domain)


def _guide(
    config: dict[str, Any], sample: SampleOptions, options: ClassifierOptions
) -> tuple[SampleOptions, Guide | None]:
    """Returns (sampling options, guide); the guide is None without a classifier.

    If the network has no classes, only the classifier uses the label.
    """
    if not options.classifier:
        return sample, None
    guide = Guide(options, sample.label)
    own = config["network"].get("classes", 0)
    return (sample if own else dataclasses.replace(sample, label=-1)), guide


def _grid(sample: SampleOptions) -> np.ndarray:
    """Returns the named grid with `sample.steps` steps, or the times that the user lists."""
    times = sample.grid
    if isinstance(times, str):
        if times in GRIDS:
            return GRIDS[times](sample.steps)
        if not times.startswith(("[", "(")):
            raise unknown("sample.grid", times, [*GRIDS, "optimal", "[1.0, ..., 0.0]"])
        times = parse(times, None)
    if not isinstance(times, list | tuple) or not all(isinstance(t, int | float) for t in times):
        raise UserError(
            f"sample.grid={sample.grid} is not a list of numbers; one looks like [1.0, 0.5, 0.0]"
        )
    return listed(times)


def _optimal(
    sample: SampleOptions,
    data: DataOptions,
    process: Any,
    objective: Objective,
    workdir: Place | None,
) -> np.ndarray:
    """Returns the times with the smallest loss predicted by the run's information profile."""
    block = sample.block or getattr(objective, "block", 0)
    if block or not isinstance(process, RevealsMasks):
        raise UserError(
            "sample.grid='optimal' needs process.name='masking' and a block size of 0. This run "
            f"has the process {process} and a block size of {block}"
        )
    length = sample.length or data.length
    window = min(length, data.length) if sample.stride else length
    counts = profile.best_counts(profile.stored(workdir, window), sample.steps)
    return profile.grid_of(counts, process.schedule)


def _loop(
    objective: Objective,
    step: Any,
    sample: SampleOptions,
    data: DataOptions,
    ends: tuple[int, ...],
    clean: bool,
):
    """Returns the function that runs the sampler: on the whole text, or block by block."""
    trained = getattr(objective, "block", 0)
    block = sample.block or trained
    if not block or step.needs.verifies:
        return loop.sample
    stop, window = Stop(ends, sample.min_entropy), sample.memory or data.length
    return Blocks(
        block, window, stop, sample.cached, sample.dual_cache, sample.next_token,
        clean, anywhere=not trained,
    )  # fmt: skip


def _ends(stop: str, domain: Domain) -> tuple[int, ...]:
    """Returns the symbols that sample.stop means; UserError if the vocabulary has none."""
    if not stop:
        return ()
    if isinstance(domain, RandomTokens):
        return (domain.eot_id,)
    if stop == "end_of_text":
        if getattr(domain, "eot_id", None) is None:
            raise UserError("sample.stop='end_of_text' needs a tokenizer with an end-of-text token")
        return (domain.eot_id,)
    return _entries("stop", stop, domain, "ends texts", "'end_of_text' or ")


def _entries(key: str, text: str, domain: Domain, what: str, others: str = "") -> tuple[int, ...]:
    """Returns the symbols that a key of `sample` names; UserError if the vocabulary has none.

    what: purpose of the key, for messages
    others: further values that the key accepts, for messages
    """
    if not text:
        return ()
    if not hasattr(domain, "tokenizer"):
        raise UserError(f"sample.{key}={text!r} {what}, and the data of this run are not text")
    id_of = getattr(domain.tokenizer, "id_of", partial(_alone, domain.tokenizer))
    entries = [text] if id_of(text) is not None else text.split() or [text]
    found = [id_of(entry) for entry in entries]
    for entry, symbol in zip(entries, found, strict=True):
        if symbol is None or symbol >= domain.vocab_size:
            raise UserError(
                f"sample.{key}={entry!r} is not an entry of the vocabulary: it must be '', "
                f"{others}an entry that may be drawn, such as '<|eot_id|>', or several "
                "with spaces between them"
            )
    return tuple(found)


def _alone(tokenizer: Any, entry: str) -> int | None:
    """Returns the token id of a text that is a single token, such as a character; else None."""
    try:
        ids = tokenizer.encode(entry)
    except UserError:
        return None
    return int(ids[0]) if len(ids) == 1 and tokenizer.join(ids) == entry else None
