"""What a config describes, as objects: made by `build`, used by every mode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax
from jax.sharding import Mesh

from md4_jax.checkpoint import CheckpointOptions
from md4_jax.evaluate import EvalOptions
from md4_jax.metrics import LogOptions
from md4_jax.prompts import PromptOptions, Template
from md4_jax.protocols import Network, Objective
from md4_jax.sample import SampleOptions
from md4_jax.sections import BenchOptions, DataOptions, PlanOptions
from md4_jax.step import TrainOptions


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


def templates(built: Experiment) -> list[Template]:
    """What the `sample` section fixes; UserError for text that does not fit."""
    return built.prompt.build(built.tokenizer, sample_length(built))


def sample_length(built: Experiment) -> int:
    """Tokens of a sample."""
    return built.sample.length or built.data.length


def sample_window(built: Experiment) -> int:
    """Tokens that the network sees at once when sampling."""
    length = sample_length(built)
    return min(length, built.data.length) if built.sample.stride else length


def sample_block(built: Experiment) -> int:
    """Tokens of a text that are sampled together, 0 for all."""
    return getattr(built.loop, "block", 0)


def eval_batch_size(built: Experiment) -> int:
    """Sequences of an evaluation step, of all processes together."""
    return built.eval.batch_size or built.train.batch_size
