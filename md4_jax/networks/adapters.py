"""Low-rank adapters (LoRA, arXiv:2106.09685) merged into the matrices that they adapt."""

from typing import Any

import jax.numpy as jnp

from md4_jax.protocols import Params, UserError


def merged(params: Params, scale: float) -> Params:
    """Returns equivalent parameters without adapters: W + scale A B in place of W.

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


def check_adapters(o: Any) -> None:
    """Raises UserError for inconsistent keys of adapters."""
    if o.lora_alpha <= 0:
        raise UserError(f"network.lora_alpha must be above 0, not {o.lora_alpha}")
    if o.lora_dropout and not o.lora_rank:
        raise UserError(
            f"network.lora_dropout={o.lora_dropout} applies to the inputs of adapters, but "
            "network.lora_rank=0 makes no adapters: set network.lora_rank, or use "
            "network.dropout instead"
        )
    if o.lora_rank > o.size:
        raise UserError(
            f"network.lora_rank={o.lora_rank} must be at most network.size={o.size}: an "
            "adapter of a higher rank is larger than the matrix beside it"
        )
