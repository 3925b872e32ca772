"""Steps of partly masked tokens (`RevealsParts`): docs/families/partial_masking.md#sampling."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsParts
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability


def reveal_parts(
    transform: Any,
    denoiser: Denoiser,
    process: RevealsParts,
    chain: Chain,
    times: tuple[Array, Array],
    keys: Array,
) -> Chain:
    """Takes the ancestral step between the times (s, t), s < t.

    A token that agrees with the visible sub-tokens is drawn at each position. Each hidden sub-token
    is then that of the drawn token with probability (alpha_s - alpha_t) / (1 - alpha_t). The
    sub-tokens of one token are drawn together, and tokens independently of each other.
    """
    of_token, of_parts = split_keys(keys)
    chance = process.reveal_probability(*times)
    shown = process.chosen(of_parts, chain.z.shape[1], chance)
    after = _revealed(transform, denoiser, process, chain, shown, times[1], of_token)
    return after._replace(evaluations=chain.evaluations + 1)


def finish_parts(
    transform: Any,
    denoiser: Denoiser,
    process: RevealsParts,
    chain: Chain,
    time: Array,
    keys: Array,
) -> Chain:
    """Draws all tokens that still have hidden sub-tokens at this time."""
    left = process.is_noise(chain.z)

    def drawn(chain: Chain) -> Chain:
        shown = jnp.ones((*chain.z.shape, process.parts), bool)
        after = _revealed(transform, denoiser, process, chain, shown, time, keys)
        return after._replace(evaluations=chain.evaluations + jnp.any(left, axis=1))

    return jax.lax.cond(jnp.any(left), drawn, lambda chain: chain, chain)


def shown(process: Any, z: Array) -> Array:
    """Returns z with the mask in place of partly masked tokens."""
    partly = isinstance(process, RevealsParts)
    return jnp.minimum(z, process.mask_id) if partly else z


def _revealed(
    transform: Any,
    denoiser: Denoiser,
    process: RevealsParts,
    chain: Chain,
    shown: Array,
    time: Array,
    keys: Array,
) -> Chain:
    """Returns the chain with the sub-tokens that `shown` [B, L, parts] marks."""
    now = jnp.full(len(chain.z), time)
    # Before top-k and top-p, which could otherwise leave no token that agrees with z.
    logits = transform(process.clean_logits(denoiser(chain.z, now), chain.z, now))
    tokens = draw_token(keys, logits)
    noise = process.is_noise(chain.z)
    z = jnp.where(noise, process.hide(tokens, process.hidden(chain.z) & ~shown), chain.z)
    done = noise & ~process.is_noise(z)
    confidence = jnp.where(done, probability(logits, tokens), chain.confidence)
    return chain._replace(z=z, confidence=confidence.astype(chain.confidence.dtype))
