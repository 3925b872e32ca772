"""Bound of D3PM with T steps: docs/families/d3pm.md."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, at_positions, noise_of
from md4_jax.objectives.md4 import DiscreteMD4
from md4_jax.objectives.noising import prompted
from md4_jax.objectives.token_nats import counted, divergence_nats, token_nats
from md4_jax.processes.capabilities import HasPosterior, RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

DEFAULT_TIMESTEPS = 1000
DECODERS = ("reverse_step", "denoiser")


@dataclasses.dataclass(frozen=True)
class D3PM:
    """Bound of T steps, z_i at t = i / T, in nats (D3PM, arXiv:2107.03006, eq. 1, 4 and 5).

    L(x) = KL(q(z_T | x) || prior) + sum_{i=2}^T E KL(q(z_{i-1} | z_i, x) || p(z_{i-1} | z_i))
           - E log p(x | z_1)  [ + cross_entropy sum_{i=1}^T E[ -log mu(x | z_i) ] ]

    alpha is pinned to 1 at i = 0, so that q(z_0 | z_1, x) is x itself. Each sequence draws one i,
    and its term is multiplied by T; the prior's term is exact. With masks it is MD4's bound with T
    steps (identity D02), with alpha pinned to 0 at i = T. p(z_{i-1} | z_i) is the process's
    `reverse_logits`.

    timesteps      T; None: that of the process `transition`, with which a number must agree, or
                   1000 for other processes
    decoder        p(x | z_1). reverse_step: p(z_0 = x | z_1) like every other step, as samples are
                   drawn here and as in identity D02. denoiser: mu(x | z_1), the network's
                   distribution at masked and unmasked tokens, as in D3PM's code and published
                   bits. Both are bounds, of different models: they differ for joint and for masks
    cross_entropy  D3PM's lambda, added to each step's term as in its code, so not divided by T.
                   Above 0 it is a training-only loss. Its optimum is the posterior of x, from which
                   with a uniform kernel only the mixture form computes the right step (D04), so
                   joint is refused there. Allowed are D3PM's recipe for the gaussian kernel, joint
                   with 0.001, and masks, for which both forms are equal
    """

    needs: ClassVar[Needs] = Needs(
        (RevealsMasks, HasPosterior),
        parametrisations=("joint", "mixture"),
        why="a step of T must be a distribution for every output of the network",
    )
    time_power: ClassVar[int] = 2

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

    def for_evaluation(self) -> "D3PM":
        """Returns the bound of the same model, without cross_entropy."""
        return dataclasses.replace(self, cross_entropy=0.0)

    def check(self, process: Any) -> None:
        """Raises UserError for a process with other steps, or a form with a different optimum."""
        own = process.timesteps
        if own is not None and self.timesteps not in (None, own):
            raise UserError(
                f"objective.timesteps={self.timesteps} must be process.timesteps={own}: the "
                "process has a matrix for each of its steps (objective.timesteps=None uses that "
                "number)"
            )
        uniform = getattr(process, "is_uniform", False)
        if self.cross_entropy > 0 and uniform and process.parametrisation == "joint":
            # Hybrid noise has no other form.
            own = "parametrisation" in {field.name for field in dataclasses.fields(process)}
            raise UserError(
                f"objective.cross_entropy={self.cross_entropy} with uniform noise needs "
                f"{'' if own else 'process.name=uniform and '}process.parametrisation='mixture', "
                "not 'joint': the cross-entropy is minimised by the posterior of x, which gives "
                "wrong steps with the joint form"
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
        """Returns T for this process."""
        self.check(process)
        return process.timesteps or self.timesteps or DEFAULT_TIMESTEPS

    def corrupt(self, process: Any, x: Array, step: Array, keys: Array) -> Array:
        """Draws z_i ~ q(. | x), i = step [B]: int32 [B, L]."""
        last = self.steps(process)
        if isinstance(process, RevealsMasks):
            probability = DiscreteMD4(last).masked_probability(process, step)
            return process.mask_each(keys, x, probability)
        return process.corrupt(keys, x, step / last)

    def prior(self, process: Any, batch: Batch) -> Array:
        """Returns KL(q(z_T | x) || prior), nats per sequence [B]; 0 with masks."""
        if isinstance(process, RevealsMasks):
            return jnp.zeros(len(batch.tokens))
        return counted(process.prior_nats(batch.tokens), batch)

    def loss_at(
        self, denoiser: Denoiser, process: Any, batch: Batch, z: Array, step: Array
    ) -> Array:
        """Returns the term of this step times T, without the prior [B]."""
        last = self.steps(process)
        if isinstance(process, RevealsMasks):
            each = self._token_nats(denoiser, process, batch, z, step / last)
            masked = jnp.sum(jnp.where(noise_of(process, batch, z), each, 0.0), axis=1)
            nats = DiscreteMD4(last).weighed(process, masked, step)
        else:
            outputs = denoiser(z, step / last)
            nats = last * counted(_divergence(process, outputs, batch, z, step, last), batch)
            each = token_nats(outputs, batch.tokens)
        if self.decoder == "denoiser":
            nats = jnp.where(step == 1, last * counted(each, batch), nats)
        if self.cross_entropy == 0.0:
            return nats
        if process.shows_clean:
            each = jnp.where(process.is_noise(z), each, 0.0)
        return nats + self.cross_entropy * last * counted(each, batch)

    def _token_nats(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns -log mu(x) of the tokens that the term needs: masks, or all tokens to decode."""
        h, rows = denoiser.features(z, t), (batch.tokens,)
        if self.decoder == "denoiser":
            return at_positions(
                denoiser, h, batch.loss_mask, reduce=token_nats, padded=True, rows=rows
            )
        return at_noise(
            denoiser, h, noise_of(process, batch, z), reduce=token_nats, padded=True, rows=rows
        )

    def all_steps(self, denoiser: Denoiser, process: Any, batch: Batch, keys: Array) -> Array:
        """Sums over all i, with one z_i each, and adds the prior [B]: T network evaluations."""
        last = self.steps(process)

        def term(i: Array) -> Array:
            step = jnp.full(batch.tokens.shape[0], i)
            each = fold_keys(keys, i)
            z = prompted(batch, self.corrupt(process, batch.tokens, step, each))
            return self.loss_at(denoiser, process, batch, z, step) / last

        terms_TxB = jax.lax.map(term, jnp.arange(1, last + 1))
        return jnp.sum(terms_TxB, axis=0) + self.prior(process, batch)


def _divergence(
    process: HasPosterior, outputs: Array, batch: Batch, z: Array, step: Array, last: int
) -> Array:
    """Computes KL(q(z_{i-1} | z_i, x) || p(z_{i-1} | z_i)) per token, i = step of last: [B, L]."""
    s, t = (step - 1) / last, step / last
    pinned = process.pinned()
    return divergence_nats(
        pinned.reverse_logits(outputs, z, s, t), pinned.posterior_logits(batch.tokens, z, s, t)
    )
