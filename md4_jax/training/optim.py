"""Optimizers, each an optax chain with gradient clipping and learning rate."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from md4_jax.protocols import Array, Params, UserError
from md4_jax.runtime.sharding import path_name

DECAYED = re.compile(r"kernel$")
# Muon orthogonalises the matrices of blocks, which network.name="partition" calls encoder, decoder
# and, between them, swap_attention. Embedding, head and vectors use Adam.
HIDDEN_MATRIX = re.compile(r"(blocks(_\d+)?|(^|/)(encoder|decoder|swap_attention))/.*kernel$")
SHAPES = ("cosine", "linear", "constant", "rsqrt")
CLOCKS = ("steps", "seconds")
AVERAGES = ("b1", "b2", "momentum")  # weights of the past in a moving average
RATES = re.compile(r".*learning_rate|.*weight_decay|clip|final_fraction")
MODERATE = 1e18  # times 2e19 it is below float32's largest number
EPS = 1e-8  # of Adam, in optax and here
PRECONDITIONING = ("frobenius", "aol")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then `decay` to final_fraction of it after num_steps updates.

    `constant` stays at the peak. `rsqrt` is peak sqrt(warmup_steps / updates).
    clock: progress of the decay: `steps`, or `seconds`, the larger of the fractions of
    train.seconds and of steps. With `seconds` a slow machine also ends at final_fraction.
    Parameters of the forward process have their own learning rate and weight decay.
    """

    decay: str = "cosine"
    clock: str = "steps"
    warmup_steps: int = 2000
    final_fraction: float = 0.0
    process_learning_rate: float = 1e-2
    process_weight_decay: float = 0.0

    def __post_init__(self):
        if self.clock not in CLOCKS:
            raise UserError(f"optim.clock must be one of {', '.join(CLOCKS)}, not {self.clock!r}")
        if self.clock == "seconds" and self.decay not in ("cosine", "linear"):
            raise UserError(
                "optim.clock='seconds' needs optim.decay='cosine' or 'linear', which end with "
                f"the time limit, not {self.decay!r}"
            )
        for name, value in vars(self).items():
            if name in AVERAGES and not 0 <= value < 1:
                raise UserError(f"optim.{name} must lie in [0, 1), not {value}")
            if RATES.fullmatch(name) and not 0 <= value < math.inf:
                raise UserError(f"optim.{name} must be a number of at least 0, not {value}")

    def schedule(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the learning rate as a function of the number of updates done."""
        if self.decay not in SHAPES:
            raise UserError(f"optim.decay must be one of {', '.join(SHAPES)}, not {self.decay!r}")
        if not 0 <= self.warmup_steps <= num_steps:
            raise UserError(
                f"optim.warmup_steps={self.warmup_steps} must lie between 0 and "
                f"train.num_steps={num_steps}. For a short run set, for example, "
                f"--config.optim.warmup_steps={num_steps // 10}"
            )
        rest = max(1, num_steps - self.warmup_steps)
        first = max(1, self.warmup_steps)
        final = peak * self.final_fraction
        after = {
            "cosine": optax.cosine_decay_schedule(peak, rest, self.final_fraction),
            "linear": optax.linear_schedule(peak, final, rest),
            "constant": optax.constant_schedule(peak),
            "rsqrt": lambda count: peak * (first / (first + count)) ** 0.5,
        }[self.decay]
        # Counts from one, because a first update with rate zero would be wasted.
        warmup = optax.linear_schedule(peak / first, peak, max(1, self.warmup_steps - 1))
        return optax.join_schedules([warmup, after], [self.warmup_steps])

    def followed(self, peak: float, num_steps: int, *, bounded: bool = False) -> "Rate":
        """Returns the same learning rate as a function of updates and the fraction of seconds."""
        shape = self.schedule(1.0, num_steps)
        by_seconds = self.clock == "seconds"
        return Rate(peak, shape, self.warmup_steps, num_steps, by_seconds, bounded)

    def is_moderate(self, eps: float = EPS) -> bool:
        """Returns whether Adam's update is finite for every gradient with a finite norm.

        Entries of such a gradient are below 2e19, so those of the update are at most 2e19 / eps
        times the rate.
        """
        rates = [value for name, value in vars(self).items() if name.endswith("learning_rate")]
        decays = [value for name, value in vars(self).items() if name.endswith("weight_decay")]
        return max(rates) <= MODERATE * min(eps, EPS) and max(rates) * max(decays) <= 1

    def chain(
        self, network: optax.GradientTransformation, clip: float, num_steps: int
    ) -> optax.GradientTransformation:
        """Chains clipping with `network` for the network's parameters and Adam for others."""
        process = optax.adamw(
            self.schedule(self.process_learning_rate, num_steps),
            weight_decay=self.process_weight_decay,
        )
        parts = optax.partition({"network": network, "process": process}, by_part)
        return optax.chain(clipping(clip), parts)


class Rate(NamedTuple):
    """Learning rate of a run that may follow seconds.

    shape: (number of updates) -> rate with peak 1. follows_seconds: whether the optimizer's
    updates, which depend only on their number, must be multiplied by `pace`. bounded: whether the
    optimizer's update is finite for every finite gradient. of_matrices: whether the peak is only
    that of `hidden_matrices`.
    """

    peak: float
    shape: optax.Schedule
    warmup_steps: int
    num_steps: int
    follows_seconds: bool
    bounded: bool = False
    of_matrices: bool = False

    @classmethod
    def of(cls, schedule: optax.Schedule) -> "Rate":
        """Converts a schedule to a rate that follows only steps; returns a rate unchanged."""
        return schedule if isinstance(schedule, cls) else cls(1.0, schedule, 0, 0, False)

    def __call__(self, step: Array, spent: Array | float = 0.0) -> Array:
        """Returns the rate after `step` updates and this fraction `spent` of the seconds."""
        return self.peak * self.shape(self._reached(step, spent))

    def pace(self, step: Array, spent: Array | float) -> Array:
        """Returns the rate at this time divided by the rate that follows from the step alone.

        It is 1 if the latter is 0, as the end of a cosine may be in float32.
        """
        own = self.shape(step)
        paced = self.shape(self._reached(step, spent)) / jnp.where(own > 0, own, 1.0)
        return jnp.where(own > 0, paced, 1.0)

    def _reached(self, step: Array, spent: Array | float) -> Array:
        ahead = jnp.maximum(step, jnp.minimum(spent, 1.0) * self.num_steps)
        # The warm-up counts updates, because momentum and second moments need them.
        return jnp.where(step < self.warmup_steps, step, ahead)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(LearningRate):
    """AdamW (arXiv:1711.05101) with clipping by global norm.

    decayed: parameters with weight decay: `matrices` of linear layers, or `all`.
    """

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = EPS
    weight_decay: float = 0.0
    decayed: str = "matrices"
    clip: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.eps <= 0:
            raise UserError(f"optim.eps must be above 0, not {self.eps}")
        if self.decayed not in ("matrices", "all"):
            raise UserError(f"optim.decayed must be matrices or all, not {self.decayed!r}")

    def build(self, num_steps: int) -> tuple[optax.GradientTransformation, Rate]:
        rate = self.schedule(self.learning_rate, num_steps)
        adamw = optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decay_mask if self.decayed == "matrices" else None,
        )
        bounded = self.is_moderate(self.eps)
        followed = self.followed(self.learning_rate, num_steps, bounded=bounded)
        return self.chain(adamw, self.clip, num_steps), followed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(LearningRate):
    """Muon (Jordan et al. 2024, optax.contrib) for the blocks' matrices, Adam for the rest.

    learning_rate is Muon's, adam_learning_rate that of embedding, head and gains. Both have the
    same warm-up and decay, and Nesterov momentum. ns_steps Newton-Schulz iterations make an update
    nearly orthogonal. preconditioning scales the update before them: to norm 1 (frobenius), or by
    columns (aol, arXiv:2512.04632), which needs fewer iterations.
    """

    learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    momentum: float = 0.95
    ns_steps: int = 5
    preconditioning: str = "frobenius"
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.ns_steps < 1:
            raise UserError(f"optim.ns_steps must be at least 1, not {self.ns_steps}")
        if self.preconditioning not in PRECONDITIONING:
            raise UserError(
                f"optim.preconditioning must be one of {', '.join(PRECONDITIONING)}, "
                f"not {self.preconditioning!r}"
            )

    def build(self, num_steps: int) -> tuple[optax.GradientTransformation, Rate]:
        rate = self.schedule(self.learning_rate, num_steps)
        muon = contrib.muon(
            rate,
            ns_steps=self.ns_steps,
            preconditioning=self.preconditioning,
            beta=self.momentum,
            weight_decay=self.weight_decay,
            adam_b1=self.b1,
            adam_b2=self.b2,
            adam_learning_rate=self.schedule(self.adam_learning_rate, num_steps),
            muon_weight_dimension_numbers=hidden_matrices,
        )
        # Without clipping, products of momenta may be inf - inf.
        bounded = self.is_moderate() and 0 < self.clip <= 1
        followed = self.followed(self.learning_rate, num_steps, bounded=bounded)
        return self.chain(muon, self.clip, num_steps), followed._replace(of_matrices=True)


