"""Checks of objectives that learn from rewards or from preferences."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config.defaults import defaults_of
from md4_jax.config.fit import objective_name
from md4_jax.config.load import flatten
from md4_jax.experiment import Experiment, has_rows
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import batch_shards

# Keys of the section `sample` that do not affect the samples drawn in training.
OF_SAMPLES = (
    "num", "batch_size", "seed", "trace", "judge", "prompt", "suffix", "template", "templates",
    "blank",
)  # fmt: skip


def check_policy(experiment: Experiment, kept: Mapping[str, Any] | None = None) -> None:
    """Raises UserError for settings that cannot learn from the rewards of samples.

    kept: config with which the run began, if it is resumed
    """
    if not experiment.objective.needs.rewards:
        return
    said = f"objective.name={experiment.config['objective']['name']!r}"
    if experiment.rewarded is None:
        raise UserError(
            f"{said} learns from a reward of samples, and there is none: name one by "
            "sample.reward.name, such as pattern, judge, answer or package.module:attribute"
        )
    _check_sizes(experiment, said)
    _check_resumed(experiment, kept or {}, said)
    sample, data = experiment.sample, experiment.data
    refused = (
        ("sample.length", sample.length, (0, data.length)),
        ("sample.stride", sample.stride, (0,)),
        ("sample.min_entropy", sample.min_entropy, (0,)),
        ("train.time_power", experiment.train.time_power, (1,)),
    )
    for key, value, fitting in refused:
        if value not in fitting:
            raise UserError(
                f"{said} draws texts of data.length={data.length} tokens and takes a mean over "
                f"draws of noise: set {key}={fitting[0]}, not {key}={value}"
            )
    if has_rows(experiment.config["data"]) and data.padding != "end_of_text":
        raise UserError(
            f"{said} draws whole texts, which end with an end of text: it needs "
            f"data.padding='end_of_text', not {data.padding!r}"
        )
    if data.separate_documents:
        raise UserError(
            f"{said} draws texts of its own, in which no document of the data ends: set "
            "data.separate_documents=False"
        )
    if experiment.sampler_step.needs.hides:
        raise UserError(
            f"{said} counts the tokens of texts of one length, and sample.name="
            f"{experiment.config['sample']['name']!r} changes it: take process.name='masking'"
        )
    if experiment.network.companion is not None:
        raise UserError(f"{said} is not for network.tables, which do not learn: set it to 0")


def _check_resumed(experiment: Experiment, kept: Mapping[str, Any], said: str) -> None:
    """Raises UserError if a resumed run has other sampling settings or another reward."""
    if "sample" not in kept:
        return
    before, after = (_of_samples(x["sample"]) for x in (kept, experiment.config))
    keys = (before.keys() | after.keys()) - set(OF_SAMPLES)
    for key in sorted(keys, key=lambda key: (not key.endswith("name"), key)):
        mine, its = after.get(key), before.get(key)
        if mine != its:
            raise UserError(
                f"sample.{key}={mine!r} is not that of this run, {its!r}, and "
                f"{said} learns from the samples: leave it, or begin another run in another "
                "--workdir, with train.initial"
            )


def _of_samples(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the section `sample`, with defaults for those that it omits."""
    reward = section.get("reward") or {"name": "none"}
    own = defaults_of("sample.reward", reward["name"]) | dict(flatten(reward))
    given = {key: value for key, value in section.items() if key != "reward"}
    found = defaults_of("sample", section["name"]) | dict(flatten(given))
    return found | {f"reward.{key}": value for key, value in own.items()}


def _check_sizes(experiment: Experiment, said: str) -> None:
    size, group = experiment.train.batch_size, experiment.objective.group
    shards = batch_shards(experiment.mesh)
    if size % (group * shards):
        raise UserError(
            f"train.batch_size={size} must be a multiple of {group * shards}: {said} draws "
            f"objective.group={group} texts after each prompt, and {shards} parts of a batch "
            "are on devices of their own"
        )


def check_preferences(experiment: Experiment) -> None:
    """Raises UserError if only one of data and objective has rejected answers."""
    key, objective = experiment.config["data"].get("rejected_key", ""), experiment.objective
    said = f"objective.name={objective_name(objective)!r}"
    if objective.needs.preferences and not key:
        raise UserError(
            f"{said} learns from two answers to a prompt: data.rejected_key must name the key of "
            "the worse one, data.text_key that of the better, and data.prompt_key the prompt's; of "
            "conversations, data.messages_key names the better one"
        )
    if key and not objective.needs.preferences:
        raise UserError(
            f"data.rejected_key={key!r} is for objective.name='preference', and {said} learns "
            "nothing from worse answers: leave it out"
        )
    if objective.needs.preferences and experiment.train.time_power != 1:
        raise UserError(
            f"train.time_power={experiment.train.time_power} weighs what is a mean over times, "
            f"which the loss of {said} is not: leave it at 1"
        )
