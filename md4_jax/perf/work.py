"""Floating-point operations of a program, by the formula of its network."""

import functools
import math
from typing import Any

from md4_jax.experiment import Experiment, sample_block
from md4_jax.protocols import Objective, Params
from md4_jax.samplers.chain import Caches, ReadsParts, rounds_of


def forward_flops(
    experiment: Experiment, params: Any, objective: Objective | None = None, length: int = 0
) -> float:
    """Returns the FLOPs of a forward pass per token by the network's formula; nan without one.

    An objective in an order reads the noisy symbols and the clean text, as block diffusion does, in
    blocks of `stream_block` positions.

    length: tokens of a sequence; 0: those of training
    """
    count = experiment.network.flops
    if count is None:
        return math.nan
    streams = getattr(objective, "stream_block", 0)
    both = {"both": True} if streams and getattr(objective, "left_to_right", 0.0) else {}
    block = streams or getattr(objective, "block", 0)
    return count(params, length or experiment.data.length, block, **both)


def training_flops(experiment: Experiment, state: Any) -> float:
    """Returns the FLOPs of a training step per token: three times those of a forward pass.

    A frozen matrix has no gradient and counts two thirds of that. A teacher adds forward passes.
    """
    of = functools.partial(forward_flops, experiment, objective=experiment.objective)
    taught = getattr(experiment.objective, "teacher_calls", 0)
    calls = getattr(experiment.objective, "calls", 1)
    whole, trained = of(state.whole["network"]), of(state.params["network"])
    return (2.0 * calls + taught) * whole + calls * trained


def positions_cached(experiment: Experiment, params: Params, length: int) -> float | None:
    """Returns how many positions the evaluations of a text read, if its sampler uses a cache.

    None if each step reads a whole text, or a whole block of it. params: those of the experiment,
    or their shapes
    """
    step = experiment.sampler_step
    if sample_block(experiment) or not isinstance(step, Caches):
        return None
    if not step.is_cached(experiment.network.denoiser(params)):
        return None
    return step.positions_read(experiment.process, experiment.grid, length)


def positions_of_evaluation(experiment: Experiment, params: Params, length: int) -> int | None:
    """Returns how many positions an evaluation reads, if their number depends on the outputs.

    None for other samplers, whose evaluations with a cache `positions_cached` counts together.
    """
    step = experiment.sampler_step
    if positions_cached(experiment, params, length) is None or not isinstance(step, ReadsParts):
        return None
    return step.positions_each(length)


def evaluations(experiment: Experiment, length: int) -> int:
    """Returns the largest number of evaluations of such a text: of most samplers, one a step."""
    each = getattr(experiment.sampler_step, "evaluations_each", 1)
    return each * sampling_steps(experiment, length)


def sampling_steps(experiment: Experiment, length: int) -> int:
    """Returns the largest number of steps of a sample, or of one of its blocks, of this length."""
    return rounds_of(experiment.sampler_step, length, len(experiment.grid) - 1)
