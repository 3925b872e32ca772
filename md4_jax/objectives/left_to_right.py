"""Loss of the next token, for networks that read clean text from left to right."""

import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.token_nats import token_nats
from md4_jax.protocols import Array, Batch, Denoiser, UserError


def next_token_nats(denoiser: Denoiser, batch: Batch) -> Array:
    """Returns the nats of each sequence's tokens given earlier ones, except the first [B]."""
    counts, x = batch.loss_mask[:, 1:], batch.tokens
    segments = batch.context.get("segments")
    if segments is not None:
        counts = counts & (segments[:, 1:] == segments[:, :-1])
    nats_BxL = at_positions(
        denoiser, denoiser.blocks.reading(x, jnp.zeros(len(x)))[:, :-1], counts,
        reduce=token_nats, padded=True, rows=(x[:, 1:],),
    )  # fmt: skip
    return jnp.sum(nats_BxL, axis=1)


def check_left_to_right(weight: float) -> None:
    """Raises UserError for a weight below 0."""
    if weight < 0:
        raise UserError(f"objective.left_to_right must not be negative, not {weight}")
