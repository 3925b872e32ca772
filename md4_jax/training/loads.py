"""Balance of experts, as a training step sees it (docs/networks.md)."""

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Params

# The names of networks/experts.py.
ROUTER, LOAD = "router", "load"


def meters(params: Params) -> Params:
    """Returns zeros [..., E] beside the matrix of each router, nested as params; {} without one.

    A network that also has them as parameters counts the choices of experts in their gradient.
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
    """Computes what the log shows of the counts of all layers; {} without experts.

    expert_load      tokens of the fullest expert over those of a mean one, the mean over layers:
                     1 if all have as many, at most the number of experts over those of a token.
                     Less 1 it is MaxVio (arXiv:2408.15664)
    expert_load_max  the same of the layer where it is largest
    experts_idle     share of the experts of all layers that no token took
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
