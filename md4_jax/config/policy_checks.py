"""Checks of objectives that learn from rewards or from preferences."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config.defaults import defaults_of
from md4_jax.config.fit import objective_name
from md4_jax.config.load import flatten
from md4_jax.experiment import Experiment, has_rows
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
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
            f"{said} learns from rewards of samples, but no reward is set: set "
            "sample.reward.name, for example to pattern, judge, answer or "
            "package.module:attribute"
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
                f"{said} draws texts of data.length={data.length} tokens and averages over draws "
                f"of the noise, so {key}={value} cannot be used: set {key}={fitting[0]}"
            )
    if has_rows(experiment.config["data"]) and data.padding != "end_of_text":
        raise UserError(
            f"{said} draws whole texts, which end with an end-of-text token: it needs "
            f"data.padding='end_of_text', not {data.padding!r}"
        )
    if _has_conversations(experiment.config["data"]) and data.turns == "all":
        raise UserError(
            f"{said} draws and rewards one answer at a time, but with data.turns='all' all answers "
            "of a conversation would be drawn at once, and rewards would see only the first: set "
            "data.turns='last' or 'each'"
        )
    if data.separate_documents:
        raise UserError(
            f"{said} trains on texts that it draws itself, which are not packed documents: set "
            "data.separate_documents=False"
        )
    if experiment.sampler_step.needs.hides:
        raise UserError(
            f"{said} needs texts of a fixed length, but "
            f"sample.name={experiment.config['sample']['name']!r} changes the length: set "
            "process.name='masking'"
        )
    if experiment.network.companion is not None:
        raise UserError(f"{said} cannot train network.tables: set network.tables=0")


def _has_conversations(data: Mapping[str, Any]) -> bool:
    """Returns whether these data, or a part of them, are conversations."""
    return any(source.get("messages_key") for source in (data, *data.get("parts", {}).values()))


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
                f"sample.{key}={mine!r} differs from the value of this run, {its!r}, and {said} "
                "learns from the samples: use the value of the run, or begin another run in "
                "another --workdir, with train.initial"
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
            f"objective.group={group} texts for each prompt, and a batch is split over "
            f"{amount(shards, 'group')} of devices"
        )


def check_preferences(experiment: Experiment) -> None:
    """Raises UserError if only one of data and objective has rejected answers."""
    key, objective = experiment.config["data"].get("rejected_key", ""), experiment.objective
    said = f"objective.name={objective_name(objective)!r}"
    if objective.needs.preferences and not key:
        raise UserError(
            f"{said} learns from pairs of answers to a prompt: set data.prompt_key to the key of "
            "the prompt, data.text_key to that of the better answer and data.rejected_key to "
            "that of the worse one. For conversations, data.messages_key is the key of the "
            "better answer"
        )
    if key and not objective.needs.preferences:
        raise UserError(
            f"data.rejected_key={key!r} is only for objective.name='preference', because {said} "
            "does not use rejected answers: remove the key"
        )
    if objective.needs.preferences and experiment.train.time_power != 1:
        raise UserError(
            f"train.time_power={experiment.train.time_power} needs a loss that is a mean over "
            f"times, and the loss of {said} is not: set train.time_power=1"
        )