OPTIMIZERS = {
    "adamw": AdamW,
    "muon": Muon,
}


def clipping(most: float) -> optax.GradientTransformation:
    """Scales gradients to a global norm of at most `most`; 0 disables clipping.

    The update takes the norm, already computed by the caller, as an extra argument. It multiplies
    all gradients by one factor: optax.clip_by_global_norm divides them, for which XLA on CPUs keeps
    a second copy.
    """

    def update(
        grads: Params, state: Any, params: Params | None = None, *, norm: Array | None = None, **_
    ) -> tuple[Params, Any]:
        del params
        norm = optax.tree.norm(grads) if norm is None else norm
        return scaled(grads, jnp.minimum(1.0, most / norm)), state

    transformation = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    return transformation if most > 0 else optax.identity()


def scaled(tree: Params, factor: Array) -> Params:
    """Multiplies all arrays by a factor, keeping their types."""
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree)


def by_part(params: Params) -> Params:
    """Labels the parameters of the forward process 'process', all others 'network'."""
    return _by_path(params, lambda name: "process" if name.startswith("process") else "network")


def decay_mask(params: Params) -> Params:
    """Marks the matrices of linear layers, but not embeddings, biases, gains or processes."""
    return _by_path(params, lambda name: bool(DECAYED.search(name)))


def hidden_matrices(params: Params) -> Params:
    """Returns the axes for Muon to orthogonalise; None for Adam. Layer axes are batch axes."""
    numbers = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return _by_path(params, lambda name: numbers if HIDDEN_MATRIX.search(name) else None)


def _by_path(params: Params, choose: Callable) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: choose(path_name(path)), params)
