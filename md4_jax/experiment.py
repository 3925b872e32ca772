"""Objects made by `build` from a config, and the sizes of samples and batches."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import optax
from jax.sharding import Mesh

from md4_jax.options import (
    CheckpointOptions,
    EvalOptions,
    LogOptions,
    PromptOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.options.data import DataOptions
from md4_jax.options.parts import BenchOptions, PlanOptions
from md4_jax.protocols import Network, Objective
from md4_jax.runtime.sharding import local_rows


class Experiment(NamedTuple):
    """All objects that a mode needs, made from one config.

    domain  meaning of the symbols, see data/domains.py
    learning_rate  `Rate` of training/optim.py
    ends    symbols of `sample.stop`, which end a text
    evals   evaluators by their name in the config, see evals/__init__.py
    steering  `Steering` of samplers/steering.py; None without a reward
    rewarded  the same, for an objective that learns from the reward; samples are then not steered
    guide   `Guide` of samplers/classifier.py; None without classifier guidance
    prompted  whether prompts are passed as token ids, which are not in the config
    """

    config: dict[str, Any]
    domain: Any
    network: Network
    process: Any
    objective: Objective
    optimizer: optax.GradientTransformation
    learning_rate: Callable
    sampler_step: Any
    loop: Callable
    ends: tuple[int, ...]
    grid: np.ndarray
    mesh: Mesh
    data: DataOptions
    train: TrainOptions
    evals: dict[str, Any]
    sample: SampleOptions
    prompt: PromptOptions
    checkpoint: CheckpointOptions
    eval: EvalOptions
    log: LogOptions
    bench: BenchOptions
    plan: PlanOptions
    steering: Any = None
    rewarded: Any = None
    guide: Any = None
    prompted: bool = False


def sample_length(experiment: Experiment) -> int:
    """Returns the number of tokens of a sample."""
    return experiment.sample.length or experiment.data.length


def sample_window(experiment: Experiment) -> int:
    """Returns the number of tokens that the network sees at once when sampling."""
    length = sample_length(experiment)
    return min(length, experiment.data.length) if experiment.sample.stride else length


def drawn_classes(experiment: Experiment) -> int:
    """Returns the number of classes from which a sample's class is drawn; 0: it is not drawn.

    Without sample.label, a network trained without network.label_dropout needs a random class.
    """
    network = experiment.config["network"]
    return 0 if network.get("label_dropout", 0.0) else network.get("classes", 0)


def sample_block(experiment: Experiment) -> int:
    """Returns the number of tokens sampled together; 0: all."""
    return getattr(experiment.loop, "block", 0)


def has_rows(data: Mapping[str, Any]) -> bool:
    """Returns whether each text of these data, or of a part of them, is a separate sequence."""
    keys, sources = ("label_key", "prompt_key", "messages_key"), [data]
    sources += data.get("parts", {}).values()
    is_own = any(source.get(key) for source in sources for key in keys)
    return is_own or data.get("windows") == "documents"


def clean_prompts(data: Mapping[str, Any]) -> bool:
    """Returns whether texts of these data have clean prompts: pairs or conversations.

    For a mixture, one part with prompts is enough: the network then learns that they are clean.
    """
    sources = [data, *data.get("parts", {}).values()]
    return any(source.get(key) for source in sources for key in ("prompt_key", "messages_key"))


def rows_of(experiment: Experiment, batch_size: int) -> dict[str, Any]:
    """Returns arguments for the batches of a corpus: global size and rows of this process."""
    return {"batch_size": batch_size, "rows": local_rows(experiment.mesh, batch_size)}
