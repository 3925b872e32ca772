"""Likelihood of block diffusion over all orders of a block: docs/families/block_diffusion.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import CAPACITIES, at_positions
from md4_jax.objectives.in_blocks import check_blocks, in_blocks
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys, uniforms
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Network, UserError

LARGEST_BLOCK = 12
# Replaces log 0; unlike -inf it has a gradient.
LOG_ZERO = -1e30


@dataclasses.dataclass(frozen=True)
class EveryOrder:
    """Likelihood of block diffusion that draws one token at a time, in nats per sequence [B].

    Blocks come from left to right. The tokens of a block come in an order pi that is uniform over
    all orders, so that (identity M16)

        -log p(x) = -sum_b log mean_pi prod_l mu_{pi(l)}(x_{<b}, x_{pi(0)}, ..., x_{pi(l-1)}).

    The objective `block` is a bound on it: by convexity, -log mean_pi <= mean_pi -log.

    orders  0: exact. All orders that begin with the same set S of tokens share one number,

                f(S) = 1/|S| sum_{n in S} f(S without n) mu_n(S without n)[x_n],   f({}) = 1,

            so that all orders need only 2^block - 1 network calls. K: the mean over K random
            orders of each block, in K block calls. The mean of its -log is a bound between -log p
            and that of `block`, and falls with K (arXiv:1509.00519)

    A time-conditioned denoiser gets the t at which 1 - alpha_t is the fraction of masks in the
    block. u is unused. For evaluation: the backward pass repeats each network evaluation. Tokens
    that do not count are always known. UserError for orders=0 and more than 12 tokens per block.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), blockwise=True)

    block: int = 4
    orders: int = 0

    def __post_init__(self):
        for key, least in (("block", 1), ("orders", 0)):
            if getattr(self, key) < least:
                raise UserError(
                    f"objective.{key} must be at least {least}, not {getattr(self, key)}"
                )
        if not self.orders and self.block > LARGEST_BLOCK:
            raise UserError(
                f"objective.block={self.block} with objective.orders=0 needs 2^{self.block} calls "
                f"of the network for each sequence: use blocks of at most {LARGEST_BLOCK} tokens, "
                "or a bound from some random orders, such as objective.orders=8"
            )

    def is_bound(self, process: RevealsMasks) -> bool:
        return True

    def is_exact(self, network: Network) -> bool:
        return self.orders == 0

    def check_length(self, length: int, key: str = "data.length") -> None:
        """Raises UserError, with the length's key, unless blocks divide the length."""
        check_blocks(self.block, length, key)

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        if self.orders:
            log_p_BxG = self._over_some(denoiser, process, batch, keys)
        else:
            log_p_BxG = self._over_all(denoiser, process, batch)
        counts_BxG = jnp.any(in_blocks(batch.loss_mask, self.block), axis=2)
        # Without tokens that count log p is 0, but for rounding.
        return -jnp.sum(jnp.where(counts_BxG, log_p_BxG, 0.0), axis=1), {}

    def _over_all(self, denoiser: Denoiser, process: RevealsMasks, batch: Batch) -> Array:
        """Computes log f of all tokens of each block, [B, G], from smaller sets to larger ones."""
        places = jnp.arange(self.block)
        shape = in_blocks(batch.tokens, self.block).shape

        @jax.checkpoint
        def one(log_f: Array, known: Array) -> tuple[Array, None]:
            """Adds the terms of the set with these bits to f of the sets with one more token."""
            has = (known >> places) & 1 == 1
            each = jnp.broadcast_to(has, shape)
            nats = self._nats(denoiser, process, batch, each, jnp.logical_not(each))
            share = log_f[known][..., None] - nats - jnp.log(jnp.sum(has) + 1.0)
            more = jnp.moveaxis(jnp.where(has, LOG_ZERO, share), -1, 0)
            larger = known | (1 << places)
            return log_f.at[larger].set(jnp.logaddexp(log_f[larger], more)), None

        dtype = jnp.result_type(float)
        first = jnp.full((2**self.block, *shape[:2]), LOG_ZERO, dtype).at[0].set(0.0)
        return jax.lax.scan(one, first, jnp.arange(2**self.block - 1))[0][-1]

    def _over_some(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, keys: Array
    ) -> Array:
        """Computes log mean_pi of `orders` random orders of each block, [B, G]."""
        length = batch.tokens.shape[1]

        @jax.checkpoint
        def step(rank: Array, number: Array) -> Array:
            next_one, part = rank == number, (rank.shape[1] / length,)
            nats = self._nats(denoiser, process, batch, rank < number, next_one, part)
            return jnp.sum(nats, axis=2)

        def one(order: Array) -> Array:
            own = fold_keys(keys, order)
            draws = in_blocks(uniforms(own, length), self.block)
            rank_BxGxN = jnp.argsort(jnp.argsort(draws, axis=2), axis=2)
            nats = jax.lax.map(lambda number: step(rank_BxGxN, number), jnp.arange(self.block))
            return -jnp.sum(nats, axis=0)

        log_p = jax.lax.map(one, jnp.arange(self.orders))
        return jax.nn.logsumexp(log_p, axis=0) - jnp.log(self.orders)

    def _nats(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        batch: Batch,
        known: Array,
        asked: Array,
        capacities: tuple[float, ...] = CAPACITIES,
    ) -> Array:
        """Returns -log mu_n[x_n] of the tokens `asked` given the `known` ones: [B, G, block]."""
        x = batch.tokens
        known_BxL, asked_BxL = (
            part.reshape(len(x), -1)[:, : x.shape[1]] for part in (known, asked)
        )
        hidden = batch.loss_mask & jnp.logical_not(known_BxL)
        masks, tokens = (
            jnp.sum(in_blocks(part, self.block), axis=2) for part in (hidden, batch.loss_mask)
        )
        t_BxG = process.schedule.inverse(masks / jnp.maximum(tokens, 1))
        z = jnp.where(hidden, process.mask_id, x)
        nats = at_positions(
            denoiser, denoiser.blocks.features(z, t_BxG, x, self.block), hidden & asked_BxL,
            reduce=token_nats, padded=True, rows=(x,), capacities=capacities,
        )  # fmt: skip
        return in_blocks(nats, self.block)
