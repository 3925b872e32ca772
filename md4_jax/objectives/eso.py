"""Bounds of Eso-LM: masked diffusion, then left to right: docs/families/eso_lm.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, at_positions
from md4_jax.objectives.noising import masked, prompted
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys, split_keys, uniforms
from md4_jax.processes.order import check_clean_share, ranks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class Eso:
    """Bound of Eso-LM (B): diffusion up to alpha_0, then left to right (arXiv:2506.01928).

        L(x) = int_0^1 alpha_0 / (1 - alpha_0 s) E[ sum_{z_n = m} -log mu_n(z)[x_n] ] ds
               + E[ sum_{z_n = m} -log mu_n(z, x_{<n})[x_n] ]

    In the first term tokens stay clean with probability alpha_0 s, in the second with alpha_0. The
    network reads clean tokens in a random order, then the masks. Masks of the first term have a
    random order, and each also sees the masks before it. Masks of the second term come from left to
    right, and each sees the tokens before it. Nats per sequence [B].

    alpha_0  fraction of tokens that diffusion generates. 0: the autoregressive likelihood; 1: the
             bound of masked diffusion, with attention in a random order
    split    fraction of the sequences that are used for the first term, with a weight of 1 / split;
             the others are used for the second. u decides, so that fractions are exact in each
             batch. With alpha_0 = 0 or 1 there is only one term

    One draw of the first term always masks one token, and each other one with probability
    1 - alpha_0 s. The estimate is alpha_0 L times the mean over the masks. It is unbiased, without
    variance from the number of masks. The schedule has no effect.
    Tokens that do not count come first in the order. `for_evaluation` is the bound for samples with
    a cache, which have one order (`EsoOrders`).
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True)

    alpha_0: float = 0.125
    split: float = 0.5

    def __post_init__(self):
        check_clean_share("objective.alpha_0", self.alpha_0)
        if not 0.0 < self.split < 1.0:
            raise UserError(f"objective.split must lie between 0 and 1, not {self.split}")

    @property
    def stream_block(self) -> int:
        """Positions of a block in passes of noisy symbols and clean text; 0: of L symbols."""
        return 0 if self.share == 1.0 else 1

    @property
    def share(self) -> float:
        """Fraction of the sequences that are used for the first term."""
        return self.alpha_0 if self.alpha_0 in (0.0, 1.0) else self.split

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def for_evaluation(self) -> "EsoOrders":
        """Returns the bound for a sampler with one order, such as the one with a cache."""
        return EsoOrders(self.alpha_0)

    def is_exact(self, network: Network) -> bool:
        return self.alpha_0 == 0.0

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        diffused = u < self.share
        s = jnp.where(diffused, u / (self.share or 1.0), 1.0)
        z, rank = self.noised(process, batch, s, keys, diffused)
        nats = self.loss_at(denoiser, process, batch, z, rank, diffused)
        share = jnp.where(diffused, self.share, 1.0 - self.share)
        nats = nats / jnp.where(share > 0.0, share, 1.0)
        parts = {
            "diffusion": jnp.where(diffused, nats, 0.0),
            "sequential": jnp.where(diffused, 0.0, nats),
        }
        return nats, {"masked": masked(process, z), **parts}

    def noised(
        self, process: RevealsMasks, batch: Batch, s: Array, keys: Array, diffused: Array
    ) -> tuple[Array, Array]:
        """Draws z [B, L], clean with probability alpha_0 s, and the rank of each position [B, L].

        diffused bool [B]: the rows of the first term, in which one token is always masked
        """
        order_keys, one_keys = split_keys(keys)
        counts, length = jnp.asarray(batch.loss_mask), batch.tokens.shape[1]
        clean_Bx1, draws = self.alpha_0 * s[:, None], uniforms(order_keys, length)
        chosen = jnp.argmax(jnp.where(counts, uniforms(one_keys, length), -1.0), axis=1)
        certain = (jnp.arange(length) == chosen[:, None]) & diffused[:, None]
        # Each mask is equally likely to be the one that is always masked, so all orders are, too.
        first = (draws < clean_Bx1) & jnp.logical_not(certain)
        rank = ranks(
            draws, jnp.logical_not(counts), first,
            alpha_0=self.alpha_0, sorted_rest=jnp.logical_not(diffused)[:, None],
        )  # fmt: skip
        return prompted(batch, jnp.where(first, batch.tokens, process.mask_id)), rank

    def loss_at(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        z: Array,
        rank: Array,
        diffused: Array,
    ) -> Array:
        """Returns the first term for diffused rows and the second for others, unweighted [B]."""
        noise, t = process.is_noise(z) & batch.loss_mask, jnp.zeros(len(z))
        if self.share == 1.0:
            h = denoiser.ordered.features(z, t, rank, None)
        else:
            round = jnp.where(diffused[:, None], noise.astype(jnp.int32), rank)
            h = denoiser.ordered.predictions(batch.tokens, t, rank, round)
        nats_BxL = at_noise(
            denoiser, h, noise, reduce=token_nats, padded=True, rows=(batch.tokens,)
        )
        tokens, masks = (jnp.sum(x, axis=1) for x in (batch.loss_mask, noise))
        weight = jnp.where(diffused, self.alpha_0 * tokens / jnp.maximum(masks, 1), 1.0)
        return weight * jnp.sum(nats_BxL, axis=1)


