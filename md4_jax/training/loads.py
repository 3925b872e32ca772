"""Load balance of experts in a training step (docs/networks.md)."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Params

# The names of networks/experts.py.
ROUTER, LOAD = "router", "load"


def meters(params: Params) -> Params:
    """Returns zeros [..., E] for each router matrix, nested as params; {} without routers.

    A network that gets them as extra parameters returns the counts of chosen experts as their
    gradient.
    """
    found = {}
    for name, x in params.items():
        if not isinstance(x, dict):
            continue
        if name == ROUTER:
            kernel = x["kernel"]
            part = {LOAD: jnp.zeros((*kernel.shape[:-2], kernel.shape[-1]))}
        else:
            part = meters(x)
        if part:
            found[name] = part
    return found


def figures(counts: Params) -> dict[str, Array]:
    """Computes the logged metrics from the counts of all layers; {} without experts.

    expert_load      tokens of the fullest expert divided by the mean over experts, averaged over
                     layers: 1 if balanced, at most the number of experts divided by the number
                     per token. Minus 1 it is MaxVio (arXiv:2408.15664)
    expert_load_max  the largest value over layers
    experts_idle     fraction of the experts of all layers without any token
    """
    layers = [x.reshape(-1, x.shape[-1]) for x in jax.tree.leaves(counts)]
    if not layers:
        return {}
    counts = jnp.concatenate(layers)
    load = jnp.max(counts, axis=-1) / jnp.mean(counts, axis=-1)
    return {
        "expert_load": jnp.mean(load),
        "expert_load_max": jnp.max(load),
        "experts_idle": jnp.mean((counts == 0).astype(jnp.float32)),
    }
