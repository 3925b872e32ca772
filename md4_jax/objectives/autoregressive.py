"""Exact likelihoods of token-by-token generation: docs/families/autoregressive.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import uniforms
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Likelihood -log p(x) = sum_n -log p(x_n | x_{<n}) of a causal network, in nats [B].

    The network reads [m, x_0, ..., x_{L-2}] at time 0, and position n predicts x_n. The mask m is
    the start symbol; the rest of the process is not used, nor are u and keys. The likelihood is
    exact. With `segments` of packed documents the first token of a document is predicted from one
    token only, the end of text of the previous document.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), causal=True)

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def is_exact(self, network: Network) -> bool:
        return True

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        nats_BxL = self.of_tokens(denoiser, process, batch, u, keys)
        return jnp.sum(nats_BxL, axis=1), {}

    def of_tokens(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> Array:
        """Returns -log p(x_n | x_{<n}) of each token that counts, 0 for others: [B, L]."""
        begin = jnp.full((len(batch.tokens), 1), process.mask_id, jnp.int32)
        z = jnp.concatenate([begin, batch.tokens[:, :-1]], axis=1)
        return self._at(denoiser, batch, z, jnp.zeros(len(z)))

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Sums -log p(x_n | z) over the positions that count [B], for any z."""
        return jnp.sum(self._at(denoiser, batch, z, t), axis=1)

    def _at(self, denoiser: Denoiser, batch: Batch, z: Array, t: Array) -> Array:
        h_BxLxD, rows = denoiser.features(z, t), (batch.tokens,)
        return at_positions(
            denoiser, h_BxLxD, batch.loss_mask, reduce=token_nats, padded=True, rows=rows
        )


@dataclasses.dataclass(frozen=True)
class AlongOrder:
    """Likelihood of the masked model that unmasks one token at a time in an order, in nats [B].

        sum_l -log mu_{pi(l)}(z with x at pi(0), ..., pi(l - 1) and m elsewhere)[x_{pi(l)}]

    The orders 'left_to_right' and 'right_to_left' fix pi, so that the number is exact. 'random'
    draws pi uniformly. Its mean over pi is the any-order bound (RADD, arXiv:2406.03736, Theorem 2;
    identity M06), and the mean of exp(-nats) is the probability of x when samples are drawn one
    token at a time (M16). A time-conditioned denoiser gets the t at which 1 - alpha_t is the
    fraction of masks. u is unused.

    A sequence takes L network evaluations, so this is for evaluation and small L. The backward pass
    repeats each evaluation. UserError for another order.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))

    order: str = "random"

    def __post_init__(self):
        if self.order not in ("random", "left_to_right", "right_to_left"):
            raise UserError(
                "objective.order must be 'random', 'left_to_right' or 'right_to_left', "
                f"not {self.order!r}"
            )

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def is_exact(self, network: Network) -> bool:
        return self.order != "random"

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        size, length = batch.tokens.shape
        places = jnp.arange(length)
        if self.order == "random":
            order_BxL = jnp.argsort(uniforms(keys, length), axis=1)
        else:
            places = places if self.order == "left_to_right" else places[::-1]
            order_BxL = jnp.broadcast_to(places, (size, length))
        return self.loss_along(denoiser, process, batch, order_BxL), {}

    def loss_along(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, order_BxL: Array
    ) -> Array:
        """Returns the sum along pi [B]; order_BxL[b, l] is the l-th position to be revealed."""
        length = order_BxL.shape[1]
        rank_BxL = jnp.argsort(order_BxL, axis=1)

        @jax.checkpoint
        def one(step: Array) -> Array:
            left_BxL = (rank_BxL >= step) & batch.loss_mask
            z = jnp.where(left_BxL, process.mask_id, batch.tokens)
            part = jnp.sum(left_BxL, axis=1) / jnp.maximum(1, jnp.sum(batch.loss_mask, axis=1))
            t = process.schedule.inverse(part)
            h_BxLxD = denoiser.features(z, t)
            here = jax.lax.dynamic_slice_in_dim(order_BxL, step, 1, axis=1)
            h_Bx1xD = jnp.take_along_axis(h_BxLxD, here[..., None], axis=1)
            x_Bx1, counts_Bx1 = (
                jnp.take_along_axis(a, here, axis=1) for a in (batch.tokens, batch.loss_mask)
            )
            nats_Bx1 = token_nats(denoiser.unembed(h_Bx1xD), x_Bx1)
            return jnp.where(counts_Bx1, nats_Bx1, 0.0)[:, 0]

        return jnp.sum(jax.lax.map(one, jnp.arange(length)), axis=0)
