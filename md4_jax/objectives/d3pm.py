"""D3PM's bound of a model with T steps: docs/families/d3pm.md."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.md4 import DiscreteMD4, prompted
from md4_jax.objectives.token_nats import counted, divergence_nats, token_nats
from md4_jax.processes.capabilities import HasPosterior, RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

DEFAULT_TIMESTEPS = 1000
DECODERS = ("reverse_step", "denoiser")


@dataclasses.dataclass(frozen=True)
class D3PM:
    """The bound of T steps, z_i at t = i / T (arXiv:2107.03006, eq. 1, 4 and 5).

    L(x) = KL(q(z_T | x) || prior) + sum_{i=2}^T E KL(q(z_{i-1} | z_i, x) || p(z_{i-1} | z_i))
           - E log p(x | z_1)  [ + cross_entropy sum_{i=1}^T E[ -log mu(x | z_i) ] ]

    alpha is pinned to 1 at i = 0, so q(z_0 | z_1, x) is x itself and the last term of the
    first line is the sum's i = 1. One i a sequence, times T; the prior's term is exact. With
    masks it is MD4's bound with T steps (identity D02), whose alpha is pinned to 0 at i = T.
    p is the process's `reverse_logits`, joint or mixture; p(x | z_1) is the `decoder`'s. Nats
    per sequence.

    timesteps      T; None: that of the process `transition`, which a number must agree with,
                   and 1000 for the others
    decoder        reverse_step: p(x | z_1) is p(z_0 = x | z_1) as at every other step, with
                   which samples are drawn here and identity D02 holds. denoiser: it is
                   mu(x | z_1), the network's distribution itself, at masked and unmasked tokens
                   alike, as in D3PM's code; published bits of D3PM are with it. Both make a
                   bound, each of another model. They differ in the joint form and for masks
    cross_entropy  D3PM's lambda, beside each step's term as in its code, so not divided by T.
                   Above 0 it is a training-only loss. What it learns is the posterior of x,
                   which on a uniform kernel only the mixture form turns into the right step
                   (D04): joint is refused there. D3PM's recipe for the gaussian kernel, joint
                   with 0.001, is allowed, and so are masks, where the two forms are the same.
    """

    needs: ClassVar[Needs] = Needs(
        (RevealsMasks, HasPosterior),
        parametrisations=("joint", "mixture"),
        why="a step of T has to be a distribution for every output of the network",
    )

    timesteps: int | None = None
    cross_entropy: float = 0.0
    decoder: str = "reverse_step"

    def __post_init__(self):
        if self.decoder not in DECODERS:
            raise UserError(
                f"objective.decoder must be one of {', '.join(DECODERS)}, not {self.decoder!r}"
            )
        if self.timesteps is not None and self.timesteps < 1:
            raise UserError(f"objective.timesteps must be at least 1, not {self.timesteps}")
        if self.cross_entropy < 0:
            raise UserError(
                f"objective.cross_entropy must not be negative, not {self.cross_entropy}"
            )

    def is_bound(self, process: Any) -> bool:
        return self.cross_entropy == 0.0

    def check(self, process: Any) -> None:
        """UserError for a process that has other steps, or whose form has another optimum."""
        own = process.timesteps
        if own is not None and self.timesteps not in (None, own):
            raise UserError(
                f"objective.timesteps={self.timesteps} must be process.timesteps={own}: the "
                "process has a matrix for each of its steps (None takes it from there)"
            )
        uniform = getattr(process, "is_uniform", False)
        if self.cross_entropy > 0 and uniform and process.parametrisation == "joint":
            raise UserError(
                f"objective.cross_entropy={self.cross_entropy} with uniform noise needs "
                "process.parametrisation='mixture', not 'joint': the cross-entropy learns the "
                "posterior of x, for which the joint form takes wrong steps"
            )

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        last = self.steps(process)
        step = jnp.clip(jnp.floor(u * last).astype(jnp.int32) + 1, 1, last)
        z = prompted(batch, self.corrupt(process, batch.tokens, step, keys))
        prior = self.prior(process, batch)
        return self.loss_at(denoiser, process, batch, z, step) + prior, {"prior": prior}

    def steps(self, process: Any) -> int:
        """T with this process."""
        self.check(process)
        return process.timesteps or self.timesteps or DEFAULT_TIMESTEPS

    def corrupt(self, process: Any, x: Array, step: Array, keys: Array) -> Array:
        """z_i ~ q(. | x), i = step [B], int32 [B, L]."""
        last = self.steps(process)
        if isinstance(process, RevealsMasks):
            chance = DiscreteMD4(last).masked_probability(process, step)
            return process.mask_each(keys, x, chance)
        return process.corrupt(keys, x, step / last)

    def prior(self, process: Any, batch: Batch) -> Array:
        """KL(q(z_T | x) || prior), nats per sequence [B]; 0 with masks."""
        if isinstance(process, RevealsMasks):
            return jnp.zeros(len(batch.tokens))
        return counted(process.prior_nats(batch.tokens), batch)

    def loss_at(
        self, denoiser: Denoiser, process: Any, batch: Batch, z: Array, step: Array
    ) -> Array:
        """The term of that step times T, without the prior [B]."""
        last = self.steps(process)
        t = step / last
        outputs = denoiser(z, t)
        if isinstance(process, RevealsMasks):
            known = Denoiser(lambda z, t: outputs, lambda h: h)
            nats = DiscreteMD4(last).loss_at(known, process, batch, z, step)
        else:
            nats = last * counted(_divergence(process, outputs, batch, z, step, last), batch)
        each = token_nats(outputs, batch.tokens)
        if self.decoder == "denoiser":
            nats = jnp.where(step == 1, last * counted(each, batch), nats)
        if self.cross_entropy == 0.0:
            return nats
        if process.shows_clean:
            each = jnp.where(process.is_noise(z), each, 0.0)
        return nats + self.cross_entropy * last * counted(each, batch)

    def all_steps(self, denoiser: Denoiser, process: Any, batch: Batch, keys: Array) -> Array:
        """The whole sum over i, one z_i for each, and the prior: T network evaluations [B]."""
        last = self.steps(process)

        def term(i: Array) -> Array:
            step = jnp.full(batch.tokens.shape[0], i)
            each = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            z = prompted(batch, self.corrupt(process, batch.tokens, step, each))
            return self.loss_at(denoiser, process, batch, z, step) / last

        terms_TxB = jax.lax.map(term, jnp.arange(1, last + 1))
        return jnp.sum(terms_TxB, axis=0) + self.prior(process, batch)


def _divergence(
    process: HasPosterior, outputs: Array, batch: Batch, z: Array, step: Array, last: int
) -> Array:
    """KL(q(z_{i-1} | z_i, x) || p(z_{i-1} | z_i)) of each token at i = step of last: [B, L]."""
    s, t = (step - 1) / last, step / last
    pinned = process.pinned()
    return divergence_nats(
        pinned.reverse_logits(outputs, z, s, t), pinned.posterior_logits(batch.tokens, z, s, t)
    )
