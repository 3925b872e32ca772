"""Tokens that the network predicts at masks, for losses of its own texts."""

import jax.numpy as jnp

from md4_jax.objectives.head import at_noise
from md4_jax.objectives.sdtt import drawn
from md4_jax.protocols import Array, Denoiser

FILLS = ("most_likely", "drawn")


def predicted(denoiser: Denoiser, h: Array, chosen: Array, fill: str, keys: Array) -> Array:
    """Returns the network's tokens at the chosen positions of features h: int32 [B, L].

    fill  most_likely, or drawn from the network's distribution with keys [B]
    """
    if fill == "drawn":
        return drawn(denoiser, h, chosen, keys)
    # Integers below 2^24 are exact in float32.
    best = lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.float32)  # noqa: E731
    return at_noise(denoiser, h, chosen, reduce=best, rows=()).astype(jnp.int32)
