"""First tokens of blocks, from networks that predict the token after those that they read."""

from typing import Any

import jax.numpy as jnp

from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform


def with_first(
    denoiser: Denoiser,
    process: Any,
    transform: Transform,
    chain: Chain,
    of_next: tuple[Array, Array],
    keys: Array | None,
) -> Chain:
    """Writes a token to the first position of a block, if that is a mask.

    of_next  (h [B, D], bool []), features of this token, and whether to write it
    keys     [B], with which it is drawn; None: it is the most likely token
    """
    h, follows = of_next
    logits = denoiser.unembed(h)
    if keys is None:
        token = jnp.argmax(transform(logits), axis=-1).astype(chain.z.dtype)
    else:
        token = draw_token(keys, transform(logits)[:, None])[:, 0]
    put = follows & process.is_noise(chain.z[:, 0])
    confidence = jnp.where(put, probability(logits, token), chain.confidence[:, 0])
    return chain._replace(
        z=chain.z.at[:, 0].set(jnp.where(put, token, chain.z[:, 0])),
        confidence=chain.confidence.at[:, 0].set(confidence),
    )
