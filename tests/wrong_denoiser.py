"""A denoiser of two tokens of three symbols that is right for no data."""

import jax.numpy as jnp

from md4_jax.protocols import Denoiser


def wrong_outputs() -> Denoiser:
    """Outputs that depend on z and t, and are right for no data."""

    def features(z, t):
        phase = 1.0 + 2.1 * jnp.sum(z * jnp.array([3, 1]), axis=1) + 3.0 * t
        return jnp.sin(phase[:, None, None] + 3.7 * jnp.arange(2)[:, None] + 5.3 * jnp.arange(3))

    return Denoiser(features, lambda h: h)
