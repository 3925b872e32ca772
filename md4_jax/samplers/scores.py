"""Scores of positions, and how many masks a step reveals, for orders by confidence."""

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import entropy, log_probability
from md4_jax.samplers.reveal import masks_left

SCORES = ("probability", "margin", "entropy")
RULES = ("count", "threshold", "factor", "entropy")
SPLITS = ("grid", "even", "floor")
# Time at which Dream's steps end, by its default.
EPS = 1e-3
# Below every score, and finite: positions that are no masks have minus infinity.
LEAST = -1e30


def score_of(name: str, logits: Array, tokens: Array) -> Array:
    """Returns a score of SCORES at each position, [B, L], from logits of tokens [B, L]."""
    if name == "probability":
        return jnp.maximum(log_probability(logits, tokens), LEAST)
    if name == "entropy":
        return -entropy(logits)
    log_mu = jax.nn.log_softmax(logits, axis=-1)
    best, second = jnp.moveaxis(jax.lax.top_k(log_mu, 2)[0], -1, 0)
    return jnp.exp(best) - jnp.exp(second)


def probabilities(score: Array) -> Array:
    """Returns the probabilities of log-probabilities, but LEAST unchanged."""
    return jnp.where(score > LEAST, jnp.exp(score), score)


def by_grid(process: RevealsMasks, chain: Chain, s: Array) -> Array:
    """Returns how many masks to reveal so that floor((1 - alpha_s) n) are left: [B]."""
    return jnp.sum(process.is_noise(chain.z), axis=1) - masks_left(process, chain, s)


def rounded_down(process: RevealsMasks, chain: Chain, s: Array, t: Array) -> Array:
    """Returns the expected number of masks that a step of the process reveals, rounded down: [B].

    The times are moved to end at EPS, and the last step reveals the rest (Dream's code).
    """
    masks = jnp.sum(process.is_noise(chain.z), axis=1)
    begin, end = (EPS + (1.0 - EPS) * x for x in (t, s))
    share = jnp.where(s > 0, 1.0 - end / begin, 1.0)
    return jnp.floor(masks * share).astype(jnp.int32)


def holds(rule: str, measure: Array, limit: Array | float) -> Array:
    """Returns which positions, sorted by score, a rule of `Confidence` reveals: bool [B, L].

    measure: probabilities or margins; for the rule entropy, entropies
    """
    if rule == "entropy":
        return jnp.cumsum(measure, axis=1) - jax.lax.cummax(measure, axis=1) <= limit
    if rule == "threshold":
        return measure >= limit
    number = jnp.arange(1, measure.shape[1] + 1)
    return jnp.cumprod((number + 1) * (1.0 - measure) <= limit, axis=1) > 0
