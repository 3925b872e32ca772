"""Editing: replacement of tokens that were drawn before: docs/samplers.md."""

from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability


def replaced(
    process: RevealsMasks, chain: Chain, outputs: Array, tokens: Array, limit: float
) -> Array:
    """Returns which visible tokens are replaced by a different, likely token: bool [B, L].

    tokens  int32 [B, L], drawn from the network's outputs [B, L, V] at each position
    limit   least probability of the new token, before temperature, top-k and top-p

    Masks and tokens of the prompt are never marked.
    """
    free = ~process.is_noise(chain.z) & ~chain.prompt_mask
    return free & (tokens != chain.z) & (probability(outputs, tokens) >= limit)


def settled(
    denoiser: Denoiser,
    process: RevealsMasks,
    chain: Chain,
    keys: Array,
    *,
    transform: Any,
    limit: float,
    passes: int,
) -> Chain:
    """Replaces tokens of a chain without masks until a pass replaces none (LLaDA2.1).

    passes  largest number of network evaluations per sequence. keys: one for each sequence
    """

    def edit(state: tuple[Array, Array, Chain]) -> tuple[Array, Array, Chain]:
        number, active, chain = state
        own = fold_keys(keys, number + 1)
        outputs = denoiser(chain.z, jnp.zeros(len(chain.z)))
        tokens = draw_token(own, transform(outputs))
        changed = active[:, None] & replaced(process, chain, outputs, tokens, limit)
        after = chain._replace(
            z=jnp.where(changed, tokens, chain.z),
            confidence=jnp.where(changed, probability(outputs, tokens), chain.confidence),
            evaluations=chain.evaluations + active,
        )
        return number + 1, jnp.any(changed, axis=1), after

    free = jnp.any(~chain.prompt_mask, axis=1)
    return jax.lax.while_loop(
        lambda state: (state[0] < passes) & jnp.any(state[1]), edit, (jnp.int32(0), free, chain)
    )[2]
