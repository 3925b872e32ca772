"""Optimizers by their name in a config: learning rate, decay mask, clip, one optax chain."""

import dataclasses
import re
from collections.abc import Callable

import jax
import optax
from optax import contrib

from md4_jax.protocols import Params, UserError
from md4_jax.runtime.sharding import path_name

DECAYED = re.compile(r"kernel$")
# Muon orthogonalises the matrices between hidden layers; embedding, head and
# everything one-dimensional keep Adam.
HIDDEN_MATRIX = re.compile(r"blocks(_\d+)?/.*kernel$")
SHAPES = ("cosine", "linear", "constant")
PRECONDITIONING = ("frobenius", "aol")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then `decay` to final_fraction of it after num_steps updates.

    What a forward process learns has a rate and a weight decay of its own.
    """

    decay: str = "cosine"
    warmup_steps: int = 2000
    final_fraction: float = 0.0
    process_learning_rate: float = 1e-2
    process_weight_decay: float = 0.0

    def schedule(self, peak: float, num_steps: int) -> optax.Schedule:
        """The learning rate as a function of the number of updates done."""
        if self.decay not in SHAPES:
            raise UserError(f"optim.decay must be one of {', '.join(SHAPES)}, not {self.decay!r}")
        if not 0 <= self.warmup_steps <= num_steps:
            raise UserError(
                f"optim.warmup_steps={self.warmup_steps} must lie between 0 and "
                f"train.num_steps={num_steps}; a short run needs a short warm-up too: "
                f"--config.optim.warmup_steps={num_steps // 10}"
            )
        rest = max(1, num_steps - self.warmup_steps)
        final = peak * self.final_fraction
        after = {
            "cosine": optax.cosine_decay_schedule(peak, rest, self.final_fraction),
            "linear": optax.linear_schedule(peak, final, rest),
            "constant": optax.constant_schedule(peak),
        }[self.decay]
        # Counted from one, so that the first update is not spent at rate zero.
        warmup = optax.linear_schedule(
            peak / max(1, self.warmup_steps), peak, max(1, self.warmup_steps - 1)
        )
        return optax.join_schedules([warmup, after], [self.warmup_steps])

    def chain(
        self, network: optax.GradientTransformation, clip: float, num_steps: int
    ) -> optax.GradientTransformation:
        """The clip over everything, `network` for its parameters, Adam for those of the process."""
        process = optax.adamw(
            self.schedule(self.process_learning_rate, num_steps),
            weight_decay=self.process_weight_decay,
        )
        parts = optax.partition({"network": network, "process": process}, by_part)
        return optax.chain(clipping(clip), parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(LearningRate):
    """AdamW (arXiv:1711.05101) with a global-norm clip; weight decay on matrices alone."""

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def build(self, num_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
        rate = self.schedule(self.learning_rate, num_steps)
        adamw = optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decay_mask,
        )
        return self.chain(adamw, self.clip, num_steps), rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(LearningRate):
    """Muon (Jordan et al. 2024, optax.contrib) on the blocks' matrices, Adam on the rest.

    learning_rate is Muon's, adam_learning_rate that of embedding, head and gains;
    both follow the same warm-up and decay, and both have Nesterov momentum. ns_steps Newton-Schulz
    iterations make an update nearly orthogonal, from a start that preconditioning says: of norm 1
    (frobenius), or with its columns scaled so that fewer do (aol, arXiv:2512.04632).
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
        if self.ns_steps < 1:
            raise UserError(f"optim.ns_steps must be at least 1, not {self.ns_steps}")
        if self.preconditioning not in PRECONDITIONING:
            raise UserError(
                f"optim.preconditioning must be one of {', '.join(PRECONDITIONING)}, "
                f"not {self.preconditioning!r}"
            )

    def build(self, num_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
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
        return self.chain(muon, self.clip, num_steps), rate


OPTIMIZERS = {
    "adamw": AdamW,
    "muon": Muon,
}


def clipping(norm: float) -> optax.GradientTransformation:
    """Scales gradients so that their global norm is at most `norm`; 0 leaves them as they are."""
    return optax.clip_by_global_norm(norm) if norm > 0 else optax.identity()


def by_part(params: Params) -> Params:
    """'process' for what the forward process learns, 'network' for the rest."""
    return _by_path(params, lambda name: "process" if name.startswith("process") else "network")


def decay_mask(params: Params) -> Params:
    """True for the matrices of linear layers; embeddings, biases, gains and processes are not."""
    return _by_path(params, lambda name: bool(DECAYED.search(name)))


def hidden_matrices(params: Params) -> Params:
    """Which axes Muon orthogonalises; None where Adam applies. Layer axes are batched over."""
    numbers = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return _by_path(params, lambda name: numbers if HIDDEN_MATRIX.search(name) else None)


def _by_path(params: Params, choose: Callable) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: choose(path_name(path)), params)
