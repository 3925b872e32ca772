"""Losses of texts that the network has filled in itself."""

from typing import Any

import jax.numpy as jnp

from md4_jax.objectives.head import at_noise
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.noising import SMALLEST_TIME, prompted
from md4_jax.objectives.sdtt import drawn
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Batch, Denoiser, UserError

FILLS = ("most_likely", "drawn")


class OwnTexts:
    """Base of losses with a second pass over a text in which the network has filled in masks.

    fill        token in place of a mask, one of FILLS
    least_time  t is uniform in [least_time, 1]
    """

    fill: str
    least_time: float

    def is_bound(self, process: RevealsMasks) -> bool:
        return False

    def for_evaluation(self) -> MD4:
        """Returns MD4's bound."""
        return MD4()

    def noised(
        self, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, Array, Array]:
        """Returns (z_t [B, L], t [B], keys [B] for other draws), given uniforms u [B]."""
        noise_keys, own = split_keys(keys)
        t = jnp.maximum(self.least_time + (1.0 - self.least_time) * u, SMALLEST_TIME)
        return prompted(batch, process.corrupt(noise_keys, batch.tokens, t)), t, own


def check_options(objective: Any) -> None:
    """Raises UserError for impossible options of an `OwnTexts`."""
    fill, least = objective.fill, objective.least_time
    if fill not in FILLS:
        raise UserError(f"objective.fill must be {' or '.join(map(repr, FILLS))}, not {fill!r}")
    if not 0 <= least < 1:
        raise UserError(f"objective.least_time must lie in [0, 1), not {least}")


def predicted(denoiser: Denoiser, h: Array, chosen: Array, fill: str, keys: Array) -> Array:
    """Returns the network's tokens at the chosen positions of features h: int32 [B, L].

    fill  most_likely, or drawn from the network's distribution with keys [B]
    """
    if fill == "drawn":
        return drawn(denoiser, h, chosen, keys)
    # Integers below 2^24 are exact in float32.
    best = lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.float32)  # noqa: E731
    return at_noise(denoiser, h, chosen, reduce=best, rows=()).astype(jnp.int32)