@dataclasses.dataclass(frozen=True)
class EsoOrders:
    """Bound on -log p of Eso-LM's samples with one order per text, in nats per sequence [B].

    In an order pi each token is among the first ones with probability alpha_0. These are in random
    order, and the others follow from left to right. The sampler with a cache draws pi and then

        p(x | pi) = prod_l mu_{pi(l)}(x_{pi(0)}, ..., x_{pi(l-1)})[x_{pi(l)}],

    and one pass of the network computes all factors. By convexity -log mean_pi p(x | pi), the
    negative log-likelihood, is at most the mean of -log p(x | pi). Each prediction sees only one
    mask. Predictions of `Eso`'s first term also see masks before them: that is the bound for a
    sampler that draws a new order at each step, which excludes a cache, and has another value.

    alpha_0  as of `Eso`; it may differ from that in training
    orders   K: the mean of -log of the mean over K orders, which falls with K (arXiv:1509.00519)

    Tokens are drawn one at a time, as with many steps; for few steps use the evaluator `path`. u is
    unused. With alpha_0 = 0 there is one order.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True)
    stream_block: ClassVar[int] = 1  # of passes of masks and clean text

    alpha_0: float = 0.125
    orders: int = 1

    def __post_init__(self):
        check_clean_share("objective.alpha_0", self.alpha_0)
        if self.orders < 1:
            raise UserError(f"objective.orders must be at least 1, not {self.orders}")

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def is_exact(self, network: Network) -> bool:
        return self.alpha_0 == 0.0

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        def nats(keys: Array) -> Array:
            return jnp.sum(self.of_tokens(denoiser, process, batch, u, keys), axis=1)

        if self.orders == 1:
            return nats(keys), {}

        @jax.checkpoint
        def one(number: Array) -> Array:
            return -nats(fold_keys(keys, number))

        log_p = jax.lax.map(one, jnp.arange(self.orders))
        mean = jnp.log(self.orders) - jax.nn.logsumexp(log_p, axis=0)
        # Without tokens that count -log p is 0, but for rounding.
        return jnp.where(jnp.any(batch.loss_mask, axis=1), mean, 0.0), {}

    def of_tokens(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> Array:
        """Returns -log of each token's factor in one drawn order, 0 for others: [B, L]."""
        del process, u
        return self.along(denoiser, batch, uniforms(keys, batch.tokens.shape[1]))

    def along(self, denoiser: Denoiser, batch: Batch, draws: Array) -> Array:
        """Returns -log of each factor of p(x | pi), where draws determine the order pi: [B, L]."""
        counts = jnp.asarray(batch.loss_mask)
        rest = jnp.ones((len(draws), 1), bool)
        rank = ranks(
            draws, jnp.logical_not(counts), draws < self.alpha_0,
            alpha_0=self.alpha_0, sorted_rest=rest,
        )  # fmt: skip
        h = denoiser.ordered.predictions(batch.tokens, jnp.zeros(len(draws)), rank, rank)
        rows = (batch.tokens,)
        return at_positions(denoiser, h, counts, reduce=token_nats, padded=True, rows=rows)
