"""Steps of masks with a continuous state (`ObservesMasks`): docs/families/candi.md#sampling."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import ObservesMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability


def reveal_observed(
    transform: Any,
    denoiser: Denoiser,
    process: ObservesMasks,
    chain: Chain,
    times: tuple[Array, Array],
    keys: Array,
) -> Chain:
    """Takes the ancestral step between the times (s, t), s < t, of z and of y.

    A token is drawn for each mask from the denoiser at (z_t, y_t). With the probability of a reveal
    z_s is this token. Otherwise y_s is drawn from q(y_s | y_t, token), and the token is discarded.
    With the optimal network this is the exact distribution of (z_s, y_s) at each position given
    (z_t, y_t); positions are drawn independently.
    """
    of_reveal, of_token, of_noise = split_keys(keys, 3)
    before, now = (jnp.full(chain.z.shape[:1], time) for time in times)
    revealed = uniforms(of_reveal, chain.z.shape[1]) < process.reveal_probability(*times)
    after, tokens = _revealed(transform, denoiser, process, chain, revealed, now, of_token)
    observed = process.earlier(of_noise, chain.observed, tokens, before, now)
    return after._replace(observed=observed, evaluations=chain.evaluations + 1)


def finish_observed(
    transform: Any,
    denoiser: Denoiser,
    process: ObservesMasks,
    chain: Chain,
    time: Array,
    keys: Array,
) -> Chain:
    """Draws the remaining masks at this time, and drops the continuous state."""
    left = process.is_noise(chain.z)

    def drawn(chain: Chain) -> Chain:
        now = jnp.full(len(chain.z), time)
        after, _ = _revealed(transform, denoiser, process, chain, left, now, keys)
        return after._replace(evaluations=chain.evaluations + jnp.any(left, axis=1))

    chain = jax.lax.cond(jnp.any(left), drawn, lambda chain: chain, chain)
    return chain._replace(observed=None)


def _revealed(
    transform: Any,
    denoiser: Denoiser,
    process: ObservesMasks,
    chain: Chain,
    revealed: Array,
    now: Array,
    keys: Array,
) -> tuple[Chain, Array]:
    """Returns (chain with the masks that `revealed` marks drawn, a token for each position)."""
    logits = denoiser(process.seen(chain.z, chain.observed, now), now)
    evidence = process.evidence(chain.observed, now)
    logits = logits if evidence is None else logits + evidence
    tokens = draw_token(keys, transform(logits))
    chosen = revealed & process.is_noise(chain.z)
    confidence = jnp.where(chosen, probability(logits, tokens), chain.confidence)
    z = jnp.where(chosen, tokens, chain.z)
    return chain._replace(z=z, confidence=confidence.astype(chain.confidence.dtype)), tokens
