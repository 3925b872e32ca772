"""What a config describes, as objects: made by `build`, used by every mode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax
from jax.sharding import Mesh

from md4_jax.generate.prompts import PromptOptions
from md4_jax.options import (
    BenchOptions,
    CheckpointOptions,
    DataOptions,
    EvalOptions,
    LogOptions,
    PlanOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.protocols import Network, Objective, Prompt


class Experiment(NamedTuple):
    """Everything that a mode of `main` needs, made from one config."""

    config: dict[str, Any]
    tokenizer: Any
    network: Network
    process: Any
    objective: Objective
    eval_objective: Objective
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    sampler_step: Any
    loop: Callable
    grid: np.ndarray
    mesh: Mesh
    data: DataOptions
    train: TrainOptions
    eval: EvalOptions
    sample: SampleOptions
    prompt: PromptOptions
    checkpoint: CheckpointOptions
    log: LogOptions
    bench: BenchOptions
    plan: PlanOptions


def templates(experiment: Experiment) -> list[Prompt]:
    """What the `sample` section fixes; UserError for text that does not fit."""
    return experiment.prompt.build(experiment.tokenizer, sample_length(experiment))


def sample_length(experiment: Experiment) -> int:
    """Tokens of a sample."""
    return experiment.sample.length or experiment.data.length


def sample_window(experiment: Experiment) -> int:
    """Tokens that the network sees at once when sampling."""
    length = sample_length(experiment)
    return min(length, experiment.data.length) if experiment.sample.stride else length


def sample_block(experiment: Experiment) -> int:
    """Tokens of a text that are sampled together, 0 for all."""
    return getattr(experiment.loop, "block", 0)


def eval_batch_size(experiment: Experiment) -> int:
    """Sequences of an evaluation step, of all processes together."""
    return experiment.eval.batch_size or experiment.train.batch_size
