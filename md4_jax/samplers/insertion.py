"""Sampling of variable length that inserts masks and unmasks them: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.lengths import Grows, InsertsMasks
from md4_jax.processes.order import lowest
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform

ORDERS = ("random", "confidence")
# Largest log of the expected number of new tokens: longer than any text, and within int32.
MOST = 20.0


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Insert:
    """Unmasks masks and inserts new ones, by tau-leaping (FlexMDM, arXiv:2509.01025).

    In a step from t to s each mask is revealed with probability (b_s - b_t) / (1 - b_t), and each
    gap gets Poisson(y_g (a_s - a_t) / (1 - a_t)) masks, with y_g the network's expected number of
    missing tokens. A sample that becomes too long is truncated. A prompt is the beginning of the
    text, and nothing is inserted before its end.

    order  random, or confidence: the same number of masks is unmasked, those with the largest
           maximum probability first
    """

    needs: ClassVar[Needs] = Needs((InsertsMasks,), gaps=True)
    level: ClassVar[None] = None

    order: str = "random"
    transform: Transform = Transform()

    def __post_init__(self):
        if self.order not in ORDERS:
            known = " or ".join(map(repr, ORDERS))
            raise UserError(
                f"sample.order must be {known} with sample.name='insert', not {self.order!r}"
            )

    def __call__(
        self, denoiser: Denoiser, process: InsertsMasks, chain: Chain, s: Array, t: Array, keys
    ) -> Chain:
        of_reveal, of_token, of_gap = split_keys(keys, 3)
        times = jnp.full(chain.z.shape[:1], t)
        h, outputs = denoiser.gaps(chain.z, times)
        revealed = uniforms(of_reveal, chain.z.shape[1]) < process.unmask_probability(s, t)
        chain = self._revealed(denoiser, process, chain, h[:, :-1], revealed, of_token)
        log_mean = process.log_missing(outputs, times)
        log_mean += jnp.log(process.insert_probability(s, t))
        mean = jnp.exp(jnp.minimum(log_mean, MOST))
        new = jax.vmap(jax.random.poisson)(of_gap, mean)
        return inserted(process, chain, jnp.where(allowed(process, chain), new, 0))

    def finish(self, denoiser: Denoiser, process: InsertsMasks, chain: Chain, keys: Array) -> Chain:
        """Reveals the remaining masks at t = 0."""
        h, _ = denoiser.gaps(chain.z, jnp.zeros(chain.z.shape[:1]))
        return self._revealed(
            denoiser, process, chain, h[:, :-1], jnp.ones(chain.z.shape, bool), keys
        )

    def _revealed(self, denoiser, process, chain: Chain, h, revealed: Array, keys) -> Chain:
        """Draws the tokens of the masks marked by `revealed`, bool [B, L]."""
        logits = denoiser.unembed(h)
        tokens = draw_token(keys, self.transform(logits))
        masks = chain.z == process.mask_id
        chosen = revealed & masks
        if self.order == "confidence":
            # By the most likely token: a choice by the drawn token would favour likely tokens.
            best = probability(logits, jnp.argmax(logits, axis=-1))
            chosen = lowest(jnp.where(masks, -best, 1.0), jnp.sum(chosen, axis=1))
        confidence = jnp.where(chosen, probability(logits, tokens), chain.confidence)
        return evaluated(chain, jnp.where(chosen, tokens, chain.z), confidence)


def allowed(process: Grows, chain: Chain) -> Array:
    """Marks the gaps in which tokens may be inserted: after the prompt, bool [B, L + 1]."""
    gap = jnp.arange(chain.z.shape[1] + 1)
    count = jnp.sum(chain.z != process.absent_id, axis=1, keepdims=True)
    given = jnp.sum(chain.prompt_mask, axis=1, keepdims=True)
    return (gap >= given) & (gap <= count)


def inserted(process: InsertsMasks, chain: Chain, new: Array) -> Chain:
    """Returns the chain with new[b, g] masks inserted before symbol g of z, if there is room."""
    length = chain.z.shape[1]
    place = jnp.arange(length)
    count = jnp.sum(chain.z != process.absent_id, axis=1, keepdims=True)
    # Floats: the sum of several large counts overflows int32. They are exact up to 2^24.
    before = jnp.cumsum(new, axis=1, dtype=jnp.float32)
    before = jnp.minimum(before, length - count).astype(count.dtype)
    # New position of each old symbol; absent ones are moved beyond the end and dropped.
    target = jnp.where(place < count, place + before[:, :-1], length)
    row = jnp.arange(len(new))[:, None]
    present = place < count + before[:, -1:]
    masks = jnp.where(present, process.mask_id, process.absent_id).astype(chain.z.dtype)
    z = masks.at[row, target].set(chain.z, mode="drop")
    nothing = jnp.zeros_like(chain.confidence)
    confidence = nothing.at[row, target].set(chain.confidence, mode="drop")
    return chain._replace(z=z, confidence=confidence)
