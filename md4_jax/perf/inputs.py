"""Inputs of the programs of a config, with the shapes of its data and samples."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.experiment import Experiment, clean_prompts, has_rows, sample_length, sample_window
from md4_jax.protocols import Batch, Objective, Prompt, UserError
from md4_jax.runtime.sharding import batch_shards
from md4_jax.samplers.batches import Sampler, make_sampler, windows


def data_of(experiment: Experiment, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the `data` section with all keys; changes: keys overridden by an evaluator."""
    own, changes = experiment.config["data"], changes or {}
    is_same = changes.get("name", own["name"]) == own["name"]
    return {**dataclasses.asdict(experiment.data), **(own if is_same else {}), **changes}


def context_shapes(
    experiment: Experiment, shape: tuple[int, int], changes: Mapping[str, Any] | None = None
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the int32 context of a batch of tokens [B, L].

    changes: overridden keys of the `data` section
    """
    found = {"segments": shape} if _has_segments(data_of(experiment, changes)) else {}
    return found | ({"label": shape[:1]} if _has_labels(experiment, changes) else {})


def _has_segments(data: Mapping[str, Any]) -> bool:
    """Returns whether batches of a `data` section contain segments for attention.

    They do if documents are separated, or if texts are padded with tokens that do not count.
    """
    return data["separate_documents"] or (has_rows(data) and data["padding"] == "hidden")


def _has_labels(experiment: Experiment, changes: Mapping[str, Any] | None) -> bool:
    """Returns whether batches contain the class of each sequence, for a network with classes.

    changes: keys of an evaluator's data, which may have no classes
    """
    if not experiment.config["network"].get("classes", 0):
        return False
    data = data_of(experiment, changes)
    said = [data[key] for key in ("label_key", "labels") if key in data]
    return not changes or not said or any(said)


def sample_rows(experiment: Experiment) -> int:
    """Returns the number of samples drawn at once: a batch that the mesh can split.

    UserError for samples that are not drawn by the plain sampler's program.
    """
    if experiment.network.classifies:
        raise UserError(
            "a classifier cannot generate samples: remove `sample` from bench.parts and plan.parts"
        )
    if experiment.steering is not None:
        name = experiment.config["sample"]["reward"]["name"]
        raise UserError(
            f"sample.reward.name={name!r} calls a function on the host between steps, which is "
            "not included in what is timed or planned: set sample.reward.name=none here"
        )
    guide = experiment.guide
    if guide is not None and guide.network is None:
        raise UserError(
            f"sample.classifier={guide.options.classifier} was trained on other data than random "
            "tokens: leave it empty here, or leave out bench.random_tokens and plan.random_tokens"
        )
    shards = batch_shards(experiment.mesh)
    return -(-experiment.sample.batch_size // shards) * shards


def sampler_of(experiment: Experiment) -> Sampler:
    """Returns the sampler of the experiment, with its guide if any, without a trace."""
    return make_sampler(
        experiment.network,
        experiment.loop,
        experiment.grid,
        experiment.mesh,
        guidance=experiment.guide or experiment.sample.guidance,
        clean_prompts=clean_prompts(experiment.config["data"]),
    )


def sample_prompts(experiment: Experiment, rows: int) -> list[Prompt]:
    """Returns the prompts [rows, L] of the windows of samples: tokens of the previous windows.

    The first window has none. Without sample.stride, a single window is the whole sample.
    """
    length, window = sample_length(experiment), sample_window(experiment)
    known, found = np.zeros(length, bool), []
    for part in windows(length, window, experiment.sample.stride):
        mask = np.tile(known[part], (rows, 1))
        found.append(Prompt(np.zeros(mask.shape, np.int32), mask))
        known[part] = True
    return found


def completed(objective: Objective, batch: Batch, rewards: Any) -> Batch:
    """Adds the other inputs of the objective to the batch; rewards [B] may be any numbers."""
    if objective.needs.preferences:
        batch = batch._replace(rejected=batch.tokens)
    if objective.needs.rewards:
        batch = batch._replace(reward=rewards, advantage=rewards)
    return batch
