"""Low-rank adapters (arXiv:2106.09685) folded into the matrices beside them."""

import jax.numpy as jnp

from md4_jax.protocols import Params


def merged(params: Params, scale: float) -> Params:
    """Returns parameters without adapters that compute the same: W + scale A B in place of W.

    scale: alpha / rank. The sum is float32, and is rounded to the type of W.
    """
    if not isinstance(params, dict):
        return params
    names = ("lora_a", "lora_b")
    found = {name: merged(x, scale) for name, x in params.items() if name not in names}
    if names[0] in params:
        left, right = (params[name]["kernel"].astype(jnp.float32) for name in names)
        kernel = found["kernel"]
        change = scale * jnp.matmul(left, right, precision="highest")
        found["kernel"] = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
    return found
